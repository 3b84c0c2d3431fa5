"""The command line: a thin layer that reads words, shows progress and prints tables."""

from glocal.cli.entry import main

__all__ = ["main"]
