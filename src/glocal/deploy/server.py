"""One run on the server: which clients are sampled, which replies are valid, and checkpoints."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from glocal.core import trees
from glocal.core.errors import InputError, describe_error
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
from glocal.core.sampling import Availability, sample_available
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Instructions, Reply
from glocal.deploy.project import Project, TrainingSetup
from glocal.deploy.registry import RegistryEntry, active_entries, read_registry
from glocal.evaluate import summarize
from glocal.evaluate.privacy import epsilon
from glocal.wire import Ledger, Upload, UploadError

RUNS, OWNER = "runs", "owner"
CHECKPOINT, ROWS, LIVE, RESULT = "checkpoint.safetensors", "rows.jsonl", "live.json", "result.json"
SAMPLE_COUNTS = "sample_counts.json"
RESUMED_ELSEWHERE = "it has been resumed elsewhere"


@dataclass(frozen=True)
class ServerState:
    """The progress of a run, as its checkpoint has it.

    By client number: the last round whose average includes its upload, how many such rounds there
    are, and the last round in which it was connected. `initial_clients` were registered when the
    run began, `adapted` ones have fitted their private part alone since.
    """

    shared: Params
    rounds_done: int = 0
    ledger: Ledger = Ledger()
    last_included: dict[int, int] = field(default_factory=dict)
    rounds_included: dict[int, int] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    initial_clients: tuple[int, ...] = ()
    adapted: tuple[int, ...] = ()


class CheckedUpload(NamedTuple):
    """A valid upload and its weight in the average."""

    upload: Upload
    weight: int


@dataclass
class RunServer:
    """One run of a project. `state` is on disk after every round, all else is lost with a crash.

    `connected` maps the nodes that are connected to client numbers, by their keys; `identified` and
    `sampled` map those that have sent a valid handshake and those that are sampled now.
    `waiting_since` is None while enough clients are connected. `token` marks the run's folder as
    this server's own.
    """

    project: Project
    run: str
    skip_training: bool = False
    state: ServerState = field(init=False)
    connected: dict[int, int] = field(default_factory=dict)
    identified: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    live: Json = field(default_factory=dict)
    waiting_since: float | None = field(default_factory=time.monotonic)
    round_started: float = 0.0
    has_started: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        shared = self.setup.algorithm.init(self.setup.params)[0]
        stored = read_server_state(self.folder / CHECKPOINT, self.setup)
        initial_clients = tuple(sorted(self.registry()))
        self.state = stored or ServerState(shared, initial_clients=initial_clients)
        self._drop_rows()
        write_text(self.folder / OWNER, self.token)
        rounds = self.project.plan.rounds
        self._write_live("waiting for clients", round=self.round_index, rounds=rounds)

    @property
    def setup(self) -> TrainingSetup:
        """Algorithm and model."""
        return self.project.setup

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.project.folder / RUNS / self.run

    @property
    def shared(self) -> Params:
        """The current shared tree."""
        return self.state.shared

    @property
    def secure_aggregation(self) -> bool:
        """Whether the server sees only the mean of uploads."""
        return self.project.deployment.secure_aggregation

    @property
    def max_weight(self) -> float:
        """The largest weight of the sampled clients, as their handshakes report it."""
        return float(max(self.weights.get(node, 1) for node in self.sampled))

    @property
    def rounds_left(self) -> int:
        """Rounds still to do."""
        if self.skip_training:
            return 0
        return max(self.project.plan.rounds - self.state.rounds_done, 0)

    @property
    def round_timeout(self) -> float:
        """Seconds to wait for the replies of a round."""
        return self.project.deployment.limits.round_timeout

    @property
    def handshake_timeout(self) -> float:
        """Seconds to wait for handshakes; a client that hangs gets a new one every round."""
        return min(self.project.deployment.limits.start_timeout, self.round_timeout)

    @property
    def round_index(self) -> int:
        """The index of the current or next round."""
        return self.project.plan.first_round + self.state.rounds_done

    def registry(self) -> dict[int, RegistryEntry]:
        """The active clients; read each time, as clients may be added or revoked during a run."""
        return active_entries(read_registry(self.project.folder))

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Instructions]:
        """Instructions for registered nodes that have sent no handshake yet."""
        numbers = {entry.ssh_key: number for number, entry in self.registry().items()}
        self.connected = {}
        for node, key in sorted(nodes.items()):
            if key in numbers:
                self.connected[node] = numbers[key]
        instructions = {}
        for node, client in self.connected.items():
            if node not in self.identified and node not in self.refused:
                instructions[node] = self._instructions(client)
        return instructions

    def accept_handshakes(self, replies: Mapping[int, Reply]) -> None:
        """Accept clients with the same algorithm and model; refuse the others for this run.

        A client that was lost during its handshake may send another when it is back.
        """
        for node, reply in replies.items():
            client = self.connected.get(node)
            if reply.lost or client is None:
                continue
            metrics = reply.metrics or {}
            fault = reply.fault or _mismatch(metrics, client, self.setup.fingerprint)
            if fault:
                self.refused[node] = fault
                self._write_live(refused=self._refusals_by_name())
            else:
                self.identified[node] = client
                self.weights[node] = max(int(metrics.get("weight", 1)), 1)
        self._write_live(connected=self._names_of(self._connected_clients().values()))

    def _refusals_by_name(self) -> dict[str, str]:
        """The reason of each refused client that is connected, by name."""
        names, reasons = self._names(), {}
        for node, reason in self.refused.items():
            if node in self.connected:
                reasons[names[self.connected[node]]] = reason
        return reasons

    def needs_more_clients(self) -> bool:
        """Whether to wait: for all clients before the first round, later for enough of them.

        The waits have limits: `start_timeout` for all, `connect_timeout` for enough.
        """
        limits, clients = self.project.deployment.limits, self._connected_clients()
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()
        waited = time.monotonic() - self.waiting_since
        refused = [f"{name}: {reason}" for name, reason in self._refusals_by_name().items()]
        all_connected = len(clients) >= len(self.registry()) - len(refused)
        may_start = all_connected or self.has_started or waited > limits.start_timeout
        if len(clients) >= limits.min_clients and may_start:
            self.has_started, self.waiting_since = True, None
            return False
        none_can_follow = all_connected and bool(refused)
        if waited > limits.connect_timeout or none_can_follow:
            details = f" (refused: {'; '.join(refused)})" if refused else ""
            raise InputError(
                f"run: {len(clients)} clients are connected after {waited:.0f} s, and "
                f"{limits.min_clients} are needed{details}; start more clients"
            )
        return True

    def configure_adaptation(self) -> dict[int, Instructions]:
        """Instructions for new clients, which have neither adapted nor trained yet."""
        adapt_epochs = self.project.deployment.adapt_epochs
        can_adapt = self.setup.algorithm.adapt is not None and adapt_epochs
        if not can_adapt or not self.state.rounds_done:
            return {}
        state = self.state
        known = {*state.initial_clients, *state.adapted, *state.last_included}
        instructions = {}
        for node, client in self._connected_clients().items():
            if client not in known:
                own = self._instructions(client)
                instructions[node] = replace(own, adapt_epochs=adapt_epochs)
        return instructions

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """Record which clients have adapted."""
        adapted = [self.identified[node] for node, reply in replies.items() if not reply.fault]
        ledger = self.state.ledger.add_warm_start(self.shared, len(replies))
        self.state = replace(self.state, adapted=(*self.state.adapted, *adapted), ledger=ledger)
        if replies:
            self._save()

    def configure_train(self) -> dict[int, Instructions]:
        """Sample clients for the next round from the connected ones, as the simulator does."""
        clients = self._connected_clients()
        if not clients:
            raise InputError("run: no client is connected; start some")
        available = Availability.of(sorted(clients.values()))
        chosen = {*sample_available(self.project.plan, available, self.round_index).tolist()}
        self.sampled = {node: client for node, client in clients.items() if client in chosen}
        instructions = {node: self._instructions(client) for node, client in self.sampled.items()}
        self._write_live(
            "training",
            round=self.round_index,
            sampled=self._names_of(self.sampled.values()),
            answered=[],
            connected=self._names_of(clients.values()),
        )
        self.round_started = time.monotonic()
        last_seen = {**self.state.last_seen, **dict.fromkeys(clients.values(), self.round_index)}
        self.state = replace(self.state, last_seen=last_seen)
        if self.project.deployment.privacy is not None:
            self._count_samples(chosen)
        return instructions

    def _count_samples(self, clients: Iterable[int]) -> None:
        """Write down that these clients are sampled, before they are: a crash forgets none."""
        counts = self._sample_counts()
        for client in clients:
            counts[str(client)] = counts.get(str(client), 0) + 1
        write_json(self.folder / SAMPLE_COUNTS, counts)

    def on_reply(self, node: int) -> None:
        """Show that a reply has arrived."""
        if node in self.sampled:
            answered = self.live.get("answered", [])
            self._write_live(answered=[*answered, *self._names_of([self.sampled[node]])])

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all replies, average the valid ones in the order of clients, save the round."""
        uploads, dropped = self._check_replies(replies)
        if not uploads:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in dropped.items())
            raise InputError(
                f"run: round {self.round_index + 1} has no valid reply ({reasons}); correct this"
            )
        clients = sorted(uploads)
        stacked = trees.stack([uploads[client].upload.tensors for client in clients])
        weights = torch.tensor([uploads[client].weight for client in clients])
        aggregated = self.setup.algorithm.aggregate(self.shared, stacked, weights)
        shared = {name: tensor.clone() for name, tensor in aggregated.items()}
        return self._end_round(shared, stacked, clients, self._row(replies, dropped, clients))

    def aggregate_masked(self, mean: Params | None, replies: Mapping[int, Reply]) -> Json:
        """Check the mean itself; of the clients that dropped out, few reasons are known."""
        names, dropped = self._names(), {}
        lost = Reply({}, fault="it did not stay until the end")
        for node, client in self.sampled.items():
            fault = replies.get(node, lost).fault
            if fault:
                dropped[names[client]] = fault
        replies = {node: reply for node, reply in replies.items() if not reply.fault}
        try:
            shared = Upload(mean or {}, self.shared).tensors
        except UploadError as error:
            reasons = "; ".join(f"{name}: {why}" for name, why in dropped.items())
            too_few = f"too few stayed until the end: {reasons}"
            reason = too_few if dropped else str(error)
            raise InputError(
                f"run: round {self.round_index + 1} could not be unmasked ({reason}); "
                "make sure that the clients stay connected"
            ) from error
        clients = sorted(self.sampled[node] for node in replies)
        stacked = {}
        for name, tensor in shared.items():
            stacked[name] = tensor.expand(len(clients), *tensor.shape)
        return self._end_round(shared, stacked, clients, self._row(replies, dropped, clients))

    def _end_round(self, shared: Params, uploads: Params, clients: list[int], row: Json) -> Json:
        """Save a round and show it."""
        self._advance(shared, uploads, clients)
        row["bytes"] = self.state.ledger.total.bytes
        append_rows(self.folder / ROWS, [row])
        self._write_live(
            "training",
            round=self.round_index,
            connected=self._names_of(self._connected_clients().values()),
            loss=row["loss"],
            bytes=row["bytes"],
            dropped=row["dropped"],
        )
        return row

    def _check_replies(
        self, replies: Mapping[int, Reply]
    ) -> tuple[dict[int, CheckedUpload], dict[str, str]]:
        """The valid uploads by client, and by name the reasons why the others are dropped."""
        valid = dict[int, CheckedUpload]()
        dropped, names = {}, self._names()
        no_reply = Reply({}, fault=f"no reply within {self.round_timeout:.0f} s")
        for node, client in self.sampled.items():
            reply = replies.get(node, no_reply)
            try:
                valid[client] = self._check_reply(reply)
            except UploadError as error:
                dropped[names[client]] = str(error)
                if node not in replies or reply.lost:
                    self.identified.pop(node, None)  # when it is back, it sends a new handshake
        return valid, dropped

    def _check_reply(self, reply: Reply) -> CheckedUpload:
        if reply.fault or reply.num_examples < 1:
            raise UploadError(reply.fault or f"it reports {reply.num_examples} examples")
        tensors = {name: reply.tensors[name] for name in _in_order(reply.tensors, self.shared)}
        return CheckedUpload(Upload(tensors, self.shared), reply.num_examples)

    def _metrics_by_client(self, replies: Mapping[int, Reply]) -> dict[int, Json]:
        metrics = {}
        for node, reply in replies.items():
            if node in self.sampled:
                metrics[self.sampled[node]] = reply.metrics or {}
        return metrics

    def _row(
        self, replies: Mapping[int, Reply], dropped: dict[str, str], clients: list[int]
    ) -> Json:
        """The row of a round in the file of rows."""
        metrics, names = self._metrics_by_client(replies), self._names()
        losses, notes = {}, {}
        for client in clients:
            if "loss" in metrics[client]:
                losses[names[client]] = metrics[client]["loss"]
        for client, own in metrics.items():
            if "note" in own:
                notes[names[client]] = own["note"]
        connected = {*self._connected_clients().values()}
        registry = self.registry()
        offline = [entry.name for number, entry in registry.items() if number not in connected]
        return {
            "round": self.round_index,
            "clients": self._names_of(clients),
            "losses": losses,
            "loss": sum(losses.values()) / len(losses) if losses else None,
            "dropped": dropped,
            "notes": notes,
            "offline": offline,
            "seconds": round(time.monotonic() - self.round_started, 2),
        }

    def _advance(self, shared: Params, uploads: Params, clients: list[int]) -> None:
        """Save the state after a round."""
        before = self.state
        last_included = {**before.last_included, **dict.fromkeys(clients, self.round_index)}
        rounds_included = dict(before.rounds_included)
        for client in clients:
            rounds_included[client] = rounds_included.get(client, 0) + 1
        ledger = before.ledger.add_round(
            self.shared, uploads, num_sampled=len(self.sampled), num_clients=len(self.registry())
        )
        self.state = replace(
            before,
            shared=shared,
            rounds_done=before.rounds_done + 1,
            ledger=ledger,
            last_included=last_included,
            rounds_included=rounds_included,
        )
        self._save()

    def configure_evaluate(self) -> dict[int, Instructions]:
        """Every connected client evaluates, every `eval_every` rounds and at the end."""
        every = self.project.deployment.eval_every
        is_due = every is not None and self.state.rounds_done % every == 0
        if self.rounds_left and not is_due:
            self.sampled = {}
            return {}
        self.sampled = self._connected_clients()
        names = self._names_of(self.sampled.values())
        self._write_live("evaluating", sampled=names, answered=[])
        return {node: self._instructions(client) for node, client in self.sampled.items()}

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """Save each client's metrics, where its owner shares them, and their mean."""
        ledger = self.state.ledger.add_evaluation(self.shared, len(self.sampled))
        self.state = replace(self.state, ledger=ledger)
        self._save()
        metrics, clients = self._metrics_by_client(replies), []
        for number, entry in read_registry(self.project.folder).items():
            if not entry.revoked or number in self.state.rounds_included:
                clients.append(self._client_row(number, entry, metrics.get(number, {})))
        scored = [row for row in clients if row["test"] is not None]
        scores = torch.tensor([row["test"] for row in scored]).numpy()
        sizes = torch.tensor([row["test_size"] or 0 for row in scored]).numpy()
        result: Json = {
            "run": self.run,
            "algorithm": self.setup.algorithm.name,
            "rounds": self.state.rounds_done,
            "local_test": summarize(scores, sizes)._asdict() if scored else None,
            "clients": clients,
            "ledger": self.state.ledger.as_dict(),
            "privacy": self._privacy(),
        }
        write_json(self.folder / RESULT, result)
        self._write_live(bytes=self.state.ledger.total.bytes, privacy=result["privacy"])
        return {"test": result["local_test"]["mean"]} if scored else {}

    def _client_row(self, number: int, entry: RegistryEntry, metrics: Json) -> Json:
        return {
            "client": number,
            "name": entry.name,
            "rounds": self.state.rounds_included.get(number, 0),
            "last_round": self.state.last_included.get(number),
            "test": metrics.get("test"),
            "validation": metrics.get("validation"),
            "train_size": metrics.get("train_size"),
            "test_size": metrics.get("test_size"),
            "validation_size": metrics.get("validation_size"),
            "new_client": number not in self.state.initial_clients,
        }

    def _privacy(self) -> Json | None:
        """Epsilon of the client that was sampled most often; dropped uploads leak too and count."""
        privacy, counts = self.project.deployment.privacy, self._sample_counts()
        if privacy is None or not counts:
            return None
        rounds = max(counts.values())
        epsilon_now = epsilon(privacy.noise_multiplier, rounds, privacy.delta)
        return {**asdict(privacy), "rounds": rounds, "epsilon": epsilon_now}

    def _sample_counts(self) -> dict[str, int]:
        """How often each client was sampled, by its number as text."""
        path = self.folder / SAMPLE_COUNTS
        counts: dict[str, int] = read_json(path, dict) if path.exists() else {}
        return counts

    def finish(self) -> None:
        """Show that the run is done."""
        self._write_live("done", sampled=[], answered=[])

    def on_failure(self, error: BaseException) -> None:
        """Show why the run ended early."""
        is_ours = isinstance(error, InputError)
        reason = str(error) if is_ours else f"{describe_error(error)}; correct this"
        self._write_live("failed", reason=reason)

    def _connected_clients(self) -> dict[int, int]:
        """The clients, by node, that are connected and identified."""
        return {node: client for node, client in self.identified.items() if node in self.connected}

    def _instructions(self, client: int) -> Instructions:
        return Instructions(
            self.run,
            self.round_index,
            self.state.last_included.get(client, -1),
            missed_rounds=self._missed_rounds(client),
        )

    def _missed_rounds(self, client: int) -> str:
        """The rounds since a client was last connected, and how the mean loss has changed."""
        last_seen = self.state.last_seen.get(client)
        if last_seen is None or last_seen >= self.round_index - 1:
            return ""
        rows = read_rows(self.folder / ROWS)
        missed = [row for row in rows if last_seen < row["round"] < self.round_index]
        if not missed:
            return ""
        first, last = missed[0]["round"] + 1, missed[-1]["round"] + 1
        rounds = (
            f"round {first}" if len(missed) == 1 else f"{len(missed)} rounds, {first} to {last}"
        )
        losses = [row["loss"] for row in missed if row["loss"] is not None]
        if not losses:
            return rounds
        return f"{rounds}; the mean loss went from {losses[0]:.3f} to {losses[-1]:.3f}"

    def _names(self) -> dict[int, str]:
        """The clients' names; a client that was removed from the registry goes by its number."""
        names = {}
        for client in (*self.identified.values(), *self.sampled.values()):
            names[client] = f"client {client}"
        for number, entry in read_registry(self.project.folder).items():
            names[number] = entry.name
        return names

    def _names_of(self, clients: Iterable[int]) -> list[str]:
        names = self._names()
        return [names[client] for client in sorted(clients)]

    def _write_live(self, state: str | None = None, **fields: object) -> None:
        """Write the current state of the run to disk, for `status` and `follow`."""
        self.live = {**self.live, **fields, "run": self.run, "updated": time.time()}
        if state is not None:
            self.live["state"] = state
        if self._is_owner():  # otherwise another server has taken over the run
            write_json(self.folder / LIVE, self.live)

    def _save(self) -> None:
        if not self._is_owner():
            raise InputError(f"run: {RESUMED_ELSEWHERE}; this server has no part in it any more")
        write_server_state(self.folder / CHECKPOINT, self.state, self.setup)

    def _is_owner(self) -> bool:
        return (self.folder / OWNER).read_text(encoding="utf-8") == self.token

    def _drop_rows(self) -> None:
        """Drop the rows after the checkpoint: those rounds are repeated."""
        lines = ""
        for row in read_rows(self.folder / ROWS):
            if row["round"] < self.round_index:
                lines += json.dumps(row) + "\n"
        write_text(self.folder / ROWS, lines)


def write_server_state(path: Path, state: ServerState, setup: TrainingSetup) -> None:
    """Replace the checkpoint."""
    header = {
        "rounds_done": state.rounds_done,
        "initial_clients": state.initial_clients,
        "adapted": state.adapted,
        "ledger": state.ledger.as_dict(),
        "last_included": _with_text_keys(state.last_included),
        "rounds_included": _with_text_keys(state.rounds_included),
        "last_seen": _with_text_keys(state.last_seen),
        **setup.about(),
        "fingerprint": setup.fingerprint,
    }
    write_tensors(path, state.shared, header)


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
    expected = setup.algorithm.init(setup.params)[0]
    return ServerState(
        shared={name: tensors[name] for name in expected},
        rounds_done=header["rounds_done"],
        ledger=Ledger.from_dict(header["ledger"]),
        last_included=_with_number_keys(header["last_included"]),
        rounds_included=_with_number_keys(header["rounds_included"]),
        last_seen=_with_number_keys(header["last_seen"]),
        initial_clients=tuple(header["initial_clients"]),
        adapted=tuple(header["adapted"]),
    )


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


def _mismatch(identity: Json, number: int, fingerprint: str) -> str:
    """Why a client's handshake does not fit its key or the server's settings."""
    if identity.get("client") != number:
        return (
            f"it says that it is client {identity.get('client')}, "
            f"but its key is that of client {number}"
        )
    if identity.get("fingerprint") != fingerprint:
        return (
            "its study.toml, deploy.toml or model is not the server's; "
            "copy the server's files to it"
        )
    return ""


def _in_order(tree: Params, like: Params) -> list[str]:
    """The names of a tree in the order of `like`; unexpected ones come last."""
    expected = [name for name in like if name in tree]
    return expected + [name for name in tree if name not in like]
