"""What Flower loads: the two apps, for whatever folder a run or a node names."""

from collections.abc import Mapping
from pathlib import Path

from glocal.deploy.conductor import RunConductor
from glocal.deploy.device import Member
from glocal.deploy.flower.client import client_app
from glocal.deploy.flower.contract import Conductor, Device
from glocal.deploy.flower.server import server_app
from glocal.deploy.project import Project


def open_device(node_config: Mapping[str, object]) -> Device:
    """The device whose folder the node was started with."""
    return Member.at(Path(str(node_config["folder"])))


def open_conductor(run_config: Mapping[str, object]) -> Conductor:
    """The run that was asked for, in the server's own folder."""
    project = Project.at(Path(str(run_config["folder"])))
    return RunConductor(project, str(run_config["run"]), visiting=bool(run_config.get("visit", False)))


client = client_app(open_device)
server = server_app(open_conductor)
