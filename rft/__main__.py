"""`python -m rft`: the program."""

from rft.cli.main import main

main()
