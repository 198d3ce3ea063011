# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.train CONFIG`: see command.py."""

from examples.train.command import main

main()
