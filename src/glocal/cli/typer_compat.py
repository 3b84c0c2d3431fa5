"""What differs between versions of typer: the one that Flower takes and the newest both work."""

from typing import Any

import typer
import typer.core

# else typer 0.20 escapes brackets in help texts for rich, which never sees them
typer.core.HAS_RICH = False

# Every usage mistake is an error of this class, which has no public name: it is click's UsageError
# up to typer 0.25; since 0.26 it is typer's own, and click is not installed.
UsageError: Any = typer.BadParameter.__mro__[1]


def require_command(context: typer.Context) -> None:
    """Without a command, print the help and exit with code 2.

    typer's own `no_args_is_help` raises an error that has no public name.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
