# SPDX-License-Identifier: Apache-2.0
"""`python -m moeos.bench.report`: see report.py."""

import typer

from moeos.bench.report.report import main

typer.run(main)
