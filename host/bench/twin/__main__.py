# SPDX-License-Identifier: Apache-2.0
"""`python -m moeos.bench.twin`: see benchmark.py."""

import typer

from moeos.bench.twin.benchmark import main

typer.run(main)
