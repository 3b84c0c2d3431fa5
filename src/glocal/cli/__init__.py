"""The command line: a thin layer that reads options, shows progress and prints tables."""

from glocal.cli.entry import main

__all__ = ["main"]
