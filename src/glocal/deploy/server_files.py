"""The files of one run on the server: checkpoint, rows, live state, counts of samples."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import (
    Json,
    append_rows,
    read_json,
    read_metadata,
    read_rows,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)
from glocal.core.store import PerClient, TrainingState
from glocal.core.trees import Params
from glocal.deploy.setup import TrainingSetup
from glocal.wire import Ledger, WireError, gate, schema_of

RUNS, OWNER = "runs", "owner"
CHECKPOINT, ROWS, LIVE, RESULT = "checkpoint.safetensors", "rows.jsonl", "live.json", "result.json"
SAMPLE_COUNTS = "sample_counts.json"
RESUMED_ELSEWHERE = "it has been resumed elsewhere"
_SHARED, _SERVER, _PROFILES = "shared/", "server/", "profiles/"


@dataclass(frozen=True)
class ServerState:
    """The progress of a run, as its checkpoint has it.

    `training` has what is shared, the server's own state, and a profile of every client. By client
    number: the last round whose aggregate includes its upload, how many such rounds there are, and
    the last round in which it was connected. `initial_clients` were registered when the run began,
    `adapted` ones have fitted their private part alone since.
    """

    training: TrainingState
    rounds_done: int = 0
    ledger: Ledger = Ledger()
    last_included: dict[int, int] = field(default_factory=dict)
    rounds_included: dict[int, int] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    initial_clients: tuple[int, ...] = ()
    adapted: tuple[int, ...] = ()


@dataclass
class RunFiles:
    """The files of a run in its folder; `token` marks the folder as this server's own."""

    folder: Path
    live: Json = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def take_over(self, next_round: int) -> None:
        """Make the run this server's own; rows after its checkpoint are dropped.

        Those rounds are repeated.
        """
        lines = ""
        for row in read_rows(self.folder / ROWS):
            if row["round"] < next_round:
                lines += json.dumps(row) + "\n"
        write_text(self.folder / ROWS, lines)
        write_text(self.folder / OWNER, self.token)

    def save(self, state: ServerState, setup: TrainingSetup) -> None:
        """Replace the checkpoint."""
        if not self._is_owner():
            raise InputError(f"run: {RESUMED_ELSEWHERE}; this server has no part in it any more")
        write_server_state(self.folder / CHECKPOINT, state, setup)

    def append_row(self, row: Json) -> None:
        """Append a round's row."""
        append_rows(self.folder / ROWS, [row])

    def rows(self) -> list[Json]:
        """The rows of all rounds."""
        return read_rows(self.folder / ROWS)

    def write_live(self, state: str | None = None, **fields: object) -> None:
        """Write the current state of the run, for `status` and `follow`."""
        self.live = {**self.live, **fields, "run": self.folder.name, "updated": time.time()}
        if state is not None:
            self.live["state"] = state
        if self._is_owner():  # otherwise another server has taken over the run
            write_json(self.folder / LIVE, self.live)

    def write_result(self, result: Json) -> None:
        """Replace the result."""
        write_json(self.folder / RESULT, result)

    def count_samples(self, clients: Iterable[int]) -> None:
        """Write down that these clients are sampled, before they are: a crash forgets none."""
        counts = self.sample_counts()
        for client in clients:
            counts[str(client)] = counts.get(str(client), 0) + 1
        write_json(self.folder / SAMPLE_COUNTS, counts)

    def sample_counts(self) -> dict[str, int]:
        """How often each client was sampled, by its number as text."""
        path = self.folder / SAMPLE_COUNTS
        counts: dict[str, int] = read_json(path, dict) if path.exists() else {}
        return counts

    def _is_owner(self) -> bool:
        return (self.folder / OWNER).read_text(encoding="utf-8") == self.token


def write_server_state(path: Path, state: ServerState, setup: TrainingSetup) -> None:
    """Replace the checkpoint; private trees are the clients', and no part of it."""
    header = {
        "rounds_done": state.rounds_done,
        "initial_clients": state.initial_clients,
        "adapted": state.adapted,
        "ledger": state.ledger.as_dict(),
        "last_included": _with_text_keys(state.last_included),
        "rounds_included": _with_text_keys(state.rounds_included),
        "last_seen": _with_text_keys(state.last_seen),
        **setup.about,
        "fingerprint": setup.fingerprint,
    }
    training = state.training
    tensors = trees.with_prefix(_SHARED, training.shared)
    tensors |= trees.with_prefix(_SERVER, training.server)
    for client, profile in training.profiles[0].stored.items():
        tensors |= trees.with_prefix(f"{_PROFILES}{client}/", profile)
    write_tensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, header)


def read_server_state(path: Path, setup: TrainingSetup) -> ServerState | None:
    """The checkpoint, or None; one of another algorithm or model is refused."""
    if not path.exists():
        return None
    tensors, header = read_tensors(path)
    if header.get("fingerprint") != setup.fingerprint:
        raise InputError(
            f"resume: {path} was made with other settings or another model than the current ones; "
            "go back to those"
        )
    try:
        training = _read_training(tensors, setup.start)
    except WireError as error:
        raise InputError(f"resume: {path} is damaged ({error}); restore it") from error
    return ServerState(
        training,
        rounds_done=header["rounds_done"],
        ledger=Ledger.from_dict(header["ledger"]),
        last_included=_with_number_keys(header["last_included"]),
        rounds_included=_with_number_keys(header["rounds_included"]),
        last_seen=_with_number_keys(header["last_seen"]),
        initial_clients=tuple(header["initial_clients"]),
        adapted=tuple(header["adapted"]),
    )


def _read_training(tensors: Params, start: TrainingState) -> TrainingState:
    """The state with these tensors; the server holds no private trees."""
    shared = gate(trees.under_prefix(_SHARED, tensors), schema_of(start.shared))
    server = gate(trees.under_prefix(_SERVER, tensors), schema_of(start.server))
    initial = start.profiles[0].initial
    stored: dict[int, Params] = {}
    by_client = trees.under_prefix(_PROFILES, tensors)
    for client in sorted({int(name.partition("/")[0]) for name in by_client}):
        profile = trees.under_prefix(f"{client}/", by_client)
        stored[client] = gate(profile, schema_of(initial))
    return start._replace(shared=shared, server=server, profiles=(PerClient(initial, stored),))


def _with_text_keys(values: Mapping[int, int]) -> dict[str, int]:
    return {str(key): value for key, value in values.items()}


def _with_number_keys(values: Mapping[str, int]) -> dict[int, int]:
    return {int(key): value for key, value in values.items()}


def rounds_done(folder: Path, run: str) -> int | None:
    """How many rounds a run has done, None if it does not exist."""
    path = folder / RUNS / run / CHECKPOINT
    if not path.exists():
        return None
    done = read_metadata(path).get("rounds_done")
    if not isinstance(done, int):
        raise InputError(
            f"resume: {path} was not written by glocal; restore it, or give another --run"
        )
    return done
