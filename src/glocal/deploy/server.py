"""One run on the server: which clients are sampled, which replies count, and what is shown."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from glocal.algorithms.contract import Message
from glocal.core.errors import InputError, describe_error
from glocal.core.files import Json
from glocal.core.sampling import Availability, sample_available
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Instructions, Reply, Request
from glocal.deploy.formatting import describe_missed
from glocal.deploy.project import Project
from glocal.deploy.server_clients import RunClients
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

    `sampled` maps the nodes that have work now to client numbers, and `current` has what they were
    sent.
    """

    project: Project
    run: str
    skip_training: bool = False
    clients: RunClients = field(init=False)
    files: RunFiles = field(init=False)
    state: ServerState = field(init=False)
    current: ServerRound = field(init=False)
    sampled: dict[int, int] = field(default_factory=dict)
    round_started: float = 0.0

    def __post_init__(self) -> None:
        self.clients, self.files = RunClients(self.project), RunFiles(self.folder)
        stored = read_server_state(self.folder / CHECKPOINT, self.setup)
        initial_clients = tuple(sorted(self.clients.active()))
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
        return float(max(self.clients.weights.get(node, 1) for node in self.sampled))

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

    def configure_handshake(self, nodes: Mapping[int, str]) -> dict[int, Request]:
        """Requests for registered nodes that have sent no handshake yet."""
        requests = {}
        for node, client in self.clients.update(nodes).items():
            requests[node] = Request(self._instructions(client))
        return requests

    def accept_handshakes(self, replies: Mapping[int, Reply]) -> None:
        """Accept or refuse the clients of these handshakes, and show it."""
        self.clients.accept(replies)
        if refusals := self.clients.refusals():
            self.files.write_live(refused=refusals)
        self.files.write_live(connected=self._present_names())

    def needs_more_clients(self) -> bool:
        """Whether too few clients are connected; an error once the time limit has passed."""
        return self.clients.are_awaited()

    # ---- new clients

    def configure_adaptation(self) -> dict[int, Request]:
        """Requests for new clients, which have neither adapted nor trained yet."""
        adapt_epochs, state = self.project.deployment.adapt_epochs, self.state
        if not adapt_epochs or not self.setup.has_private_part or not state.rounds_done:
            return {}
        known = {*state.initial_clients, *state.adapted, *state.last_included}
        new = {n: client for n, client in self.clients.present().items() if client not in known}
        requests = {}
        for node, request in self._begin_round(new).items():
            instructions = replace(request.instructions, adapt_epochs=adapt_epochs)
            requests[node] = replace(request, instructions=instructions)
        return requests

    def aggregate_adaptation(self, replies: Mapping[int, Reply]) -> None:
        """Record which clients have adapted."""
        if not replies:
            return
        own = {node: client for node, client in self.sampled.items() if node in replies}
        adapted = [client for node, client in own.items() if not replies[node].fault]
        message = next(iter(self.current.sent.values()))
        ledger = self.state.ledger.add_warm_start(message, len(own))
        self.state = replace(self.state, adapted=(*self.state.adapted, *adapted), ledger=ledger)
        self.files.save(self.state, self.setup)

    # ---- rounds

    def configure_train(self) -> dict[int, Request]:
        """Sample clients for the next round from the connected ones, as the simulator does."""
        clients = self.clients.present()
        if not clients:
            raise InputError("run: no client is connected; start some")
        available = Availability.of(sorted(clients.values()))
        chosen = {*sample_available(self.project.plan, available, self.round_index).tolist()}
        sampled = {node: client for node, client in clients.items() if client in chosen}
        requests = self._begin_round(sampled)
        self.files.write_live(
            "training",
            round=self.round_index,
            sampled=self.clients.names_of(self.sampled.values()),
            answered=[],
            connected=self.clients.names_of(clients.values()),
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
            name = self.clients.name_of(self.sampled[node])
            self.files.write_live(answered=[*self.live.get("answered", []), name])

    def aggregate_train(self, replies: Mapping[int, Reply]) -> Json:
        """Check all replies, collect the valid ones in the order of clients, save the round."""
        valid, dropped = self._check_replies(replies)
        collected = self.current.collect(valid)
        dropped |= collected.dropped
        if not collected.clients:
            raise InputError(
                f"run: round {self.round_index + 1} has no valid reply "
                f"({self._describe(dropped)}); correct this"
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
            reasons = self._describe(dropped)
            raise InputError(
                f"run: round {self.round_index + 1} could not be unmasked (too few stayed until "
                f"the end{f': {reasons}' if reasons else ''}); "
                "make sure that the clients stay connected"
            )
        return self._end_round(self.current.collect_mean(mean, num_examples), replies, dropped)

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
                if reply.lost:  # when it is back, it sends a new handshake
                    self.clients.identified.pop(node, None)
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
            connected=self._present_names(),
            loss=row["loss"],
            bytes=row["bytes"],
            dropped=row["dropped"],
        )
        return row

    def _row(
        self, replies: Mapping[int, Reply], dropped: Mapping[int, str], clients: list[int]
    ) -> Json:
        """The row of a round in the file of rows."""
        losses, notes = {}, {}
        for client, metrics in self._metrics_by_client(replies).items():
            name, sums = self.clients.name_of(client), sums_of(metrics)
            if client in clients and "loss" in sums:
                losses[name] = float(sums["loss"].mean)
            if "note" in metrics:
                notes[name] = metrics["note"]
        return {
            "round": self.round_index,
            "clients": self.clients.names_of(clients),
            "losses": losses,
            "loss": sum(losses.values()) / len(losses) if losses else None,
            "dropped": self._by_name(dropped),
            "notes": notes,
            "offline": self.clients.offline(),
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
        requests = self._begin_round(self.clients.present())
        self.files.write_live("evaluating", sampled=self._present_names(), answered=[])
        return requests

    def aggregate_evaluate(self, replies: Mapping[int, Reply]) -> Json:
        """Save each client's metrics, where its owner shares them, and their means."""
        task, sent = self.setup.task, [*self.current.sent.values()]
        ledger = self.state.ledger.add_evaluation(sent[0], len(sent))
        self.state = replace(self.state, ledger=ledger)
        self.files.save(self.state, self.setup)
        figures = dict[int, Json]()
        for client, metrics in self._metrics_by_client(replies).items():
            figures[client] = read_figures(task, metrics)
        result = {
            "run": self.run,
            "algorithm": self.setup.algorithm.word,
            **build_result(task, self.state, self.clients.registered, figures),
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

    # ---- what clients are sent

    def _begin_round(self, clients: dict[int, int]) -> dict[int, Request]:
        """A message and instructions for each of these clients, by node."""
        members = {*self.state.initial_clients, *self.clients.active(), *self.state.last_included}
        replica = replica_of(self.setup, self.project.plan, len(members))
        numbers = sorted(clients.values())
        self.sampled = clients
        self.current = ServerRound.begin(replica, self.state.training, self.round_index, numbers)
        requests = {}
        for node, client in clients.items():
            requests[node] = Request(self._instructions(client), self.current.sent[client])
        return requests

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
        rows = self.files.rows()
        return describe_missed([row for row in rows if last_seen < row["round"] < self.round_index])

    # ---- names

    def _metrics_by_client(self, replies: Mapping[int, Reply]) -> dict[int, Json]:
        metrics = {}
        for node, reply in replies.items():
            if node in self.sampled:
                metrics[self.sampled[node]] = reply.metrics
        return metrics

    def _by_name(self, reasons: Mapping[int, str]) -> dict[str, str]:
        return {self.clients.name_of(client): reason for client, reason in reasons.items()}

    def _describe(self, reasons: Mapping[int, str]) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self._by_name(reasons).items())

    def _present_names(self) -> list[str]:
        return self.clients.names_of(self.clients.present().values())
