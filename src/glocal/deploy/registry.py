"""The registered clients of a federation: number, name and public key."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from glocal.core.errors import InputError, describe_error, suggest_name
from glocal.core.files import write_json
from glocal.deploy.version import require_current_folder

REGISTRY = "registry.json"


class RegistryEntry(NamedTuple):
    """One client; a revoked one stays in the registry, so that its name and key are not reused."""

    number: int
    name: str
    key: str
    revoked: bool = False

    @property
    def ssh_key(self) -> str:
        """The kind and the digits of its key, without a comment that a user may have added."""
        return " ".join(self.key.split()[:2])


def active_entries(registry: dict[int, RegistryEntry]) -> dict[int, RegistryEntry]:
    """The clients that may connect."""
    return {number: entry for number, entry in registry.items() if not entry.revoked}


def read_registry(folder: Path) -> dict[int, RegistryEntry]:
    """All clients in a server's folder, including the revoked ones."""
    path = folder / REGISTRY
    if not path.exists():
        require_current_folder(folder)
        raise InputError(
            f"deploy: {folder} is not a server's folder; give one that `glocal deploy init` made"
        )
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("a list was expected")
        entries = [RegistryEntry(**row) for row in rows]
        _validate_entries(entries)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"deploy: {path} is not as glocal writes it ({describe_error(error)}); restore it"
        ) from error
    return {entry.number: entry for entry in entries}


def _validate_entries(entries: list[RegistryEntry]) -> None:
    for entry in entries:
        if [type(value) for value in entry] != [int, str, str, bool]:
            raise TypeError(f"{entry.number}: number, name, key and revoked were expected")
    for field in ("number", "name", "key"):
        if len({getattr(entry, field) for entry in entries}) < len(entries):
            raise ValueError(f"two clients have the same {field}")


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder's registry while it is read, changed and written; other programs wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_registry(folder: Path, registry: dict[int, RegistryEntry]) -> None:
    """Replace the registry; it belongs to the owner of the folder, also where root writes it."""
    path, owner = folder / REGISTRY, folder.stat()
    write_json(path, [entry._asdict() for _, entry in sorted(registry.items())])
    if os.geteuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid)


def revoke(folder: Path, name: str) -> RegistryEntry:
    """Revoke a client; a running server refuses its next request."""
    with locked_folder(folder):
        registry = read_registry(folder)
        by_name = {entry.name: entry for entry in registry.values()}
        if name not in by_name:
            raise InputError(
                f"deploy: '{name}' is not a client of {folder}; {suggest_name(name, by_name)}"
            )
        entry = by_name[name]
        if entry.revoked:
            raise InputError(
                f"deploy: '{name}' has been revoked already; add another with `add-client`"
            )
        write_registry(folder, {**registry, entry.number: entry._replace(revoked=True)})
    return entry
