"""`python -m moeos`: the command `moeos` where its script is not installed."""

from moeos.cli.app import main

main()
