"""What a deployment is, beside its study: where the server is, how long things may take, what devices consent to."""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glocal.core.bounds import CLIENTS, EPOCHS, ROUNDS, count, require_counts
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.studies.settings import read_table

Table = TypeVar("Table")
_LONGEST = 10**8  # seconds: three years
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}")  # a name with other letters has a plain form too, as xn--...


@dataclass(frozen=True)
class ServerSettings:
    """Where devices find the server (`host`, `port`), and the address that it listens on (`bind`)."""

    host: str = "127.0.0.1"
    port: int = 9443
    bind: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise InputError(f"deploy: the port is {self.port}; a number from 1 to 65535 was expected")
        if not _HOST.fullmatch(self.host):
            raise InputError(f"deploy: the host is '{self.host}'; a name or an address was expected, without a port")
        if not _HOST.fullmatch(self.bind):
            raise InputError(f"deploy: server.bind is '{self.bind}'; an IPv4 address or a name was expected, such as 0.0.0.0")


@dataclass(frozen=True)
class LimitSettings:
    """Seconds to wait: for all at the start, or for a greeting (`everyone`), for `enough` (`gather`), for all answers (`round`)."""

    everyone: float = 60.0
    gather: float = 300.0
    round: float = 600.0
    enough: int = count(2, most=CLIENTS)

    def __post_init__(self) -> None:
        require_counts("settings: limits.", self)
        for name in ("everyone", "gather", "round"):
            if not 0 < getattr(self, name) <= _LONGEST:  # nor NaN, which would wait for ever
                raise InputError(
                    f"settings: limits.{name} is {getattr(self, name)}; seconds above 0 and at most {_LONGEST:,} were expected"
                )


@dataclass(frozen=True)
class PrivacySettings:
    """Every device clips how its shared part moved to the length `clip`, and adds noise of `noise` times that to each number.

    The accountant answers for `delta`.
    """

    clip: float
    noise: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (0 < self.clip < math.inf and 0 <= self.noise < math.inf and 0 < self.delta < 1):
            told = f"clip {self.clip}, noise {self.noise} and delta {self.delta}"
            raise InputError(f"settings: privacy has {told}; clip above 0, noise at least 0, delta between 0 and 1 were expected")


@dataclass(frozen=True)
class DeploymentSettings:
    """deploy.toml: the same file on the server and on every device.

    `data` is the function that gives one device's own (x, y); `devices` how many there are. Every `test_every` rounds, and in the
    end, devices test their own models. A newcomer learns its private part for `settle` epochs before its first round. With
    `secure`, the server sees only the sum of uploads (SecAgg+).
    """

    name: str
    devices: int = count(most=CLIENTS)
    data: str = "federation:data"
    test_every: int | None = count(None, most=ROUNDS)
    settle: int = count(20, least=0, most=EPOCHS)
    secure: bool = False
    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    privacy: PrivacySettings | None = None

    def __post_init__(self) -> None:
        require_counts("settings: ", self)


@dataclass(frozen=True)
class DeviceSettings:
    """device.toml, on the device alone: its number, and whether its owner lets losses and accuracies leave it (`metrics`).

    `environment` names the variables of the owner's environment that the device's process gets, beside the few that it needs.
    """

    name: str
    number: int = count(least=0, most=CLIENTS)
    metrics: bool = False
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_counts("settings: ", self)


def read_settings(kind: type[Table], path: Path) -> Table:
    """Settings from a TOML file that `glocal deploy init` wrote and its owner may have changed."""
    try:
        table: Json = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"deploy: cannot read {path} ({error.strerror}); give a folder that `glocal deploy init` or `add-device` made"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"deploy: {path} is not TOML ({error})") from error
    try:
        return read_table(kind, table, "")
    except TypeError as error:
        raise InputError(f"deploy: {path} lacks a setting ({error}); add it") from error
