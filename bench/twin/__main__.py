# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.twin`: see benchmark.py."""

import typer

from bench.twin.benchmark import main

typer.run(main)
