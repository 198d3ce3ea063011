# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.gpu`: see benchmark.py."""

import typer

from bench.gpu.benchmark import main

typer.run(main)
