"""Refuses the folders of glocal 0.1, in which files have other names."""

from pathlib import Path

from glocal.core.errors import InputError

# A file of version 0.1, and the file that replaces it in this version.
_RENAMED_FILES = {"roster.json": "registry.json", "device.toml": "client.toml"}


def require_current_folder(folder: Path) -> None:
    """Refuse a server's or a client's folder of version 0.1."""
    for old, new in _RENAMED_FILES.items():
        if (folder / old).exists() and not (folder / new).exists():
            raise InputError(
                f"deploy: {folder} was made by glocal 0.1 (it has {old}), and 0.2 was expected; "
                "make a new deployment with `glocal deploy init`, or use glocal 0.1"
            )
