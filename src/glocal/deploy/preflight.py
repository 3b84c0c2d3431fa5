"""What a deployment needs of this machine: Flower, and a free port."""

import socket
import time
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec

from glocal.core.errors import InputError

_RELEASE_TIMEOUT = 2.0  # seconds until the system releases the port of a killed program
_SUPPORTED = ("1.41.", "1.42.")  # Flower versions that have what `server_internals.py` needs


def require_flower() -> None:
    """Refuse a missing Flower and an unsupported version, and say how to install it."""
    install = "run: pip install 'glocal[flower]'"
    with suppress(ImportError):  # some finders raise for a missing package
        if find_spec("flwr") is not None:
            installed = version("flwr")
            if installed.startswith(_SUPPORTED):
                return
            raise InputError(
                f"deploy: Flower {installed} is installed, 1.41 or 1.42 is needed; {install}"
            )
    raise InputError(f"deploy: Flower is not installed; {install}")


def require_free_port(bind: str, port: int) -> None:
    """Refuse a port in use; one that is about to be released is waited for."""
    end = time.monotonic() + _RELEASE_TIMEOUT
    while True:
        try:
            return socket.create_server((bind, port)).close()
        except OSError as error:
            if time.monotonic() > end:
                raise InputError(
                    f"deploy: the server cannot listen on {bind}:{port} "
                    f"({error.strerror or error}); stop the program that does, or change "
                    "server.port or server.bind in deploy.toml, on the clients too"
                ) from error
        time.sleep(0.1)


def free_port() -> int:
    """A port on which no program listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
