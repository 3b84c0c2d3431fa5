"""What Flower loads: the two apps, for whatever folder a run or a node names."""

from collections.abc import Mapping
from pathlib import Path

from glocal.deploy.conductor import RunServer
from glocal.deploy.device import RunClient
from glocal.deploy.flower.client import client_app
from glocal.deploy.flower.contract import Client, Server
from glocal.deploy.flower.server import server_app
from glocal.deploy.project import Project


def open_client(node_config: Mapping[str, object]) -> Client:
    """The device whose folder the node was started with."""
    return RunClient.from_folder(Path(str(node_config["folder"])))


def open_server(run_config: Mapping[str, object]) -> Server:
    """The run that was asked for, in the server's own folder."""
    project = Project.from_folder(Path(str(run_config["folder"])))
    return RunServer(project, str(run_config["run"]), skip_training=bool(run_config.get("skip_training", False)))


client = client_app(open_client)
server = server_app(open_server)
