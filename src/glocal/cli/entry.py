"""The entry point: an error becomes one line and an exit code."""

import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from glocal.cli.commands import app
from glocal.cli.typer_compat import UsageError
from glocal.core.errors import GlocalWarning, InputError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: exit code 2 and one line for a user's error, 130 for Ctrl-C."""
    run_app(app, arguments)


def run_app(commands: typer.Typer, arguments: Sequence[str] | None = None) -> None:
    """Run a command line, and exit with its code: 2 and one line for wrong input, 130 for Ctrl-C.

    Packages of studies with commands of their own use it too.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # model.name = "mine:build" finds mine.py in the working directory
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    log, lines = logging.getLogger("glocal"), _UniqueLines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("once", GlocalWarning)
        warnings.showwarning = _show_warning
        code = _run_command(commands, arguments)
    log.removeHandler(lines)
    sys.exit(code if isinstance(code, int) else 0)


def _run_command(commands: typer.Typer, arguments: Sequence[str] | None) -> Any:
    """Run a command; its exit code."""
    try:
        return commands(args=arguments, standalone_mode=False)
    except UsageError as error:
        return _print_error(f"command line: {error.format_message()}")
    except InputError as error:
        return _print_error(str(error))
    except OSError as error:
        return _print_error(
            f"disk: {error.strerror or error} ({error.filename}); "
            "check the path and its permissions"
        )
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return 130


def _print_error(message: str) -> int:
    print("glocal: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    """glocal's warnings as one line; others are for developers and are not printed."""
    if issubclass(category, GlocalWarning):
        print(f"glocal: {message}", file=sys.stderr)


class _UniqueLines(logging.Handler):
    """The library's log messages, each line once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self.seen:
            self.seen.add(line)
            print(f"glocal: {line}", file=sys.stderr)
