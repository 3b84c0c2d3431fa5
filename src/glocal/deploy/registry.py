"""Who belongs to a federation: devices by number, each with the key by which it is known."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from glocal.core.errors import InputError, describe_error, suggest_name
from glocal.core.files import write_json

REGISTRY = "roster.json"


class RegistryEntry(NamedTuple):
    """One device; one that was revoked stays on the list, so that its name and key are not used again."""

    number: int
    name: str
    key: str
    revoked: bool = False

    @property
    def ssh_key(self) -> str:
        """Its key's kind and number, without a comment that somebody may have added."""
        return " ".join(self.key.split()[:2])


def active_entries(registry: dict[int, RegistryEntry]) -> dict[int, RegistryEntry]:
    """Those that may connect."""
    return {number: entry for number, entry in registry.items() if not entry.revoked}


def read_registry(folder: Path) -> dict[int, RegistryEntry]:
    """All devices of a server's folder, those that were revoked included."""
    path = folder / REGISTRY
    if not path.exists():
        raise InputError(
            f"deploy: {folder} is no server's folder; give one that `glocal deploy init` made"
        )
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("a list was expected")
        entries = [RegistryEntry(**row) for row in rows]
        _validate_entries(entries)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"deploy: {path} does not hold what glocal writes there ({describe_error(error)}); restore it"
        ) from error
    return {entry.number: entry for entry in entries}


def _validate_entries(entries: list[RegistryEntry]) -> None:
    for entry in entries:
        if [type(value) for value in entry] != [int, str, str, bool]:
            raise TypeError(f"{entry.number}: number, name, key and revoked were expected")
    for field in ("number", "name", "key"):
        if len({getattr(entry, field) for entry in entries}) < len(entries):
            raise ValueError(f"two devices have one {field}")


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's roster from reading it to writing it; whoever else changes it waits, and no device is lost or doubled."""
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def write_registry(folder: Path, registry: dict[int, RegistryEntry]) -> None:
    """Replace the roster."""
    write_json(folder / REGISTRY, [entry._asdict() for _, entry in sorted(registry.items())])


def revoke(folder: Path, name: str) -> RegistryEntry:
    """Let a device in no longer; a running server refuses its next request."""
    with locked_folder(folder):
        registry = read_registry(folder)
        named = {entry.name: entry for entry in registry.values()}
        if name not in named:
            raise InputError(
                f"deploy: '{name}' is no device of {folder}; {suggest_name(name, named)}"
            )
        entry = named[name]
        if entry.revoked:
            raise InputError(f"deploy: '{name}' was revoked before; make another with add-device")
        write_registry(folder, {**registry, entry.number: entry._replace(revoked=True)})
    return entry
