# SPDX-License-Identifier: Apache-2.0
"""`python -m moeos`: the command `moeos` where its script is not installed."""

from moeos.cli.start import main

main()
