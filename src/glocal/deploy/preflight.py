"""What a deployment needs of this machine: Flower, and a free port."""

import socket
import time
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec

from glocal.core.errors import InputError

_RELEASE_TIMEOUT = 2.0  # seconds that a killed program's port may still be held
_SUPPORTED = ("1.41.", "1.42.")  # of Flower: others may lack what `server_internals.py` is made of


def require_flower() -> None:
    """Say how to get Flower where it is missing, or another version than those that we know."""
    get = "run: pip install 'glocal[flower]'"
    with suppress(ImportError):  # some finders raise for what they do not have
        if find_spec("flwr") is not None:
            found = version("flwr")
            if found.startswith(_SUPPORTED):
                return
            raise InputError(f"deploy: Flower {found} is installed, 1.41 or 1.42 is needed; {get}")
    raise InputError(f"deploy: Flower is not installed; {get}")


def require_free_port(bind: str, port: int) -> None:
    """Refuse a port that somebody else listens on; one that is just being let go of is waited for."""
    end = time.monotonic() + _RELEASE_TIMEOUT
    while True:
        try:
            return socket.create_server((bind, port)).close()
        except OSError as error:
            if time.monotonic() > end:
                raise InputError(
                    f"deploy: the server cannot listen on {bind}:{port} ({error.strerror or error}); stop what does, "
                    "or change server.port or server.bind in deploy.toml, on the devices too"
                ) from error
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
