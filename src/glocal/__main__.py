"""`python -m glocal` is the command `glocal`."""

from glocal.cli import main

main()
