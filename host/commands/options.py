# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have: those that say which world a command makes."""

from __future__ import annotations

from typing import Annotated

import typer

from moeos.bootstrap import BACKENDS

Backend = Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}.")]
Deadline = Annotated[float, typer.Option(help="Seconds after which a wait for another rank fails.")]
VirtualRanks = Annotated[
    int | None, typer.Option(help="Ranks of this one process, on its cores or its GPU.")
]
