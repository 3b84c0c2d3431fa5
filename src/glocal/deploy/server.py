"""What the server decides and keeps: who is asked, which answers count, where a run goes on after a crash."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

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

RUNS, CHECKPOINT, ROWS, LIVE, RESULT, OWNER = (
    "runs",
    "checkpoint.safetensors",
    "rows.jsonl",
    "live.json",
    "result.json",
    "owner",
)
SAMPLE_COUNTS = "asked.json"
RESUMED_ELSEWHERE = "it has been resumed elsewhere"


@dataclass(frozen=True)
class ServerState:
    """How far a run has come; by device number: the last round that counted, how many did, the last round it was there in."""

    shared: Params
    rounds_done: int = 0
    ledger: Ledger = Ledger()
    last_included: dict[int, int] = field(default_factory=dict)
    rounds_included: dict[int, int] = field(default_factory=dict)
    last_seen: dict[int, int] = field(default_factory=dict)
    initial_clients: tuple[int, ...] = ()
    adapted: tuple[int, ...] = ()


@dataclass
class RunServer:
    """One run of a project. What must survive is in `state`, and on disk after every round; the rest is who is here now."""

    project: Project
    run: str
    skip_training: bool = False
    state: ServerState = field(init=False)
    connected: dict[int, int] = field(
        default_factory=dict
    )  # node -> device, of those that are connected, by their keys
    identified: dict[int, int] = field(
        default_factory=dict
    )  # node -> device, of those that have introduced themselves
    refused: dict[int, str] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    live: Json = field(default_factory=dict)
    waiting_since: float | None = field(
        default_factory=time.monotonic
    )  # when waiting for devices began; None while nobody is lacking
    round_started: float = 0.0
    has_started: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        shared = self.setup.algorithm.init(self.setup.params)[0]
        kept = read_server_state(self.folder / CHECKPOINT, self.setup)
        self.state = kept or ServerState(shared, initial_clients=tuple(sorted(self.registry())))
        self._drop_rows()
        write_text(self.folder / OWNER, self.token)
        self._write_live(
            "waiting for devices", round=self.round_index, rounds=self.project.plan.rounds
        )

    @property
    def setup(self) -> TrainingSetup:
        """Algorithm and model."""
        return self.project.setup

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return self.project.folder / RUNS / self.run

    @property
    def shared(self) -> Params:
        """The shared tree as it is now."""
        return self.state.shared

    @property
    def secure_aggregation(self) -> bool:
        """Whether only the mean of uploads is seen."""
        return self.project.deployment.secure_aggregation

    @property
    def max_weight(self) -> float:
        """The largest weight of those that are asked, as they said when they came."""
        return float(max(self.weights.get(node, 1) for node in self.sampled))

    @property
    def rounds_left(self) -> int:
        """How many rounds are still to be done."""
        return (
            0 if self.skip_training else max(self.project.plan.rounds - self.state.rounds_done, 0)
        )

    @property
    def round_timeout(self) -> float:
        """For how long answers are waited for."""
        return self.project.deployment.limits.round_timeout

    @property
    def handshake_timeout(self) -> float:
        """For how long a greeting is: one that hangs is greeted before every round, and must not hold up all of them."""
        return min(self.project.deployment.limits.start_timeout, self.round_timeout)

    @property
    def round_index(self) -> int:
        """The round that comes next, or is under way."""
        return self.project.plan.first_round + self.state.rounds_done

    def registry(self) -> dict[int, RegistryEntry]:
        """Who belongs to the federation; read anew, for devices may be added or revoked while a run lasts."""
        return active_entries(read_registry(self.project.folder))

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Instructions]:
        """Nodes with a key of the roster that have not introduced themselves."""
        own = {entry.ssh_key: number for number, entry in self.registry().items()}
        self.connected = {node: own[key] for node, key in sorted(nodes.items()) if key in own}
        fresh = [
            node
            for node in self.connected
            if node not in self.identified and node not in self.refused
        ]
        return {node: self._instructions(self.connected[node]) for node in fresh}

    def accept_handshakes(self, greetings: Mapping[int, Reply]) -> None:
        """Take in who has the same algorithm and model; the others are named, and not asked in this run.

        Who was lost while it was greeted has said nothing wrong: it is greeted again when it is back.
        """
        for node, reply in greetings.items():
            client = self.connected.get(node)
            if reply.lost or client is None:
                continue
            told = reply.metrics or {}
            fault = reply.fault or _mismatch(told, client, self.setup.fingerprint)
            if fault:
                self.refused[node] = fault
                self._write_live(refused=self._refusals_by_name())
            else:
                self.identified[node], self.weights[node] = (
                    client,
                    max(int(told.get("weight", 1)), 1),
                )
        self._write_live(connected=self._names_of(self._connected_clients().values()))

    def _refusals_by_name(self) -> dict[str, str]:
        """Who is refused, by name, and why."""
        names = self._names()
        return {
            names[self.connected[node]]: why
            for node, why in self.refused.items()
            if node in self.connected
        }

    def needs_more_clients(self) -> bool:
        """Everybody is waited for before the first round, for a while; enough devices before every other, for longer."""
        limits, here = self.project.deployment.limits, self._connected_clients()
        self.waiting_since = time.monotonic() if self.waiting_since is None else self.waiting_since
        waited = time.monotonic() - self.waiting_since
        refused = [f"{name}: {why}" for name, why in self._refusals_by_name().items()]
        everyone = len(here) >= len(self.registry()) - len(refused)
        if len(here) >= limits.min_clients and (
            everyone or self.has_started or waited > limits.start_timeout
        ):
            self.has_started, self.waiting_since = True, None
            return False
        if waited > limits.connect_timeout or (
            everyone and refused
        ):  # nobody is left who could still come
            told = f" (refused: {'; '.join(refused)})" if refused else ""
            raise InputError(
                f"run: {len(here)} devices are there after {waited:.0f} s, and {limits.min_clients} are needed{told}; start more devices"
            )
        return True

    def configure_adaptation(self) -> dict[int, Instructions]:
        """Who came after the federation was founded, and has not learnt its private part yet, neither alone nor in a round."""
        if (
            self.setup.algorithm.adapt is None
            or not self.project.deployment.adapt_epochs
            or not self.state.rounds_done
        ):
            return {}
        known, adapt_epochs = (
            {*self.state.initial_clients, *self.state.adapted, *self.state.last_included},
            self.project.deployment.adapt_epochs,
        )
        return {
            node: replace(self._instructions(client), adapt_epochs=adapt_epochs)
            for node, client in self._connected_clients().items()
            if client not in known
        }

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """Remember who has settled in."""
        good = [self.identified[node] for node, reply in replies.items() if not reply.fault]
        ledger = self.state.ledger.add_warm_start(self.shared, len(replies))
        self.state = replace(self.state, adapted=(*self.state.adapted, *good), ledger=ledger)
        if replies:
            self._save()

    def configure_train(self) -> dict[int, Instructions]:
        """The cohort of the next round, drawn from who is there as the simulator draws it."""
        here = self._connected_clients()
        if not here:
            raise InputError("run: no device is there; start some")
        cohort = {
            *sample_available(
                self.project.plan, Availability.of(sorted(here.values())), self.round_index
            ).tolist()
        }
        self.sampled = {node: client for node, client in here.items() if client in cohort}
        instructions = {node: self._instructions(client) for node, client in self.sampled.items()}
        names, connected = self._names_of(self.sampled.values()), self._names_of(here.values())
        self._write_live(
            "training", round=self.round_index, sampled=names, answered=[], connected=connected
        )
        self.round_started = time.monotonic()
        last_seen = {
            **self.state.last_seen,
            **{client: self.round_index for client in here.values()},
        }
        self.state = replace(self.state, last_seen=last_seen)
        if self.project.deployment.privacy is not None:
            sampled = self._sample_counts()
            write_json(
                self.folder / SAMPLE_COUNTS,
                {**sampled, **{str(client): sampled.get(str(client), 0) + 1 for client in cohort}},
            )
        return instructions

    def on_reply(self, node: int) -> None:
        """Show that an answer has come."""
        if node in self.sampled:
            self._write_live(
                answered=[*self.live.get("answered", []), *self._names_of([self.sampled[node]])]
            )

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all answers, average the good ones in the order of devices, keep the round."""
        uploads, dropped = self._check_replies(replies)
        if not uploads:
            told = "; ".join(f"{name}: {why}" for name, why in dropped.items())
            raise InputError(
                f"run: round {self.round_index + 1} has no valid answer ({told}); put it right"
            )
        clients = sorted(uploads)
        stacked = trees.stack([uploads[client][0].tensors for client in clients])
        weights = torch.tensor([uploads[client][1] for client in clients])
        shared = self.setup.algorithm.aggregate(self.shared, stacked, weights)
        kept = {name: tensor.clone() for name, tensor in shared.items()}
        return self._end_round(kept, stacked, clients, self._row(replies, dropped, clients))

    def aggregate_masked(self, mean: Params | None, replies: Mapping[int, Reply]) -> Json:
        """The mean itself is what is checked; who dropped out is known, and why is not."""
        names = self._names()
        lost = {
            names[client]: "it did not stay until the end"
            for node, client in self.sampled.items()
            if node not in replies
        }
        try:
            shared = Upload(mean or {}, self.shared).tensors
        except UploadError as error:
            told = f"too few of {', '.join(lost)} stayed until the end" if lost else str(error)
            raise InputError(
                f"run: round {self.round_index + 1} could not be unmasked ({told}); see to it that they stay"
            ) from error
        clients = sorted(self.sampled[node] for node in replies)
        stacked = {
            name: tensor.expand(len(clients), *tensor.shape) for name, tensor in shared.items()
        }
        return self._end_round(shared, stacked, clients, self._row(replies, lost, clients))

    def _end_round(self, shared: Params, uploads: Params, clients: list[int], row: Json) -> Json:
        """Keep a round and show it."""
        self._advance(shared, uploads, clients)
        row["bytes"] = self.state.ledger.total.bytes
        append_rows(self.folder / ROWS, [row])
        told = {"loss": row["loss"], "bytes": row["bytes"], "dropped": row["dropped"]}
        self._write_live(
            "training",
            round=self.round_index,
            connected=self._names_of(self._connected_clients().values()),
            **told,
        )
        return row

    def _check_replies(
        self, replies: Mapping[int, Reply]
    ) -> tuple[dict[int, tuple[Upload, int]], dict[str, str]]:
        """Uploads and weights of the good answers by device, and why the others are dropped."""
        good: dict[int, tuple[Upload, int]] = {}
        dropped, names = {}, self._names()
        for node, client in self.sampled.items():
            reply = replies.get(
                node, Reply({}, fault=f"no answer within {self.round_timeout:.0f} s")
            )
            try:
                if reply.fault or reply.num_examples < 1:
                    raise UploadError(reply.fault or f"it counts {reply.num_examples} examples")
                good[client] = (
                    Upload(
                        {
                            name: reply.tensors[name]
                            for name in _in_order(reply.tensors, self.shared)
                        },
                        self.shared,
                    ),
                    reply.num_examples,
                )
            except UploadError as error:
                dropped[names[client]] = str(error)
                if node not in replies or reply.lost:
                    self.identified.pop(node, None)  # it is greeted again when it comes back
        return good, dropped

    def _row(
        self, replies: Mapping[int, Reply], dropped: dict[str, str], clients: list[int]
    ) -> Json:
        """What is written down of a round."""
        metrics = {
            self.sampled[node]: reply.metrics or {}
            for node, reply in replies.items()
            if node in self.sampled
        }
        names, here = self._names(), {*self._connected_clients().values()}
        losses = {
            names[client]: metrics[client]["loss"]
            for client in clients
            if "loss" in metrics[client]
        }
        notes = {names[client]: told["note"] for client, told in metrics.items() if "note" in told}
        away = [entry.name for number, entry in self.registry().items() if number not in here]
        return {
            "round": self.round_index,
            "clients": self._names_of(clients),
            "losses": losses,
            "loss": sum(losses.values()) / len(losses) if losses else None,
            "dropped": dropped,
            "notes": notes,
            "offline": away,
            "seconds": round(time.monotonic() - self.round_started, 2),
        }

    def _advance(self, shared: Params, uploads: Params, clients: list[int]) -> None:
        """The standing after a round, on disk."""
        now, number = self.state, self.round_index
        last_included = {**now.last_included, **{client: number for client in clients}}
        rounds_included = {
            **now.rounds_included,
            **{client: now.rounds_included.get(client, 0) + 1 for client in clients},
        }
        ledger = now.ledger.add_round(
            self.shared, uploads, num_sampled=len(self.sampled), num_clients=len(self.registry())
        )
        self.state = replace(
            now,
            shared=shared,
            rounds_done=now.rounds_done + 1,
            ledger=ledger,
            last_included=last_included,
            rounds_included=rounds_included,
        )
        self._save()

    def configure_evaluate(self) -> dict[int, Instructions]:
        """Everybody who is there tests, every so many rounds and in the end."""
        every = self.project.deployment.eval_every
        last = not self.rounds_left
        if not last and (every is None or self.state.rounds_done % every):
            self.sampled = {}
            return {}
        self.sampled = self._connected_clients()
        self._write_live("testing", sampled=self._names_of(self.sampled.values()), answered=[])
        return {node: self._instructions(client) for node, client in self.sampled.items()}

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """Each device's figures, where its owner consents."""
        ledger = self.state.ledger.add_evaluation(self.shared, len(self.sampled))
        self.state = replace(self.state, ledger=ledger)
        self._save()
        metrics = {
            self.sampled[node]: reply.metrics or {}
            for node, reply in replies.items()
            if node in self.sampled
        }
        shown = {
            number: entry
            for number, entry in read_registry(self.project.folder).items()
            if not entry.revoked or number in self.state.rounds_included
        }
        clients = [
            self._client_row(number, entry, metrics.get(number, {}))
            for number, entry in shown.items()
        ]
        scored = [row for row in clients if row["test"] is not None]
        sizes, scores = (
            torch.tensor([row[key] or 0 for row in scored]).numpy() for key in ("test_size", "test")
        )
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
        kept = {
            name: metrics.get(name)
            for name in ("test", "validation", "train_size", "test_size", "validation_size")
        }
        rounds = {
            "rounds": self.state.rounds_included.get(number, 0),
            "last_round": self.state.last_included.get(number),
        }
        return {
            "client": number,
            "name": entry.name,
            **rounds,
            **kept,
            "new_client": number not in self.state.initial_clients,
        }

    def _privacy(self) -> Json | None:
        """What the accountant says of the device that was asked most often: what it sent was seen, whether or not it counted."""
        bounds, sampled = self.project.deployment.privacy, self._sample_counts()
        if bounds is None or not sampled:
            return None
        times = max(sampled.values())
        return {
            **asdict(bounds),
            "rounds": times,
            "epsilon": epsilon(bounds.noise_multiplier, times, bounds.delta),
        }

    def _sample_counts(self) -> dict[str, int]:
        """How often each device was asked for an upload, by number; on disk before it is asked, so that no crash forgets one."""
        sampled: dict[str, int] = (
            read_json(self.folder / SAMPLE_COUNTS, dict)
            if (self.folder / SAMPLE_COUNTS).exists()
            else {}
        )
        return sampled

    def finish(self) -> None:
        """Show that all is done."""
        self._write_live("rounds_done", sampled=[], answered=[])

    def on_failure(self, error: BaseException) -> None:
        """Show why it ended."""
        self._write_live(
            "failed",
            why=str(error)
            if isinstance(error, InputError)
            else f"{describe_error(error)}; put it right",
        )

    def _connected_clients(self) -> dict[int, int]:
        """Who is connected and known: node -> device."""
        return {node: client for node, client in self.identified.items() if node in self.connected}

    def _instructions(self, client: int) -> Instructions:
        return Instructions(
            self.run,
            self.round_index,
            self.state.last_included.get(client, -1),
            missed_rounds=self._missed_rounds(client),
        )

    def _missed_rounds(self, client: int) -> str:
        """What happened while a device was away."""
        last = self.state.last_seen.get(client)
        if last is None or last >= self.round_index - 1:
            return ""
        gone = [
            row for row in read_rows(self.folder / ROWS) if last < row["round"] < self.round_index
        ]
        if not gone:
            return ""
        losses = [row["loss"] for row in gone if row["loss"] is not None]
        trend = f"; the mean loss went from {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
        first, last = gone[0]["round"] + 1, gone[-1]["round"] + 1
        return f"{f'round {first}' if len(gone) == 1 else f'{len(gone)} rounds, {first} to {last}'}{trend}"

    def _names(self) -> dict[int, str]:
        """What devices are called; one that has been taken off the roster in the meantime goes by its number."""
        numbered = {
            client: f"device {client}"
            for client in (*self.identified.values(), *self.sampled.values())
        }
        return numbered | {
            number: entry.name for number, entry in read_registry(self.project.folder).items()
        }

    def _names_of(self, clients: Iterable[int]) -> list[str]:
        names = self._names()
        return [names[client] for client in sorted(clients)]

    def _write_live(self, state: str | None = None, **told: object) -> None:
        """Write down what is going on, for `status` and whoever watches."""
        self.live = {**self.live, **told, "run": self.run, "updated": time.time()}
        if state is not None:
            self.live["state"] = state
        if self._is_owner():  # else another server speaks for the run by now
            write_json(self.folder / LIVE, self.live)

    def _save(self) -> None:
        if not self._is_owner():
            raise InputError(f"run: {RESUMED_ELSEWHERE}; this server has no part in it any more")
        write_server_state(self.folder / CHECKPOINT, self.state, self.setup)

    def _is_owner(self) -> bool:
        return (self.folder / OWNER).read_text(encoding="utf-8") == self.token

    def _drop_rows(self) -> None:
        """Rows after the checkpoint will come again."""
        rows = [row for row in read_rows(self.folder / ROWS) if row["round"] < self.round_index]
        write_text(self.folder / ROWS, "".join(json.dumps(row) + "\n" for row in rows))


def write_server_state(path: Path, state: ServerState, setup: TrainingSetup) -> None:
    """Replace the checkpoint."""
    by_device = {
        name: {str(key): value for key, value in getattr(state, name).items()}
        for name in ("last_included", "rounds_included", "last_seen")
    }
    plain = {
        "rounds_done": state.rounds_done,
        "initial_clients": state.initial_clients,
        "adapted": state.adapted,
        "ledger": state.ledger.as_dict(),
    }
    write_tensors(
        path,
        state.shared,
        {**plain, **by_device, **setup.about(), "fingerprint": setup.fingerprint},
    )


def read_server_state(path: Path, setup: TrainingSetup) -> ServerState | None:
    """The checkpoint, if there is one; that of another algorithm or model is refused."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    if about.get("fingerprint") != setup.fingerprint:
        raise InputError(
            f"resume: {path} was made with other settings or another model than there are now; go back to those"
        )
    last_included, rounds_included, last_seen = (
        {int(key): value for key, value in about[name].items()}
        for name in ("last_included", "rounds_included", "last_seen")
    )
    shared = {name: tensors[name] for name in setup.algorithm.init(setup.params)[0]}
    initial_clients, adapted = (tuple(about[name]) for name in ("initial_clients", "adapted"))
    return ServerState(
        shared,
        about["rounds_done"],
        Ledger.from_dict(about["ledger"]),
        last_included,
        rounds_included,
        last_seen,
        initial_clients,
        adapted,
    )


def rounds_done(folder: Path, run: str) -> int | None:
    """How many rounds a run has behind it, None if it never began."""
    path = folder / RUNS / run / CHECKPOINT
    if not path.exists():
        return None
    done = read_metadata(path).get("rounds_done")
    if not isinstance(done, int):
        raise InputError(
            f"resume: {path} was not written by glocal; restore it, or give another --run"
        )
    return done


def _mismatch(told: Json, number: int, fingerprint: str) -> str:
    if told.get("client") != number:
        return f"it says it is device {told.get('client')}, but its key is that of device {number}"
    if told.get("fingerprint") != fingerprint:
        return "its study.toml, deploy.toml or model is not the server's; copy the server's files to it"
    return ""


def _in_order(given: Params, like: Params) -> list[str]:
    """The names of a tree, those that are expected first and in their order."""
    return [
        *(name for name in like if name in given),
        *(name for name in given if name not in like),
    ]
