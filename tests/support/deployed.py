"""Federations on Flower for tests: a project folder, and a grid that calls clients in-process."""

import copy
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from glocal.deploy import apps
from glocal.deploy.flower.server_internals import public_key_bytes
from glocal.deploy.registry import read_registry
from glocal.deploy.scaffold import DeploymentSpec, copy_server_files, create_deployment

MODULE = """
import torch
from torch import nn

SIZES = {sizes}

def model():
    first = [nn.Linear(6, {width}), nn.BatchNorm1d({width}), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*first, nn.Linear({width}, {out}), nn.ReLU(), nn.Linear({out}, 3))

def data(client):
    generator = torch.Generator().manual_seed(100 + client)
    size = SIZES[client % len(SIZES)]
    x = torch.randn(size, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > x[:, 2]).long()

def all_clients():
    return [data(client) for client in range({clients})]
"""
STUDY = """
[data]
source = "federation:all_clients"
[model]
name = "federation:model"
[optimizer]
lr = 0.1
momentum = {momentum}
[plan]
rounds = {rounds}
clients_per_round = {clients_per_round}
batch_size = 5
seed = 3
{plan}
[experiments.Experiment]
algorithm = "{algorithm}"
{hyperparameters}
"""
LOCAL = 'local = ["0", "1"]'


def project(
    folder,
    *,
    algorithm="lg_fedavg",
    clients=4,
    rounds=3,
    clients_per_round=None,
    port=9443,
    width=8,
    out=7,
    plan="",
    extra="",
    share_metrics=True,
):
    """A small deployment: real certificates and keys, a small model with a private buffer.

    `plan` are more settings of the plan, and `extra` more tables of the study.
    """
    spec = DeploymentSpec(clients=clients, port=port, rounds=rounds, share_metrics=share_metrics)
    create_deployment(folder, spec)
    sizes = (24, 14, 31, 11, 19)  # no batch of one row, which batch norm would amplify
    module = MODULE.format(sizes=sizes, clients=clients, width=width, out=out)
    (folder / "federation.py").write_text(module)
    study = STUDY.format(
        rounds=rounds,
        clients_per_round=clients_per_round or clients,
        algorithm=algorithm,
        momentum=0.0 if algorithm == "scaffold" else 0.5,
        hyperparameters=LOCAL if algorithm == "lg_fedavg" else "",
        plan=plan,
    )
    (folder / "study.toml").write_text(study + extra)
    copy_to_clients(folder)
    return folder


def copy_to_clients(folder):
    """Copy the server's files to every client."""
    for own in (folder / "clients").iterdir():
        copy_server_files(folder, own)


def change(path, old, new):
    """Replace text in a file that has it."""
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def unchanged(client, message, reply):
    """A reply as the client sent it."""
    return reply


class InProcessGrid(Grid):
    """Calls every client in this process, without a wire.

    `tamper(client, message, reply)` may change a reply, or lose it by returning None.
    """

    def __init__(self, folder, tamper=unchanged):
        self.folder, self.tamper = Path(folder), tamper
        self.replies, self.contexts, self.online, self.sent = {}, {}, None, []
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_node_ids(self):
        numbers = read_registry(self.folder) if self.online is None else self.online
        return [1000 + number for number in numbers]

    def get_nodes(self):
        registry, nodes = read_registry(self.folder), []
        for node in self.get_node_ids():
            key = public_key_bytes(registry[node - 1000].key)
            nodes.append(NodeInfo(node_id=node, public_key=key))
        return nodes

    def context(self, client):
        name = read_registry(self.folder)[client].name
        config = {"folder": str(self.folder / "clients" / name)}
        return self.contexts.setdefault(client, Context(1, 1000 + client, config, RecordDict(), {}))

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            client = message.metadata.dst_node_id - 1000
            try:
                # a copy, as nothing is shared across a real wire
                reply = apps.client(copy.deepcopy(message), self.context(client))
            except Exception as error:  # as Flower does
                reply = Message(Error(0, f"{type(error)}:<'{error}'>"), reply_to=message)
            reply = self.tamper(client, message, reply)
            if reply is not None:
                self.replies[number] = reply
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        return [self.replies.pop(number) for number in list(message_ids) if number in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        return list(self.pull_messages(self.push_messages(messages)))

    def set_run(self, run): ...

    run = property(lambda self: None)

    def create_message(self, *rest, **more):
        raise NotImplementedError
