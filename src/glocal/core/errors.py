"""Errors that a user can correct: each says what was given, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten


class InputError(ValueError):
    """The input is wrong; the command line prints the message as one line and exits with code 2."""


class DivergedError(InputError):
    """Training diverged: a loss is not finite. A study adds the `experiment` and the `seed`."""

    experiment: str = ""
    seed: int = 0


class GlocalWarning(UserWarning):
    """A message of one line that the user should see once; the work continues."""


def describe_error(error: BaseException) -> str:
    r"""An error of another library in one short line.

    >>> describe_error(ValueError("no  way"))
    'ValueError: no way'
    >>> describe_error(ValueError("\x1b[1mno\n\nway"))
    'ValueError: [1mno way'
    """
    message = f"{type(error).__name__}: {error}"
    printable = [character if character.isprintable() else " " for character in message]
    return shorten("".join(printable), 160, placeholder=" ...")


def suggest_name(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest known name first, then all of them.

    >>> suggest_name("roundz", ["rounds", "clients_per_round"])
    "did you mean 'rounds'? known: clients_per_round, rounds"
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
