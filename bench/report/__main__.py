# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.report`: see report.py."""

import typer

from bench.report.report import main

typer.run(main)
