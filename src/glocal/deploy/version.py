"""Refuses what glocal 0.1 wrote: the names of its files and of their keys have changed since."""

from pathlib import Path

from glocal.core.errors import InputError

# A file of version 0.1, and the file that replaces it in this version.
_RENAMED_FILES = {"roster.json": "registry.json", "device.toml": "client.toml"}
# A key that every header of version 0.1 has, by kind of file, and the key that replaces it.
_RENAMED_KEYS = {"private state": ("device", "client"), "checkpoint": ("done", "rounds_done")}


def require_current_folder(folder: Path) -> None:
    """Refuse a server's or a client's folder of version 0.1."""
    for old, new in _RENAMED_FILES.items():
        if (folder / old).exists() and not (folder / new).exists():
            raise InputError(
                f"deploy: {folder} was made by glocal 0.1 (it has {old}), 0.2 was expected; make a "
                "new deployment with `glocal deploy init`, or go on with this one in glocal 0.1"
            )


def require_current_header(kind: str, path: Path, header: object) -> None:
    """Refuse a file of a run whose header is of version 0.1."""
    old, new = _RENAMED_KEYS[kind]
    if isinstance(header, dict) and old in header and new not in header:
        raise InputError(
            f"{kind}: {path} was written by glocal 0.1, 0.2 was expected; move it away, "
            "or go on with this run in glocal 0.1"
        )
