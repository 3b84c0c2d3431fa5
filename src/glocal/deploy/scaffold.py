"""The folders that `glocal deploy init` and `add-client` make: the server's, and one per client."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from glocal.core.bounds import MAX_ROUNDS, count_field, require_counts
from glocal.core.errors import InputError
from glocal.core.files import write_text
from glocal.deploy.certificates import CA, make_authority, make_client_key, make_server_certificate
from glocal.deploy.project import CLIENT, DEPLOYMENT, STUDY, Project
from glocal.deploy.registry import RegistryEntry, locked_folder, read_registry, write_registry
from glocal.deploy.settings import ServerSettings
from glocal.studies.run import slug

CERTIFICATES, CLIENTS_FOLDER, KEY = "certificates", "clients", "client.key"
SECRET, SOCKET = "operator.secret", "operator.sock"  # made by a running server
MODULE_FILE = "federation.py"

_MODULE_TEXT = '''\
"""Your model and your data: replace both. `glocal run study.toml` simulates the federation."""

from torch import nn

import glocal


def model() -> nn.Module:
    """The network; study.toml says which of its layers never leave a client."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def data(client: int):
    """One client's own examples (x, y). On a real client, read its files and ignore `client`."""
    digits = glocal.load_dataset("digits")
    shards = glocal.shards(NUM_PARTITIONS, 2)
    federated = glocal.FederatedData.partition(digits, shards, validation=0.0, seed=0)
    own = federated.train.of(client % NUM_PARTITIONS)
    return own.x, own.y


def all_clients():
    """The examples of all clients, for the simulator."""
    return [data(client) for client in range(CLIENTS)]


CLIENTS = {clients}
NUM_PARTITIONS = 10  # parts of the digits, with two classes each
'''
_STUDY = """\
# What is trained, the same on the server and on every client. Simulate it: `glocal run study.toml`
name = "{name}"

[data]
source = "federation:all_clients"    # for the simulator; a client calls `data` of deploy.toml
validation = 0.1

[model]
name = "federation:model"

[split]
local = ["1"]             # the layers that never leave a client

[optimizer]
lr = 0.05
momentum = 0.5

[plan]
rounds = {rounds}
clients_per_round = {clients}
local_epochs = 5          # the messages of a round take time, so that several epochs are worthwhile
batch_size = 10

[experiments.LG-FedAvg]
algorithm = "lg_fedavg"
"""
_DEPLOYMENT = """\
# How it is deployed, the same on the server and on every client.
name = "{name}"
clients = {clients}
data = "federation:data"    # returns one client's own (x, y)
adapt_epochs = 20           # epochs in which a new client adapts its private part alone

[server]
host = "{host}"
port = {port}
bind = "{bind}"             # 0.0.0.0 to be reached from other machines

[limits]
start_timeout = 60.0        # seconds to wait for all clients at the start, and for a handshake
connect_timeout = 300.0     # seconds to wait for `min_clients` clients
round_timeout = 600.0       # seconds to wait for the replies of a round
min_clients = {min_clients}
"""
_CLIENT = """\
# This client alone. Its owner decides whether metrics (losses, accuracies, numbers of examples)
# may leave it. The number of training examples is sent in any case, as the mean needs it,
# unless plan.aggregation is "mean(clients)" in study.toml.
number = {number}
name = "{name}"
share_metrics = {share_metrics}
environment = []            # names of environment variables that data() needs; it gets no others
"""


@dataclass(frozen=True)
class DeploymentSpec:
    """The options of a new deployment."""

    clients: int = count_field(4, maximum=1000)
    host: str = "127.0.0.1"
    port: int = 9443
    rounds: int = count_field(20, maximum=MAX_ROUNDS)
    share_metrics: bool = False

    def __post_init__(self) -> None:
        require_counts("deploy: ", self)
        ServerSettings(self.host, self.port)  # refuses an invalid address


def create_deployment(folder: Path, spec: DeploymentSpec) -> Project:
    """Write certificates, keys, settings, model and data function, and a folder per client."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"deploy: {folder} is not empty; choose another folder, "
            "or add to it with `glocal deploy add-client`"
        )
    name = slug(folder.resolve().name)
    is_local = spec.host in ("127.0.0.1", "localhost")
    bind = "127.0.0.1" if is_local else "0.0.0.0"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # it holds keys, checkpoints and the operator's socket
    write_text(folder / MODULE_FILE, _MODULE_TEXT.replace("{clients}", str(spec.clients)))
    study = _STUDY.format(name=name, rounds=spec.rounds, clients=spec.clients)
    write_text(folder / STUDY, study)
    deployment = _DEPLOYMENT.format(
        name=name,
        clients=spec.clients,
        host=spec.host,
        port=spec.port,
        bind=bind,
        min_clients=min(2, spec.clients),
    )
    write_text(folder / DEPLOYMENT, deployment)
    make_authority(folder / CERTIFICATES, name)
    make_server_certificate(folder / CERTIFICATES, [spec.host])
    write_registry(folder, {})
    for number in range(spec.clients):
        add_client(folder, f"client-{number}", share_metrics=spec.share_metrics)
    return Project.from_folder(folder)


def add_client(folder: Path, name: str | None = None, *, share_metrics: bool = False) -> Path:
    """Make a folder with a key for one more client, and register its public key."""
    with locked_folder(folder):
        registry = read_registry(folder)
        client_name = name or f"client-{_next_number(registry)}"
        entry, own = _create_client(folder, registry, client_name, share_metrics=share_metrics)
        write_registry(folder, {**registry, entry.number: entry})
    return own


def _next_number(registry: dict[int, RegistryEntry]) -> int:
    return max(registry, default=-1) + 1


def _create_client(
    folder: Path, registry: dict[int, RegistryEntry], name: str, *, share_metrics: bool
) -> tuple[RegistryEntry, Path]:
    taken = {entry.name for entry in registry.values()}
    if name in taken or slug(name) != name:
        raise InputError(
            f"deploy: '{name}' is taken, or not a valid name; use small letters, digits and '-'"
        )
    own = folder / CLIENTS_FOLDER / name
    own.mkdir(mode=0o700, parents=True)
    try:
        entry = RegistryEntry(_next_number(registry), name, make_client_key(own / KEY))
        copy_server_files(folder, own)
        share = str(share_metrics).lower()
        text = _CLIENT.format(number=entry.number, name=name, share_metrics=share)
        write_text(own / CLIENT, text)
    except (InputError, OSError):
        shutil.rmtree(own)  # an incomplete folder would block the next attempt
        raise
    return entry, own


def copy_server_files(folder: Path, own: Path) -> None:
    """Copy the server's settings, model and authority into a client's folder."""
    for name in (STUDY, DEPLOYMENT):
        shutil.copyfile(folder / name, own / name)
    for module in folder.glob("*.py"):
        shutil.copyfile(module, own / module.name)
    shutil.copyfile(folder / CERTIFICATES / CA, own / CA)
