# SPDX-License-Identifier: Apache-2.0
"""`python -m moeos.bench.gpu`: see benchmark.py."""

import typer

from moeos.bench.gpu.benchmark import main

typer.run(main)
