"""The settings of a deployment beside its study: server, time limits, privacy, clients."""

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
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}")  # a name with other letters has a form xn--...


@dataclass(frozen=True)
class ServerSettings:
    """Where clients connect to (`host`, `port`), and the address that the server listens on."""

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
                f"deploy: the host is '{self.host}'; a name or address without a port was expected"
            )
        if not _HOST.fullmatch(self.bind):
            raise InputError(
                f"deploy: server.bind is '{self.bind}'; an IPv4 address or a name was expected, "
                "such as 0.0.0.0"
            )


@dataclass(frozen=True)
class LimitSettings:
    """How many seconds the server waits.

    `start_timeout`: for all clients before the first round, and for a handshake.
    `connect_timeout`: for `min_clients` clients. `round_timeout`: for the replies of a round.
    """

    start_timeout: float = 60.0
    connect_timeout: float = 300.0
    round_timeout: float = 600.0
    min_clients: int = count_field(2, maximum=MAX_CLIENTS)

    def __post_init__(self) -> None:
        require_counts("settings: limits.", self)
        for name in ("start_timeout", "connect_timeout", "round_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds <= _MAX_SECONDS:  # NaN fails this test too
                raise InputError(
                    f"settings: limits.{name} is {seconds}; "
                    f"seconds above 0 and at most {_MAX_SECONDS:,} were expected"
                )


@dataclass(frozen=True)
class PrivacySettings:
    """Differential privacy of each client: clipping, and Gaussian noise, before anything is sent.

    The update of the shared part is clipped to the norm `clip_norm`. The noise std of each number
    is `noise_multiplier * clip_norm`. The accountant computes epsilon at this `delta`.
    """

    clip_norm: float
    noise_multiplier: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        clip_norm, noise, delta = self.clip_norm, self.noise_multiplier, self.delta
        if not (0 < clip_norm < math.inf and 0 <= noise < math.inf and 0 < delta < 1):
            raise InputError(
                f"settings: privacy has clip_norm {clip_norm}, noise_multiplier {noise} and "
                f"delta {delta}; clip_norm above 0, noise_multiplier at least 0 and "
                "delta between 0 and 1 were expected"
            )


@dataclass(frozen=True)
class DeploymentSettings:
    """deploy.toml: the same file on the server and on every client.

    `clients` is how many there are to begin with, and `data` the function that returns one client's
    own (x, y). Clients evaluate their own models every `eval_every` rounds and at the end. A new
    client adapts its private part for `adapt_epochs` epochs before its first round. With
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
    """client.toml, on the client alone: its number, and what its owner allows.

    With `share_metrics`, losses and accuracies may leave the client. `environment` names the
    owner's environment variables that the client's process gets beside the few that it needs.
    """

    name: str
    number: int = count_field(minimum=0, maximum=MAX_CLIENTS)
    share_metrics: bool = False
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_counts("settings: ", self)


def read_settings(kind: type[Table], path: Path) -> Table:
    """Read settings from a TOML file."""
    try:
        table: Json = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"deploy: cannot read {path} ({error.strerror}); "
            "give a folder that `glocal deploy init` or `add-client` made"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"deploy: {path} is not TOML ({error})") from error
    try:
        return read_table(kind, table, "")
    except TypeError as error:
        raise InputError(f"deploy: {path} misses a setting ({error}); add it") from error
