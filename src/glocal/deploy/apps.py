"""The two apps that Flower loads, for the folder that a run or a node names."""

from collections.abc import Mapping
from pathlib import Path

from glocal.deploy.client import RunClient
from glocal.deploy.flower.client_app import client_app
from glocal.deploy.flower.protocol import Client, Server
from glocal.deploy.flower.server_app import server_app
from glocal.deploy.project import Project
from glocal.deploy.server import RunServer


def open_client(node_config: Mapping[str, object]) -> Client:
    """The client of the folder that the node was started with."""
    return RunClient.from_folder(Path(str(node_config["folder"])))


def open_server(run_config: Mapping[str, object]) -> Server:
    """The requested run, in the server's own folder."""
    project = Project.from_folder(Path(str(run_config["folder"])))
    skip_training = bool(run_config.get("skip_training", False))
    return RunServer(project, str(run_config["run"]), skip_training=skip_training)


client = client_app(open_client)
server = server_app(open_server)
