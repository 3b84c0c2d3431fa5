"""One run on the server: which clients are sampled, which replies are valid, and what is shown."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from glocal.algorithms.contract import Message
from glocal.core.errors import InputError, describe_error
from glocal.core.files import Json
from glocal.core.sampling import Availability, sample_available
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Instructions, Reply, Request
from glocal.deploy.project import Project
from glocal.deploy.registry import RegistryEntry, active_entries, read_registry
from glocal.deploy.server_files import CHECKPOINT, RUNS, RunFiles, ServerState, read_server_state
from glocal.deploy.server_result import build_result, read_figures
from glocal.deploy.server_rounds import (
    Collected,
    ServerRound,
    ValidReply,
    check_reply,
    replica_of,
    sums_of,
)
from glocal.deploy.setup import TrainingSetup
from glocal.evaluate.privacy import epsilon
from glocal.wire import Schema, WireError


@dataclass
class RunServer:
    """One run of a project. `state` is on disk after every round, all else is lost with a crash.

    `registered` are all clients, as the registry had them when the round began. `connected` maps
    the nodes that are connected to client numbers, by their keys; `identified` and `sampled` map
    those that have sent a valid handshake and those that are sampled now. `waiting_since` is None
    while enough clients are connected.
    """

    project: Project
    run: str
    skip_training: bool = False
    state: ServerState = field(init=False)
    files: RunFiles = field(init=False)
    registered: dict[int, RegistryEntry] = field(init=False)
    connected: dict[int, int] = field(default_factory=dict)
    identified: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    round: ServerRound = field(init=False)
    waiting_since: float | None = field(default_factory=time.monotonic)
    round_started: float = 0.0
    has_started: bool = False

    def __post_init__(self) -> None:
        self.registered = read_registry(self.project.folder)
        self.files = RunFiles(self.folder)
        stored = read_server_state(self.folder / CHECKPOINT, self.setup)
        initial_clients = tuple(sorted(self._active()))
        self.state = stored or ServerState(self.setup.start, initial_clients=initial_clients)
        self.files.take_over(self.round_index)
        rounds = self.project.plan.rounds
        self.files.write_live("waiting for clients", round=self.round_index, rounds=rounds)

    @property
    def setup(self) -> TrainingSetup:
        """Algorithm, codec and model."""
        return self.project.setup

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.project.folder / RUNS / self.run

    @property
    def shared(self) -> Params:
        """The current shared tree."""
        return self.state.training.shared

    @property
    def live(self) -> Json:
        """What `status` shows of the run."""
        return self.files.live

    @property
    def payload_schema(self) -> Schema:
        """What a client sends back."""
        return self.setup.wire.payload

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

    # ---- who is connected

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Request]:
        """Requests for registered nodes that have sent no handshake yet.

        The registry is read here, once a round, as clients may be added or revoked during a run.
        """
        self.registered = read_registry(self.project.folder)
        numbers = {entry.ssh_key: number for number, entry in self._active().items()}
        self.connected = {}
        for node, key in sorted(nodes.items()):
            if key in numbers:
                self.connected[node] = numbers[key]
        requests = {}
        for node, client in self.connected.items():
            if node not in self.identified and node not in self.refused:
                requests[node] = Request(self._instructions(client))
        return requests

    def accept_handshakes(self, replies: Mapping[int, Reply]) -> None:
        """Accept clients with the same algorithm and model; refuse the others for this run.

        A client that was lost during its handshake may send another when it is back.
        """
        for node, reply in replies.items():
            client = self.connected.get(node)
            if reply.lost or client is None:
                continue
            fault = reply.fault or _mismatch(reply.metrics, client, self.setup.fingerprint)
            weight = reply.metrics.get("weight", 1)
            if fault or not isinstance(weight, int):
                self.refused[node] = fault or f"its weight is {weight}"
                self.files.write_live(refused=self._refusals_by_name())
            else:
                self.identified[node] = client
                self.weights[node] = max(weight, 1)
        self.files.write_live(connected=self._names_of(self._connected_clients().values()))

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
        all_connected = len(clients) >= len(self._active()) - len(refused)
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

    # ---- new clients

    def configure_adaptation(self) -> dict[int, Request]:
        """Requests for new clients, which have neither adapted nor trained yet."""
        adapt_epochs = self.project.deployment.adapt_epochs
        can_adapt = self.setup.has_private_part and adapt_epochs
        if not can_adapt or not self.state.rounds_done:
            return {}
        state = self.state
        known = {*state.initial_clients, *state.adapted, *state.last_included}
        new = {n: client for n, client in self._connected_clients().items() if client not in known}
        requests = {}
        for node, request in self._requests(new).items():
            instructions = replace(request.instructions, adapt_epochs=adapt_epochs)
            requests[node] = replace(request, instructions=instructions)
        return requests

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """Record which clients have adapted."""
        if not replies:
            return
        adapted = [self.identified[node] for node, reply in replies.items() if not reply.fault]
        message = self._messages(self.identified[node] for node in replies)
        ledger = self.state.ledger.add_warm_start(next(iter(message.values())), len(replies))
        self.state = replace(self.state, adapted=(*self.state.adapted, *adapted), ledger=ledger)
        self.files.save(self.state, self.setup)

    # ---- rounds

    def configure_train(self) -> dict[int, Request]:
        """Sample clients for the next round from the connected ones, as the simulator does."""
        clients = self._connected_clients()
        if not clients:
            raise InputError("run: no client is connected; start some")
        available = Availability.of(sorted(clients.values()))
        chosen = {*sample_available(self.project.plan, available, self.round_index).tolist()}
        self.sampled = {node: client for node, client in clients.items() if client in chosen}
        requests = self._requests(self.sampled)
        self.files.write_live(
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
            self.files.count_samples(chosen)
        return requests

    def on_reply(self, node: int) -> None:
        """Show that a reply has arrived."""
        if node in self.sampled:
            answered = self.live.get("answered", [])
            self.files.write_live(answered=[*answered, *self._names_of([self.sampled[node]])])

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all replies, collect the valid ones in the order of clients, save the round."""
        valid, dropped = self._check_replies(replies)
        collected = self.round.collect(valid)
        dropped |= collected.dropped
        if not collected.clients:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._by_name(dropped).items())
            raise InputError(
                f"run: round {self.round_index + 1} has no valid reply ({reasons}); correct this"
            )
        return self._end_round(collected, replies, dropped)

    def aggregate_masked(self, mean: Message | None, replies: Mapping[int, Reply]) -> Json:
        """Check the mean itself; of the clients that dropped out, few reasons are known."""
        dropped, num_examples = dict[int, str](), dict[int, int]()
        lost = Reply(fault="it did not stay until the end")
        for node, client in self.sampled.items():
            reply = replies.get(node, lost)
            if reply.fault:
                dropped[client] = reply.fault
            else:
                num_examples[client] = reply.num_examples
        if mean is None:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._by_name(dropped).items())
            raise InputError(
                f"run: round {self.round_index + 1} could not be unmasked (too few stayed until "
                f"the end: {reasons}); make sure that the clients stay connected"
            )
        return self._end_round(self.round.collect_mean(mean, num_examples), replies, dropped)

    def _check_replies(
        self, replies: Mapping[int, Reply]
    ) -> tuple[dict[int, ValidReply], dict[int, str]]:
        """By client, the replies in the declared form, and why the others are dropped."""
        valid, dropped = dict[int, ValidReply](), dict[int, str]()
        no_reply = Reply(fault=f"no reply within {self.round_timeout:.0f} s", lost=True)
        for node, client in self.sampled.items():
            reply = replies.get(node, no_reply)
            try:
                valid[client] = check_reply(reply, self.setup.wire)
            except WireError as error:
                dropped[client] = str(error)
                if reply.lost:
                    self.identified.pop(node, None)  # when it is back, it sends a new handshake
        return valid, dropped

    def _end_round(
        self, collected: Collected, replies: Mapping[int, Reply], dropped: Mapping[int, str]
    ) -> Json:
        """Save a round and show it."""
        row = self._row(replies, dropped, collected.clients)
        self._advance(collected)
        row["bytes"] = self.state.ledger.total.bytes
        self.files.append_row(row)
        self.files.write_live(
            "training",
            round=self.round_index,
            connected=self._names_of(self._connected_clients().values()),
            loss=row["loss"],
            bytes=row["bytes"],
            dropped=row["dropped"],
        )
        return row

    def _row(
        self, replies: Mapping[int, Reply], dropped: Mapping[int, str], clients: list[int]
    ) -> Json:
        """The row of a round in the file of rows."""
        metrics, names = self._metrics_by_client(replies), self._names()
        losses, notes = {}, {}
        for client, own in metrics.items():
            sums = sums_of(own)
            if client in clients and "loss" in sums:
                losses[names[client]] = float(sums["loss"].mean)
            if "note" in own:
                notes[names[client]] = own["note"]
        connected = {*self._connected_clients().values()}
        active = self._active()
        return {
            "round": self.round_index,
            "clients": self._names_of(clients),
            "losses": losses,
            "loss": sum(losses.values()) / len(losses) if losses else None,
            "dropped": self._by_name(dropped),
            "notes": notes,
            "offline": [entry.name for number, entry in active.items() if number not in connected],
            "seconds": round(time.monotonic() - self.round_started, 2),
        }

    def _advance(self, collected: Collected) -> None:
        """Save the state after a round."""
        before, clients = self.state, collected.clients
        rounds_included = dict(before.rounds_included)
        for client in clients:
            rounds_included[client] = rounds_included.get(client, 0) + 1
        self.state = replace(
            before,
            training=collected.state,
            rounds_done=before.rounds_done + 1,
            ledger=before.ledger + collected.traffic,
            last_included={**before.last_included, **dict.fromkeys(clients, self.round_index)},
            rounds_included=rounds_included,
        )
        self.files.save(self.state, self.setup)

    # ---- evaluation

    def configure_evaluate(self) -> dict[int, Request]:
        """Every connected client evaluates, every `eval_every` rounds and at the end."""
        every = self.project.deployment.eval_every
        is_due = every is not None and self.state.rounds_done % every == 0
        if self.rounds_left and not is_due:
            self.sampled = {}
            return {}
        self.sampled = self._connected_clients()
        names = self._names_of(self.sampled.values())
        self.files.write_live("evaluating", sampled=names, answered=[])
        return self._requests(self.sampled)

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """Save each client's metrics, where its owner shares them, and their means."""
        task, sent = self.setup.task, [*self.round.sent.values()]
        ledger = self.state.ledger.add_evaluation(sent[0], len(sent))
        self.state = replace(self.state, ledger=ledger)
        self.files.save(self.state, self.setup)
        figures = dict[int, Json]()
        for client, metrics in self._metrics_by_client(replies).items():
            figures[client] = read_figures(task, metrics)
        result = {
            "run": self.run,
            "algorithm": self.setup.algorithm.word,
            **build_result(task, self.state, self.registered, figures),
            "privacy": self._privacy(),
        }
        self.files.write_result(result)
        self.files.write_live(bytes=self.state.ledger.total.bytes, privacy=result["privacy"])
        return {"test": result["local_test"]["mean"]} if result["local_test"] else {}

    def _privacy(self) -> Json | None:
        """Epsilon of the client that was sampled most often; dropped uploads leak too and count."""
        privacy, counts = self.project.deployment.privacy, self.files.sample_counts()
        if privacy is None or not counts:
            return None
        rounds = max(counts.values())
        epsilon_now = epsilon(privacy.noise_multiplier, rounds, privacy.delta)
        return {**asdict(privacy), "rounds": rounds, "epsilon": epsilon_now}

    def finish(self) -> None:
        """Show that the run is done."""
        self.files.write_live("done", sampled=[], answered=[])

    def on_failure(self, error: BaseException) -> None:
        """Show why the run ended early."""
        is_ours = isinstance(error, InputError)
        reason = str(error) if is_ours else f"{describe_error(error)}; correct this"
        self.files.write_live("failed", reason=reason)
