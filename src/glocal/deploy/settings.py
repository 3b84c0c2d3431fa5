"""What a deployment is, beside its study: where the server is, how long things may take, what devices consent to."""

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glocal.core.bounds import MAX_CLIENTS, MAX_EPOCHS, MAX_ROUNDS, count_field, require_counts
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.studies.settings import read_table

Table = TypeVar("Table")
_MAX_SECONDS = 10**8  # seconds: three years
_HOST = re.compile(
    r"[A-Za-z0-9_.-]{1,253}"
)  # a name with other letters has a plain form too, as xn--...


@dataclass(frozen=True)
class ServerSettings:
    """Where devices find the server (`host`, `port`), and the address that it listens on (`bind`)."""

    host: str = "127.0.0.1"
    port: int = 9443
    bind: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise InputError(
                f"deploy: the port is {self.port}; a number from 1 to 65535 was expected"
            )
        if not _HOST.fullmatch(self.host):
            raise InputError(
                f"deploy: the host is '{self.host}'; a name or an address was expected, without a port"
            )
        if not _HOST.fullmatch(self.bind):
            raise InputError(
                f"deploy: server.bind is '{self.bind}'; an IPv4 address or a name was expected, such as 0.0.0.0"
            )


@dataclass(frozen=True)
class LimitSettings:
    """Seconds to wait: for all at the start, or for a greeting (`start_timeout`), for `min_clients` (`connect_timeout`), for all answers (`round_timeout`)."""

    start_timeout: float = 60.0
    connect_timeout: float = 300.0
    round_timeout: float = 600.0
    min_clients: int = count_field(2, maximum=MAX_CLIENTS)

    def __post_init__(self) -> None:
        require_counts("settings: limits.", self)
        for name in ("start_timeout", "connect_timeout", "round_timeout"):
            if not 0 < getattr(self, name) <= _MAX_SECONDS:  # nor NaN, which would wait for ever
                raise InputError(
                    f"settings: limits.{name} is {getattr(self, name)}; seconds above 0 and at most {_MAX_SECONDS:,} were expected"
                )


@dataclass(frozen=True)
class PrivacySettings:
    """Every device clips how its shared part moved to the length `clipping_norm`, and adds noise of `noise_multiplier` times that to each number.

    The accountant answers for `delta`.
    """

    clipping_norm: float
    noise_multiplier: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (
            0 < self.clipping_norm < math.inf
            and 0 <= self.noise_multiplier < math.inf
            and 0 < self.delta < 1
        ):
            told = (
                f"clip {self.clipping_norm}, noise {self.noise_multiplier} and delta {self.delta}"
            )
            raise InputError(
                f"settings: privacy has {told}; clip above 0, noise at least 0, delta between 0 and 1 were expected"
            )


@dataclass(frozen=True)
class DeploymentSettings:
    """deploy.toml: the same file on the server and on every device.

    `data` is the function that gives one device's own (x, y); `clients` how many there are. Every `eval_every` rounds, and in the
    end, devices test their own models. A newcomer learns its private part for `adapt_epochs` epochs before its first round. With
    `secure_aggregation`, the server sees only the sum of uploads (SecAgg+).
    """

    name: str
    clients: int = count_field(maximum=MAX_CLIENTS)
    data: str = "federation:data"
    eval_every: int | None = count_field(None, maximum=MAX_ROUNDS)
    adapt_epochs: int = count_field(20, minimum=0, maximum=MAX_EPOCHS)
    secure_aggregation: bool = False
    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    privacy: PrivacySettings | None = None

    def __post_init__(self) -> None:
        require_counts("settings: ", self)


@dataclass(frozen=True)
class ClientSettings:
    """device.toml, on the device alone: its number, and whether its owner lets losses and accuracies leave it (`share_metrics`).

    `environment` names the variables of the owner's environment that the device's process gets, beside the few that it needs.
    """

    name: str
    number: int = count_field(minimum=0, maximum=MAX_CLIENTS)
    share_metrics: bool = False
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
