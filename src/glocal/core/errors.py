"""What a user can put right: every such error says what was given, what was expected and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten


class InputError(ValueError):
    """The input is at fault; the command line prints the message as one line and exits with code 2."""


class DivergedError(InputError):
    """Training left all bounds: a loss is not finite; `experiment` and `seed` say whose it was in a study."""

    experiment: str = ""
    seed: int = 0


class GlocalWarning(UserWarning):
    """Something the user should see once, in one line; the work goes on."""


def describe_error(error: BaseException) -> str:
    r"""An error of somebody else's code in a few words.

    >>> describe_error(ValueError("no  way"))
    'ValueError: no way'
    >>> describe_error(ValueError("\x1b[1mno\n\nway"))
    'ValueError: [1mno way'
    """
    told = "".join(
        sign if sign.isprintable() else " " for sign in f"{type(error).__name__}: {error}"
    )
    return shorten(told, 160, placeholder=" ...")


def suggest_name(given: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest known one first, then all of them.

    >>> suggest_name("roundz", ["rounds", "clients_per_round"])
    "did you mean 'rounds'? known: cohort, rounds"
    """
    names = sorted(known)
    close = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
