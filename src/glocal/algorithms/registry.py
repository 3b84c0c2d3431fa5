"""Every algorithm by its word, as settings and the command line name it.

Other packages add theirs through the entry-point group `glocal.algorithms`.
"""

from importlib.metadata import EntryPoint, entry_points

from glocal.algorithms import ALGORITHMS
from glocal.algorithms.contract import Algorithm
from glocal.core.errors import InputError, describe_error, suggest_name

GROUP = "glocal.algorithms"


def known_algorithms() -> dict[str, type[Algorithm]]:
    """All algorithms, glocal's own first; two of one name are refused."""
    known = {kind.word: kind for kind in ALGORITHMS}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if entry.name in known:
            raise InputError(
                f"algorithms: '{entry.name}' of {_package(entry)} is the name of another one; "
                "uninstall one of the two packages, or rename it"
            )
        known[entry.name] = _load(entry)
    return known


def find_algorithm(word: str) -> type[Algorithm]:
    """The class of an algorithm by its word."""
    known = known_algorithms()
    if word not in known:
        raise InputError(f"settings: algorithm is '{word}'; {suggest_name(word, known)}")
    return known[word]


def _load(entry: EntryPoint) -> type[Algorithm]:
    try:
        kind = entry.load()
    except Exception as error:  # another package may raise anything when it is imported
        raise InputError(
            f"algorithms: '{entry.name}' of {_package(entry)} cannot be imported "
            f"({describe_error(error)}); reinstall or uninstall it"
        ) from error
    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        raise InputError(
            f"algorithms: '{entry.name}' of {_package(entry)} is no subclass of "
            "glocal.Algorithm; correct the package's entry point"
        )
    return kind


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unknown package"
