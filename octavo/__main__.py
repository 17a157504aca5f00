"""`python -m octavo` is the command `octavo`."""

from .cli.main import main

main()
