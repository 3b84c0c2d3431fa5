"""Errors that a user can correct: each says what was given, what was expected and what to do."""

from collections.abc import Iterable, Sized
from difflib import get_close_matches
from textwrap import shorten

_MAX_NAMES = 20  # known names that a hint lists
_PRINTABLE = 10**20  # larger numbers are not printed in full


class InputError(ValueError):
    """The input is wrong; the command line prints the message as one line and exits with code 2.

    >>> import glocal
    >>> try:
    ...     glocal.SGD(lr=-1)
    ... except glocal.InputError as error:
    ...     print(error)
    optimizer: lr is -1; a number above 0 was expected
    """


class DivergedError(InputError):
    """Training diverged: a loss is not finite. A study adds the `experiment` and the `seed`."""

    experiment: str = ""
    seed: int = 0


class GlocalWarning(UserWarning):
    """A message of one line that the user should see once; the work continues.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", GlocalWarning)
    ...     warnings.warn("disk: it is nearly full", GlocalWarning, stacklevel=1)
    >>> caught[0].category.__name__
    'GlocalWarning'
    """


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


def describe_value(value: object) -> str:
    """A value of the user's in a few words.

    >>> describe_value(3.5), describe_value([1, 2]), describe_value(None)
    ('3.5', 'a list of length 2', 'None')
    >>> describe_value(dict), describe_value(10**30)
    ('the class dict', 'a number of more than 20 digits')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, int) and abs(value) >= _PRINTABLE:
        return "a number of more than 20 digits"
    if value is None or isinstance(value, bool | int | float | str):
        return shorten(repr(value), 60, placeholder=" ...")
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, Sized):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a {type(value).__name__}"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the nearest known name first, then all of them.

    >>> suggest_name("roundz", ["rounds", "clients_per_round"])
    "did you mean 'rounds'? known: clients_per_round, rounds"
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    shown = names[:_MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{hint}known: {', '.join(shown) or 'none'}{more}"
