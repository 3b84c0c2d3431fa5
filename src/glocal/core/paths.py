"""The folder for files that the library can compute or download again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$GLOCAL_CACHE if it is set, else the folder `glocal` in the user's cache."""
    chosen = os.environ.get("GLOCAL_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "glocal"
