"""The folders that `glocal deploy init` and `add-device` write: the server's, and in it one to be handed to each device."""

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

CERTIFICATES, CLIENTS_FOLDER, KEY = "certificates", "clients", "device.key"
SECRET, SOCKET = "operator.secret", "operator.sock"  # made by a running server
MODULE_FILE = "federation.py"

_MODULE_TEXT = '''"""Your model and your data: replace both. `glocal run study.toml` simulates the same federation on one machine."""

from torch import nn

import glocal


def model() -> nn.Module:
    """The network; study.toml says which of its layers never leave a device."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data(client: int):
    """One client's own examples (x, y). On a real device, read its files here and leave `client` unused."""
    digits = glocal.load("digits")
    federated = glocal.partition(digits, glocal.shards(SIMULATED_CLIENTS, 2), validation=0.0, seed=0)
    own = federated.train.of(client % SIMULATED_CLIENTS)
    return own.x, own.y


def all_clients():
    """The examples of all clients, for the simulator."""
    return [data(client) for client in range(CLIENTS)]


CLIENTS = {clients}
SIMULATED_CLIENTS = 10  # the digits are split among so many, two classes each
'''
_STUDY = """# What is trained. The same file is on the server and on every device; `glocal run study.toml` simulates it.
name = "{name}"

[data]
source = "federation:all_clients"    # the simulator's; a device calls the function that deploy.toml names
validation = 0.1

[model]
name = "federation:model"

[split]
local = ["1"]                     # the layers that never leave a device

[optimizer]
lr = 0.05
momentum = 0.5

[plan]
rounds = {rounds}
clients_per_round = {clients_per_round}
local_epochs = 5                        # a round costs seconds of messages, so that each is worth some epochs
batch_size = 10

[experiments.LG-FedAvg]
algorithm = "lg_fedavg"
"""
_DEPLOYMENT = """# How it is deployed. The same file is on the server and on every device.
name = "{name}"
clients = {clients}
data = "federation:data"    # gives one device's own (x, y)
adapt_epochs = 20                 # epochs in which a newcomer learns its private part alone

[server]
host = "{host}"
port = {port}
bind = "{bind}"             # 0.0.0.0 to be reached from elsewhere

[limits]
start_timeout = 60.0             # seconds to wait for all devices at the start, and for one that is greeted later
connect_timeout = 300.0              # seconds to wait for `enough` of them
round_timeout = 600.0               # seconds to wait for a round's answers
min_clients = {min_clients}
"""
_CLIENT = """# This device alone. Its owner decides whether figures (losses, accuracies, and of how many examples) may leave it.
# On how many examples it trains is told in any case, unless plan.weighting is "equal" in study.toml: the average needs it.
number = {number}
name = "{name}"
share_metrics = {share_metrics}
environment = []            # variables of yours that data() needs, by name; it gets no others
"""


@dataclass(frozen=True)
class DeploymentSpec:
    """What a new deployment should be."""

    clients: int = count_field(4, maximum=1000)
    host: str = "127.0.0.1"
    port: int = 9443
    rounds: int = count_field(20, maximum=MAX_ROUNDS)
    share_metrics: bool = False

    def __post_init__(self) -> None:
        require_counts("deploy: ", self)
        ServerSettings(self.host, self.port)  # refuses what is none


def create_deployment(folder: Path, wanted: DeploymentSpec) -> Project:
    """Certificates, keys, settings, model and data function of a new federation, and a folder for each device."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"deploy: {folder} is not empty; choose another folder, or add to it with `glocal deploy add-device`"
        )
    name, local = slug(folder.resolve().name), wanted.host in ("127.0.0.1", "localhost")
    min_clients = min(2, wanted.clients)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # keys, checkpoints and the operator's socket are in it
    words = {
        "name": name,
        "clients": wanted.clients,
        "host": wanted.host,
        "port": wanted.port,
        "rounds": wanted.rounds,
    }
    words |= {
        "bind": "127.0.0.1" if local else "0.0.0.0",
        "min_clients": min_clients,
        "clients_per_round": wanted.clients,
    }
    write_text(folder / MODULE_FILE, _MODULE_TEXT.replace("{clients}", str(wanted.clients)))
    write_text(folder / STUDY, _STUDY.format(**words))
    write_text(folder / DEPLOYMENT, _DEPLOYMENT.format(**words))
    make_authority(folder / CERTIFICATES, name)
    make_server_certificate(folder / CERTIFICATES, [wanted.host])
    write_registry(folder, {})
    for number in range(wanted.clients):
        add_client(folder, f"device-{number}", share_metrics=wanted.share_metrics)
    return Project.from_folder(folder)


def add_client(folder: Path, name: str | None = None, *, share_metrics: bool = False) -> Path:
    """A folder for one more device, with a key of its own; the key's public half joins the server's roster."""
    with locked_folder(folder):
        registry = read_registry(folder)
        entry, own = _create_client(
            folder,
            registry,
            name or f"device-{_next_number(registry)}",
            share_metrics=share_metrics,
        )
        write_registry(folder, {**registry, entry.number: entry})
    return own


def _next_number(registry: dict[int, RegistryEntry]) -> int:
    return max(registry, default=-1) + 1


def _create_client(
    folder: Path, registry: dict[int, RegistryEntry], name: str, *, share_metrics: bool
) -> tuple[RegistryEntry, Path]:
    if name in {entry.name for entry in registry.values()} or slug(name) != name:
        raise InputError(
            f"deploy: '{name}' is taken, or no plain name; choose one of small letters, figures and '-'"
        )
    own = folder / CLIENTS_FOLDER / name
    own.mkdir(mode=0o700, parents=True)
    try:
        entry = RegistryEntry(_next_number(registry), name, make_client_key(own / KEY))
        copy_server_files(folder, own)
        write_text(
            own / CLIENT,
            _CLIENT.format(
                number=entry.number, name=name, share_metrics=str(share_metrics).lower()
            ),
        )
    except (InputError, OSError):
        shutil.rmtree(own)  # half a device would be in the way of the next attempt
        raise
    return entry, own


def copy_server_files(folder: Path, own: Path) -> None:
    """The server's settings, model and authority, copied into a device's folder."""
    for name in (STUDY, DEPLOYMENT):
        shutil.copyfile(folder / name, own / name)
    for module in folder.glob("*.py"):
        shutil.copyfile(module, own / module.name)
    shutil.copyfile(folder / CERTIFICATES / CA, own / CA)
