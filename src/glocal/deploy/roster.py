"""Who belongs to a federation: devices by number, each with the key by which it is known."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from glocal.core.errors import InputError, brief, nearest
from glocal.core.files import write_json

ROSTER = "roster.json"


class Entry(NamedTuple):
    """One device; one that was revoked stays on the list, so that its name and key are not used again."""

    number: int
    name: str
    key: str
    revoked: bool = False

    @property
    def ssh_key(self) -> str:
        """Its key's kind and number, without a comment that somebody may have added."""
        return " ".join(self.key.split()[:2])


def active(roster: dict[int, Entry]) -> dict[int, Entry]:
    """Those that may connect."""
    return {number: entry for number, entry in roster.items() if not entry.revoked}


def read_roster(folder: Path) -> dict[int, Entry]:
    """All devices of a server's folder, those that were revoked included."""
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
        if [type(value) for value in entry] != [int, str, str, bool]:
            raise TypeError(f"{entry.number}: number, name, key and revoked were expected")
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


def revoke(folder: Path, name: str) -> Entry:
    """Let a device in no longer; a running server refuses its next request."""
    with changing(folder):
        roster = read_roster(folder)
        named = {entry.name: entry for entry in roster.values()}
        if name not in named:
            raise InputError(f"deploy: '{name}' is no device of {folder}; {nearest(name, named)}")
        entry = named[name]
        if entry.revoked:
            raise InputError(f"deploy: '{name}' was revoked before; make another with add-device")
        write_roster(folder, {**roster, entry.number: entry._replace(revoked=True)})
    return entry
