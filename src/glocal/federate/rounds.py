"""One round. Only who executes the clients differs: an engine here, real devices in a deployment.

`assign` says what a client is sent and does. `client_step` is what it runs. `collect` is the
server's half: it decodes the replies, calls the algorithm's `server_update`, and counts the bytes.
Several seeds are several replicas, whose clients run in one batch; several groups are clients with
other models, which share what is sent.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Message, Uploads
from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.errors import DivergedError, InputError
from glocal.core.sampling import (
    Availability,
    IntArray,
    Plan,
    client_batches,
    client_key,
    sample_available,
    sample_clients,
)
from glocal.core.store import PerClient, TrainingState, fitting_gpu_rows
from glocal.core.training import WeightedSum, Work
from glocal.core.trees import Params
from glocal.engines.config import EngineConfig
from glocal.engines.executor import Executor
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    to_device,
    unstack_rows,
)
from glocal.engines.vmapped import stack_rows
from glocal.wire import Codec, Identity, Ledger, Wire, gate, split_private


class Reply(NamedTuple):
    """What a client's step gives: `payload` and `metrics` are sent, `private` stays.

    For one client, or for many with an axis of clients in front.
    """

    payload: Message
    private: Params
    metrics: dict[str, WeightedSum]


@dataclass(frozen=True)
class GroupClients:
    """The clients with one model: their algorithm, their training data, and what may cross.

    They are numbered from `first` among all clients of the federation.
    """

    algorithm: Algorithm
    train: ClientData
    wire: Wire
    first: int = 0

    def own(self, clients: IntArray) -> IntArray:
        """Those of some clients that are in this group, by their numbers in it."""
        own = clients - self.first
        return own[(own >= 0) & (own < self.train.num_clients)]


@dataclass(frozen=True)
class Replica:
    """One federation, such as one of several seeds; it does not change between rounds.

    All clients are available if there is no `availability`.
    """

    groups: tuple[GroupClients, ...]
    plan: Plan
    availability: Availability | None = None

    @property
    def num_clients(self) -> int:
        """The number of clients of all groups."""
        return sum(group.train.num_clients for group in self.groups)


class Sampled(NamedTuple):
    """The clients of a round; `left` of them in addition leave before they answer."""

    clients: IntArray
    left: int = 0


class GroupReplies(NamedTuple):
    """What one group's clients were sent and replied; `reply` is None without any client.

    Payloads and metrics have an axis of clients; private trees are by client. `left` more clients
    were sent something and left before they answered.
    """

    clients: list[int]
    sent: list[Message]
    payloads: Message
    private: list[Params]
    metrics: dict[str, WeightedSum]
    num_examples: Tensor
    left: int = 0


class RoundReport(NamedTuple):
    """One round of one replica.

    `clients` are the numbers of all that replied, and `counted` (clients,) says whose upload was
    finite: others are left out. `losses` and other metrics are by client.
    """

    round_index: int
    clients: IntArray
    counted: Tensor
    metrics: dict[str, Tensor]
    traffic: tuple[Ledger, ...]

    @property
    def losses(self) -> Tensor:
        """The mean loss of every client (clients,)."""
        return self.metrics["loss"]

    @property
    def dropped(self) -> list[int]:
        """The clients whose uploads were not finite; known once the round has run."""
        return [int(client) for client in self.clients[~self.counted.cpu().numpy()]]

    def mean_loss(self, members: range) -> float | None:
        """The mean over those of some clients that count; None without any."""
        inside = (self.clients >= members.start) & (self.clients < members.stop)
        own = torch.from_numpy(inside) & self.counted.cpu()
        losses = self.losses.cpu()[own]
        return float(losses.mean()) if len(losses) else None


@dataclass(frozen=True)
class GroupSetup:
    """A group before the first round: its algorithm, and the params that its clients start from."""

    algorithm: Algorithm
    params: Params


def start_wires(setups: Sequence[GroupSetup], codec: Codec | None = None) -> tuple[Wire, ...]:
    """What may cross in each group; groups that do not share the same tensors are refused."""
    wires: list[Wire] = []
    for setup in setups:
        algorithm, state = setup.algorithm, setup.algorithm.init(setup.params)
        download = algorithm.download(state.shared, state.profile)
        upload = algorithm.upload_like(state.shared)
        wires.append(Wire.of(download, upload, state.private, codec or Identity()))
    return tuple(wires)


def start_state(
    setups: Sequence[GroupSetup], wires: Sequence[Wire], *, replicas: int = 1
) -> TrainingState:
    """The state before the first round: the first group's shared tree, and initial private ones."""
    states = [setup.algorithm.init(setup.params) for setup in setups]
    private: list[PerClient] = []
    for state, wire in zip(states, wires, strict=True):
        device = next((tensor.device for tensor in state.shared.values()), None)
        row = {**state.private, **wire.initial_memory(device)}
        private.append(PerClient(row, {}, fitting_gpu_rows(row, replicas)))
    profiles = [PerClient(state.profile, {}) for state in states]
    return TrainingState(states[0].shared, states[0].server, tuple(private), tuple(profiles))


def client_step(algorithm: Algorithm, wire: Wire) -> ClientFunction[Reply]:
    """A client's half of a round: the same in the simulator and on a real device."""

    def step(message: Message, private: Params, work: Work) -> Reply:
        received = gate(message, wire.download)
        own, memory = split_private(private)
        update = algorithm.client_update(received, own, work)
        payload, memory = wire.encode(update.upload, memory, work.key)
        after = gate({**update.private, **memory}, wire.private)
        return Reply(payload, after, update.metrics)

    return step


def sample(replica: Replica, round_index: int) -> Sampled:
    """The clients of a round, numbered over all groups."""
    if replica.availability is None:
        return Sampled(sample_clients(replica.plan, replica.num_clients, round_index))
    sampled = sample_available(replica.plan, replica.availability, round_index)
    _require_present(replica, sampled)
    staying = np.setdiff1d(sampled, replica.availability.dropouts)
    return Sampled(staying, len(sampled) - len(staying))


def assign(
    replica: Replica, state: TrainingState, place: int, clients: Sequence[int], round_index: int
) -> list[ClientTask]:
    """What some clients of a group are sent and do: data enter a round only here."""
    group, plan = replica.groups[place], replica.plan
    epochs = group.algorithm.num_epochs(plan.local_epochs)
    messages = downloads(group, state, place, clients)
    tasks: list[ClientTask] = []
    for client, message in zip(clients, messages, strict=True):
        number = group.first + client
        order = client_order(plan, epochs, group.train, client, round_index, number=number)
        key = client_key(plan, round_index, number)
        tasks.append(ClientTask(message, state.private[place].of(client), order, key))
    return tasks


def client_order(
    plan: Plan,
    epochs: int,
    train: ClientData,
    client: int,
    round_index: int,
    *,
    number: int | None = None,
) -> IntArray:
    """A client's rows in a round, in their order (epochs, steps, batch).

    `number` is the address of the client's randomness, if it is not `client` itself.
    """
    rows = train.rows[client]
    lengths = None if plan.max_tokens is None else train.text_lengths[rows]
    address = client if number is None else number
    own_plan = plan if epochs == plan.local_epochs else replace(plan, local_epochs=epochs)
    return client_batches(own_plan, rows, round_index, address, lengths=lengths)


def downloads(
    group: GroupClients, state: TrainingState, place: int, clients: Sequence[int]
) -> list[Message]:
    """What clients are sent; without profiles it is ONE object, which engines need not copy."""
    profiles = state.profiles[place]

    def one(profile: Params) -> Message:
        return gate(group.algorithm.download(state.shared, profile), group.wire.download)

    if profiles.initial:
        return [one(profiles.of(client)) for client in clients]
    return [one({})] * len(clients) if clients else []


def collect(
    replica: Replica, state: TrainingState, replies: Sequence[GroupReplies], round_index: int
) -> tuple[TrainingState, RoundReport]:
    """The server's half of a round: decode, update, remember, and put private trees back.

    A client whose upload or loss is not finite does not count: the round goes on as if it had not
    replied, and its private tree stays as it was.
    """
    pairs = zip(replica.groups, replies, strict=True)
    traffic = tuple(_traffic(group, state, each) for group, each in pairs)
    answered = [place for place, each in enumerate(replies) if each.clients]
    if not answered:
        return state, _nobody_replied(round_index, traffic)
    parts = [replies[place] for place in answered]
    groups = [replica.groups[place] for place in answered]
    decoded = [group.wire.decode(part.payloads) for group, part in zip(groups, parts, strict=True)]
    uploads = Uploads(
        messages=_joined(decoded),
        sent=stack_rows([message for part in parts for message in part.sent]),
        profiles=_profiles(state, answered, parts),
        num_examples=torch.cat([part.num_examples for part in parts]),
        num_clients=replica.num_clients,
        round_index=torch.tensor(round_index),
        aggregation=groups[0].algorithm.aggregation,
    )
    metrics = _metrics(parts)
    shared, server, counted = _server_step(groups[0].algorithm, state, uploads, metrics["loss"])
    after = TrainingState(
        _without_aliases(shared, uploads.messages),
        _without_aliases(server, uploads.messages),
        _with_private(state, answered, parts, counted),
        _with_profiles(groups[0].algorithm, state, answered, parts, (uploads, counted)),
    )
    numbers = [
        group.first + np.array(part.clients) for group, part in zip(groups, parts, strict=True)
    ]
    return after, RoundReport(round_index, np.concatenate(numbers), counted, metrics, traffic)


def collect_mean(
    replica: Replica,
    state: TrainingState,
    mean: Message,
    num_examples: Tensor,
    round_index: int,
) -> TrainingState:
    """The server's half of a round of which it knows only the mean of all uploads, as by SecAgg+.

    `num_examples` (clients,) are those of the clients in the mean. Private trees are the clients'.
    """
    group = replica.groups[0]
    uploads = Uploads(
        messages={},
        sent={},
        profiles={},
        num_examples=num_examples,
        num_clients=replica.num_clients,
        round_index=torch.tensor(round_index),
        aggregation=group.algorithm.aggregation,
        mean=gate(mean, group.wire.upload),
    )
    shared, server = group.algorithm.server_update(state.shared, state.server, uploads)
    return state._replace(shared=shared, server=server)


def needs_single_uploads(algorithm: Algorithm, params: Params) -> bool:
    """Whether the server must see single uploads: found by trial on zeros, not declared."""
    state = algorithm.init(params)
    like = trees.zeros_like(algorithm.upload_like(state.shared))
    two = torch.ones(2, dtype=torch.int64)
    uploads = Uploads({}, {}, {}, two, 2, torch.tensor(0), algorithm.aggregation, mean=like)
    if state.profile or not algorithm.aggregation.is_mean:
        return True
    try:
        algorithm.server_update(state.shared, state.server, uploads)
    except InputError:
        return True
    return False


def _server_step(
    algorithm: Algorithm, state: TrainingState, uploads: Uploads, losses: Tensor
) -> tuple[Params, Params, Tensor]:
    """The shared and the server's own state after a round, and who counts (clients,).

    A mean of finite numbers is finite, so on a CPU it is enough to look at the result: single
    uploads are searched only if something is wrong. A GPU must not be waited for: there, whoever
    does not count gets the weight 0.
    """
    if uploads.num_examples.is_cuda and algorithm.aggregation.is_mean:
        return masked_step(algorithm, state, uploads, losses)
    everybody = torch.ones(len(losses), dtype=torch.bool, device=losses.device)
    if algorithm.aggregation.is_mean:
        after = algorithm.server_update(state.shared, state.server, uploads)
        if all(map(_is_finite, after)) and bool(torch.isfinite(losses).all()):
            return *after, everybody
    counted = _finite_rows(uploads.messages, losses)
    if not counted.any():
        return state.shared, state.server, counted
    return *algorithm.server_update(state.shared, state.server, uploads.only(counted)), counted


def masked_step(
    algorithm: Algorithm, state: TrainingState, uploads: Uploads, losses: Tensor
) -> tuple[Params, Params, Tensor]:
    """The same without a look at any value; if nobody counts, both trees stay as they are."""
    counted = _finite_rows(uploads.messages, losses)
    masked = uploads.masked(counted)
    shared, server = algorithm.server_update(state.shared, state.server, masked)
    anybody = counted.any()
    after = trees.where(anybody, shared, state.shared)
    return after, trees.where(anybody, server, state.server), counted


def _is_finite(tree: Params) -> bool:
    """Whether all numbers of a tree are finite: a sum is, only if each of them is."""
    for tensor in tree.values():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return False
    return True


def _finite_rows(messages: Params, losses: Tensor) -> Tensor:
    """Whose message and loss are finite (clients,)."""
    finite = torch.isfinite(losses)
    for tensor in messages.values():
        if tensor.is_floating_point():
            finite = finite & torch.isfinite(tensor).flatten(1).all(1)
    return finite


def _traffic(group: GroupClients, state: TrainingState, replies: GroupReplies) -> Ledger:
    """What crossed the wire: downloads of everybody who was sampled, uploads of who replied."""
    sampled = len(replies.clients) + replies.left
    sent = replies.sent[0] if replies.sent else _any_download(group, state)
    return Ledger().add_round(
        sent,
        replies.payloads if replies.clients else {},
        scalars=group.wire.scalars,
        num_sampled=sampled,
        num_replied=len(replies.clients),
        num_clients=group.train.num_clients,
        metrics=len(replies.metrics),
    )


def _any_download(group: GroupClients, state: TrainingState) -> Message:
    """A download like those of clients that left before they answered."""
    profile = group.algorithm.init(group.algorithm.task.initial_params()).profile
    return group.algorithm.download(state.shared, profile)


def _nobody_replied(round_index: int, traffic: tuple[Ledger, ...]) -> RoundReport:
    none = np.zeros(0, dtype=np.int64)
    nobody = torch.zeros(0, dtype=torch.bool)
    return RoundReport(round_index, none, nobody, {"loss": torch.zeros(0)}, traffic)


def _joined(parts: Sequence[Params]) -> Params:
    """The rows of several groups as one."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat(trees.column(parts, name)) for name in parts[0]}


def _metrics(parts: Sequence[GroupReplies]) -> dict[str, Tensor]:
    """Every metric's mean of every client (clients,)."""
    metrics = {}
    for name in parts[0].metrics:
        metrics[name] = torch.cat([part.metrics[name].mean for part in parts])
    return metrics


def _profiles(state: TrainingState, places: Sequence[int], parts: Sequence[GroupReplies]) -> Params:
    """The profiles (clients, ...) of everybody who replied."""
    rows: list[Params] = []
    for place, part in zip(places, parts, strict=True):
        rows += [state.profiles[place].of(client) for client in part.clients]
    return stack_rows(rows)


def _with_private(
    state: TrainingState, places: Sequence[int], parts: Sequence[GroupReplies], counted: Tensor
) -> tuple[PerClient, ...]:
    """The private trees after a round; those of clients that do not count stay as they were."""
    private, start = list(state.private), 0
    for place, part in zip(places, parts, strict=True):
        own = counted[start : start + len(part.clients)]
        private[place] = _put(private[place], part.clients, part.private, own)
        start += len(part.clients)
    return tuple(private)


def _with_profiles(
    algorithm: Algorithm,
    state: TrainingState,
    places: Sequence[int],
    parts: Sequence[GroupReplies],
    received: tuple[Uploads, Tensor],
) -> tuple[PerClient, ...]:
    """What the server remembers of each client after a round."""
    uploads, counted = received
    if not uploads.profiles:
        return state.profiles
    remember = torch.vmap(algorithm.remember, in_dims=(None, 0, 0, 0))
    remembered = remember(state.shared, uploads.profiles, uploads.sent, uploads.messages)
    profiles, start = list(state.profiles), 0
    for place, part in zip(places, parts, strict=True):
        stop = start + len(part.clients)
        rows = [trees.row(remembered, index) for index in range(start, stop)]
        profiles[place] = _put(profiles[place], part.clients, rows, counted[start:stop])
        start = stop
    return tuple(profiles)


def _put(
    before: PerClient, clients: Sequence[int], rows: Sequence[Params], counted: Tensor
) -> PerClient:
    if not counted.is_cuda:
        if bool(counted.all()):
            return before.put(clients, rows)
        places = [place for place, counts in enumerate(counted.tolist()) if counts]
        return before.put([clients[place] for place in places], [rows[place] for place in places])
    chosen = []
    for client, row, counts in zip(clients, rows, counted.unbind(), strict=True):
        chosen.append(trees.where(counts, row, before.of(client)))
    return before.put(clients, chosen)


def _without_aliases(tree: Params, messages: Params) -> Params:
    """The tree with a copy of each tensor that is part of an upload.

    The next round may overwrite the memory of uploads.
    """
    of_messages = {tensor.untyped_storage().data_ptr() for tensor in messages.values()}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in of_messages else tensor
        for name, tensor in tree.items()
    }


def _require_present(replica: Replica, sampled: IntArray) -> None:
    if len(sampled) and sampled[-1] >= replica.num_clients:
        raise InputError(
            f"availability: there is no client {sampled[-1]}; "
            f"clients are 0..{replica.num_clients - 1}"
        )
    for group in replica.groups:
        own = group.own(sampled)
        empty = own[group.train.sizes[own] == 0]
        if len(empty):
            raise InputError(
                f"availability: {group.train.label(empty[0])} is available and has no training "
                "examples; let it be absent, or give it some"
            )


# ---- the simulator: engines execute the clients

Round = list[tuple[TrainingState, RoundReport]]
Executors = Sequence[Executor[Reply]]


def build_executors(
    groups: Sequence[GroupClients], engine: EngineConfig | str, *, num_calls: int
) -> list[Executor[Reply]]:
    """An executor of each group's clients."""
    executors = []
    for group in groups:
        step = client_step(group.algorithm, group.wire)
        executors.append(Executor(step, engine=engine, num_calls=num_calls))
    return executors


def simulate(
    replicas: Sequence[Replica],
    states: Sequence[TrainingState],
    executors: Executors,
    rounds: range,
) -> Iterator[Round]:
    """Rounds of several replicas side by side; all clients with one model run in one batch.

    On a GPU a round is yielded only after the next one was started, so that the GPU computes the
    next round while the caller handles this one. Its metrics are copied without blocking.
    """
    _require_alike(replicas)
    if replicas[0].groups[0].train.examples.device.type != "cuda":
        for round_index in rounds:
            finished = run_round(replicas, states, executors, round_index)
            states = [state for state, _ in finished]
            yield finished
        return
    pending: deque[Callable[[], Round]] = deque()
    for round_index in rounds:
        finished = run_round(replicas, states, executors, round_index)
        states = [state for state, _ in finished]
        pending.append(_copy_to_cpu(finished))
        if len(pending) > 1:
            yield pending.popleft()()
    for wait in pending:
        yield wait()


def run_round(
    replicas: Sequence[Replica],
    states: Sequence[TrainingState],
    executors: Executors,
    round_index: int,
) -> Round:
    """One round of several replicas side by side."""
    sampled = [sample(replica, round_index) for replica in replicas]
    replies: list[list[GroupReplies]] = [[] for _ in replicas]
    for place, executor in enumerate(executors):
        own = [
            replica.groups[place].own(each.clients).tolist()
            for replica, each in zip(replicas, sampled, strict=True)
        ]
        tasks = [
            assign(replica, state, place, clients, round_index)
            for replica, state, clients in zip(replicas, states, own, strict=True)
        ]
        together = [task for each in tasks for task in each]
        results = ClientResults[Reply](rows=[])
        if together:
            results = executor(together, replicas[0].groups[place].train.examples, round_index)
        start = 0
        for index, (replica, clients) in enumerate(zip(replicas, own, strict=True)):
            stop = start + len(clients)
            left = sampled[index].left if place == 0 else 0
            sizes = replica.groups[place].train.sizes[clients]
            part = group_replies(results, range(start, stop), tasks[index], clients, sizes)
            replies[index].append(part._replace(left=left))
            start = stop
    triples = zip(replicas, states, replies, strict=True)
    return [collect(replica, state, own, round_index) for replica, state, own in triples]


def group_replies(
    results: ClientResults[Reply],
    rows: range,
    tasks: Sequence[ClientTask],
    clients: list[int],
    sizes: IntArray,
) -> GroupReplies:
    """Some rows of the results of a batch, as the replies of one replica's clients."""
    sent = [task.shared for task in tasks]
    if not clients:
        return GroupReplies([], [], {}, [], {}, torch.zeros(0, dtype=torch.int64))
    if results.rows is not None:
        own = results.rows[rows.start : rows.stop]
        payloads = trees.stack([reply.payload for reply in own])
        private = [reply.private for reply in own]
        metrics = _stack_metrics([reply.metrics for reply in own])
    else:
        stack = results.stacked()
        cut = slice(rows.start, rows.stop)
        payloads = {name: tensor[cut] for name, tensor in stack.payload.items()}
        own_private = {name: tensor[cut] for name, tensor in stack.private.items()}
        private = unstack_rows(own_private, len(rows))
        metrics = {
            name: WeightedSum(each.total[cut].clone(), each.weight[cut].clone())
            for name, each in stack.metrics.items()
        }
    examples = to_device(sizes, next(iter(metrics.values())).total.device)
    return GroupReplies(clients, sent, payloads, private, metrics, examples)


def _stack_metrics(rows: Sequence[Mapping[str, WeightedSum]]) -> dict[str, WeightedSum]:
    stacked = {}
    for name in rows[0]:
        totals = torch.stack([row[name].total for row in rows])
        stacked[name] = WeightedSum(totals, torch.stack([row[name].weight for row in rows]))
    return stacked


def require_counted(finished: Round, seeds: Sequence[int], label: Callable[[int], str]) -> None:
    """Refuse to go on after a round in which nobody's loss and upload were finite."""
    for seed, (_, report) in zip(seeds, finished, strict=True):
        counted = report.counted.cpu()
        if not len(counted) or bool(counted.any()):
            continue
        others = f" and of {len(counted) - 1} more" if len(counted) > 1 else ""
        error = DivergedError(
            f"training diverged in round {report.round_index}: the loss or the upload of "
            f"{label(int(report.clients[0]))}{others} is not finite, and nobody else took part; "
            "lower the learning rate"
        )
        error.seed = seed
        raise error


def _copy_to_cpu(finished: Round) -> Callable[[], Round]:
    """Start copying a round's metrics to the CPU.

    The returned function waits for the copy, but for no later work of the GPU, and gives the round.
    """
    copies = []
    for _, report in finished:
        tensors = {"counted": report.counted, **report.metrics}
        pinned = {}
        for name, tensor in tensors.items():
            target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned[name] = target.copy_(tensor, non_blocking=True)
        copies.append(pinned)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> Round:
        copied.synchronize()
        on_cpu = []
        for (state, report), tensors in zip(finished, copies, strict=True):
            metrics = {name: tensors[name] for name in report.metrics}
            on_cpu.append((state, report._replace(counted=tensors["counted"], metrics=metrics)))
        return on_cpu

    return wait


def _require_alike(replicas: Sequence[Replica]) -> None:
    first = replicas[0]
    for replica in replicas[1:]:
        for own, expected in zip(replica.groups, first.groups, strict=True):
            if own.train.examples.x is not expected.train.examples.x:
                raise InputError(
                    "simulate: federations side by side must share one data set; "
                    "load it once and partition it per seed"
                )
        if replace(replica.plan, seed=0) != replace(first.plan, seed=0):
            raise InputError(
                "simulate: federations side by side need the same plan, except for the seed; "
                f"got {replica.plan} and {first.plan}"
            )
