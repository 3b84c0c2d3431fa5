"""Who belongs to a federation: devices by number, each bound by its key to the node that Flower knows it as."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from glocal.errors import InputError, brief
from glocal.keep import write_json

ROSTER = "roster.json"


class Entry(NamedTuple):
    """One device; `node` is 0 until the server has registered its key."""

    number: int
    name: str
    key: str
    node: int = 0


def read_roster(folder: Path) -> dict[int, Entry]:
    """All devices of a server's folder."""
    path = folder / ROSTER
    if not path.exists():
        raise InputError(f"deploy: {folder} is no server's folder; give one that `glocal deploy init` made")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("a list was expected")
        entries = [Entry(**row) for row in rows]
        _require_sound(entries)
    except (ValueError, TypeError) as error:
        raise InputError(f"deploy: {path} does not hold what glocal writes there ({brief(error)}); restore it") from error
    return {entry.number: entry for entry in entries}


def _require_sound(entries: list[Entry]) -> None:
    for entry in entries:
        if [type(value) for value in entry] != [int, str, str, int]:
            raise TypeError(f"{entry.number}: number, name, key and node were expected")
    for field in ("number", "name", "key"):
        if len({getattr(entry, field) for entry in entries}) < len(entries):
            raise ValueError(f"two devices have one {field}")


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Hold a folder's roster from reading it to writing it; whoever else changes it waits, and no device is lost or doubled."""
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def write_roster(folder: Path, roster: dict[int, Entry]) -> None:
    """Replace the roster."""
    write_json(folder / ROSTER, [entry._asdict() for _, entry in sorted(roster.items())])
