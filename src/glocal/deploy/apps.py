"""What Flower loads: the two apps, for whatever folder a run or a node names."""

from collections.abc import Mapping
from pathlib import Path

from glocal.deploy.client import RunClient
from glocal.deploy.flower.client_app import client_app
from glocal.deploy.flower.protocol import Client, Server
from glocal.deploy.flower.server_app import server_app
from glocal.deploy.project import Project
from glocal.deploy.server import RunServer


def open_client(node_config: Mapping[str, object]) -> Client:
    """The device whose folder the node was started with."""
    return RunClient.from_folder(Path(str(node_config["folder"])))


def open_server(run_config: Mapping[str, object]) -> Server:
    """The run that was asked for, in the server's own folder."""
    project = Project.from_folder(Path(str(run_config["folder"])))
    return RunServer(
        project, str(run_config["run"]), skip_training=bool(run_config.get("skip_training", False))
    )


client = client_app(open_client)
server = server_app(open_server)
