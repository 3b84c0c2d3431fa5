"""What an operator asks of a running SuperLink: register a device's key, list who is connected, start a run.

These calls are what Flower's own command line makes; it is not used itself because it keeps its settings in the user's home.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from glocal.errors import InputError, brief

_BUNDLE = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "glocal-app"
version = "1.0.0"
description = "Loads glocal from where it is installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "glocal"

[tool.flwr.app.components]
serverapp = "glocal.deploy.apps:server"
clientapp = "glocal.deploy.apps:client"

[tool.flwr.app.config]
folder = ""
run = ""
visit = false
"""


class RunState(NamedTuple):
    """How a run stands, as Flower sees it: status, why it ended, bytes that the devices were sent and that they sent."""

    status: str
    details: str
    bytes_sent: int
    bytes_received: int


class Link:
    """A connection to a SuperLink's control API."""

    def __init__(self, client: ControlHttpClient) -> None:
        self.client = client

    def register(self, key: str, name: str) -> int:
        """Let a device's key in; the number of its node."""
        asked = RegisterNodeRequest(public_key=key_bytes(key), name=name)
        return int(self.client.RegisterNode(asked).node_id)

    def nodes(self) -> dict[int, tuple[str, bytes]]:
        """Every registered node: its status and public key."""
        return {node.node_id: (node.status, node.public_key) for node in self.client.ListNodes(ListNodesRequest()).nodes_info}

    def start(self, config: Mapping[str, str | bool]) -> int:
        """Start a run of the bundle, which holds nothing but the names of our two apps."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Flower's own, of a library that it uses
            bundle, _ = build_fab_from_files({"pyproject.toml": _BUNDLE.encode()})
        fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        return int(self.client.StartRun(StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(config)))).run_id)

    def run(self, number: int) -> RunState:
        """How a run stands."""
        run = self.client.ListRuns(ListRunsRequest(run_id=number)).run_dict[number]
        return RunState(f"{run.status.status}:{run.status.sub_status}", run.status.details, run.bytes_sent, run.bytes_recv)

    def ended(self) -> dict[str, str]:
        """The runs whose last start has ended, by our own names for them, and what Flower says of the reason."""
        starts = sorted(self.client.ListRuns(ListRunsRequest()).run_dict.values(), key=lambda run: run.pending_at)
        last = {run.override_config["run"].string: run.status for run in starts}
        return {name: status.details or status.sub_status for name, status in last.items() if status.status == "finished"}


def key_bytes(key: str) -> bytes:
    """A public key as Flower lists it."""
    try:
        public = serialization.load_ssh_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"deploy: '{key[:40]}' in the roster is no device's key ({brief(error)}); restore it") from error
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise InputError(f"deploy: '{key[:40]}' in the roster is of another kind than devices' keys; restore it")
    return public_key_to_bytes(public)


@contextmanager
def linked(address: str, authority: Path) -> Iterator[Link]:
    """A connection; one that cannot be had is told in one line."""
    client = None
    try:
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        client = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), [version])
        yield Link(client)
    except httpx.HTTPStatusError as error:
        raise InputError(f"deploy: the server at {address} refuses ({brief(error)}); see its logs/superlink.log") from error
    except (httpx.HTTPError, OSError) as error:
        raise InputError(
            f"deploy: the server at {address} does not answer ({brief(error)}); start it with `glocal deploy server`"
        ) from error
    finally:
        if client is not None:
            client.close()
