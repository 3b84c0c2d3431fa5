"""The folders that `glocal deploy init` and `add-device` write: the server's, and in it one to be handed to each device."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from glocal.core.bounds import ROUNDS, count, require_counts
from glocal.core.errors import InputError
from glocal.core.files import write_text
from glocal.deploy.certificates import CA, make_authority, make_device_key, make_server_certificate
from glocal.deploy.project import DEPLOYMENT, DEVICE, STUDY, Project
from glocal.deploy.roster import Entry, changing, read_roster, write_roster
from glocal.deploy.settings import ServerSettings
from glocal.studies.run import slug

CERTIFICATES, DEVICES, KEY = "certificates", "devices", "device.key"
SECRET, SOCKET = "operator.secret", "operator.sock"  # made by a running server
MODULE = "federation.py"

_MODULE = '''"""Your model and your data: replace both. `glocal run study.toml` simulates the same federation on one machine."""

from torch import nn

import glocal


def model() -> nn.Module:
    """The network; study.toml says which of its layers never leave a device."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data(device: int):
    """One device's own examples (x, y). On a real device, read its files here and leave `device` unused."""
    digits = glocal.load("digits")
    dealt = glocal.deal(digits, glocal.shards(DEVICES_MADE_UP, 2), validation=0.0, seed=0)
    own = dealt.train.of(device % DEVICES_MADE_UP)
    return own.x, own.y


def everyone():
    """All devices at once, for the simulator."""
    return [data(device) for device in range(DEVICES)]


DEVICES = {devices}
DEVICES_MADE_UP = 10  # the digits are dealt to so many, two classes each, as if each had its own
'''
_STUDY = """# What is trained. The same file is on the server and on every device; `glocal run study.toml` simulates it.
name = "{name}"

[data]
source = "federation:everyone"    # the simulator's; a device calls the function that deploy.toml names
validation = 0.1

[model]
name = "federation:model"

[split]
local = ["1"]                     # the layers that never leave a device

[optimiser]
rate = 0.05
momentum = 0.5

[plan]
rounds = {rounds}
cohort = {cohort}
epochs = 5                        # a round costs seconds of messages, so that each is worth some epochs
batch = 10

[cases.LG-FedAvg]
algorithm = "lg_fedavg"
"""
_DEPLOYMENT = """# How it is deployed. The same file is on the server and on every device.
name = "{name}"
devices = {devices}
data = "federation:data"    # gives one device's own (x, y)
settle = 20                 # epochs in which a newcomer learns its private part alone

[server]
host = "{host}"
port = {port}
bind = "{bind}"             # 0.0.0.0 to be reached from elsewhere

[limits]
everyone = 60.0             # seconds to wait for all devices at the start, and for one that is greeted later
gather = 300.0              # seconds to wait for `enough` of them
round = 600.0               # seconds to wait for a round's answers
enough = {enough}
"""
_DEVICE = """# This device alone. Its owner decides whether figures (losses, accuracies, and of how many examples) may leave it.
# On how many examples it trains is told in any case, unless plan.weights is "equal" in study.toml: the average needs it.
number = {number}
name = "{name}"
metrics = {metrics}
environment = []            # variables of yours that data() needs, by name; it gets no others
"""


@dataclass(frozen=True)
class Wanted:
    """What a new deployment should be."""

    devices: int = count(4, most=1000)
    host: str = "127.0.0.1"
    port: int = 9443
    rounds: int = count(20, most=ROUNDS)
    metrics: bool = False

    def __post_init__(self) -> None:
        require_counts("deploy: ", self)
        ServerSettings(self.host, self.port)  # refuses what is none


def lay_out(folder: Path, wanted: Wanted) -> Project:
    """Certificates, keys, settings, model and data function of a new federation, and a folder for each device."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"deploy: {folder} is not empty; choose another folder, or add to it with `glocal deploy add-device`")
    name, local = slug(folder.resolve().name), wanted.host in ("127.0.0.1", "localhost")
    enough = min(2, wanted.devices)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # keys, checkpoints and the operator's socket are in it
    words = {"name": name, "devices": wanted.devices, "host": wanted.host, "port": wanted.port, "rounds": wanted.rounds}
    words |= {"bind": "127.0.0.1" if local else "0.0.0.0", "enough": enough, "cohort": wanted.devices}
    write_text(folder / MODULE, _MODULE.replace("{devices}", str(wanted.devices)))
    write_text(folder / STUDY, _STUDY.format(**words))
    write_text(folder / DEPLOYMENT, _DEPLOYMENT.format(**words))
    make_authority(folder / CERTIFICATES, name)
    make_server_certificate(folder / CERTIFICATES, [wanted.host])
    write_roster(folder, {})
    for number in range(wanted.devices):
        add_device(folder, f"device-{number}", metrics=wanted.metrics)
    return Project.at(folder)


def add_device(folder: Path, name: str | None = None, *, metrics: bool = False) -> Path:
    """A folder for one more device, with a key of its own; the key's public half joins the server's roster."""
    with changing(folder):
        roster = read_roster(folder)
        entry, own = _added(folder, roster, name or f"device-{_next(roster)}", metrics=metrics)
        write_roster(folder, {**roster, entry.number: entry})
    return own


def _next(roster: dict[int, Entry]) -> int:
    return max(roster, default=-1) + 1


def _added(folder: Path, roster: dict[int, Entry], name: str, *, metrics: bool) -> tuple[Entry, Path]:
    if name in {entry.name for entry in roster.values()} or slug(name) != name:
        raise InputError(f"deploy: '{name}' is taken, or no plain name; choose one of small letters, figures and '-'")
    own = folder / DEVICES / name
    own.mkdir(mode=0o700, parents=True)
    try:
        entry = Entry(_next(roster), name, make_device_key(own / KEY))
        refresh_device(folder, own)
        write_text(own / DEVICE, _DEVICE.format(number=entry.number, name=name, metrics=str(metrics).lower()))
    except (InputError, OSError):
        shutil.rmtree(own)  # half a device would be in the way of the next attempt
        raise
    return entry, own


def refresh_device(folder: Path, own: Path) -> None:
    """The server's settings, model and authority, copied into a device's folder."""
    for name in (STUDY, DEPLOYMENT):
        shutil.copyfile(folder / name, own / name)
    for module in folder.glob("*.py"):
        shutil.copyfile(module, own / module.name)
    shutil.copyfile(folder / CERTIFICATES / CA, own / CA)
