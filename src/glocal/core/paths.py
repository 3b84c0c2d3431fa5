"""Where on disk the library keeps what it can make or fetch again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """GLOCAL_CACHE if set, else glocal in the user's cache."""
    own = os.environ.get("GLOCAL_CACHE")
    return (
        Path(own).expanduser()
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "glocal"
    )
