"""The server's half of a round: replies are checked, put in the order of clients, and collected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from glocal.algorithms.contract import Message
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.errors import describe_error
from glocal.core.files import Json
from glocal.core.sampling import Plan
from glocal.core.store import TrainingState
from glocal.core.training import WeightedSum
from glocal.deploy.flower.protocol import Reply
from glocal.deploy.setup import TrainingSetup
from glocal.federate.rounds import (
    GroupClients,
    GroupReplies,
    Replica,
    RoundReport,
    collect,
    collect_mean,
    downloads,
)
from glocal.wire import Ledger, Wire, WireError, require_finite, unpack


class ValidReply(NamedTuple):
    """A reply whose payload has the declared form, and its metrics as sums."""

    payload: Message
    num_examples: int
    metrics: dict[str, WeightedSum]


class Collected(NamedTuple):
    """A round: the state after it, its traffic, who counts, and why others do not."""

    state: TrainingState
    traffic: Ledger
    clients: list[int]
    dropped: dict[int, str]


@dataclass(frozen=True)
class ServerRound:
    """One round: the federation, its state before it, and what each sampled client was sent."""

    replica: Replica
    state: TrainingState
    round_index: int
    sent: Mapping[int, Message]

    @classmethod
    def begin(
        cls, replica: Replica, state: TrainingState, round_index: int, clients: Sequence[int]
    ) -> "ServerRound":
        """The round of these clients."""
        messages = downloads(replica.groups[0], state, 0, clients)
        return cls(replica, state, round_index, dict(zip(clients, messages, strict=True)))

    @property
    def wire(self) -> Wire:
        """What may cross."""
        return self.replica.groups[0].wire

    def collect(self, replies: Mapping[int, ValidReply]) -> Collected:
        """The round with these replies; those that cannot be decoded do not count.

        A payload has the declared form when it comes here, and may still be one that no client of
        ours sends, so that its decoding fails. Only then is each tried alone: otherwise a payload
        is decoded once.
        """
        broken: dict[int, str] = {}
        try:
            state, report = self._collect(replies)
        except Exception:
            broken = _undecodable(self.wire, replies)
            if not broken:
                raise
            replies = {client: each for client, each in replies.items() if client not in broken}
            state, report = self._collect(replies)
        dropped = {client: _reason(replies[client]) for client in report.dropped}
        counted = [client for client in sorted(replies) if client not in dropped]
        return Collected(state, report.traffic[0], counted, {**broken, **dropped})

    def collect_mean(self, mean: Message, num_examples: Mapping[int, int]) -> Collected:
        """The round of which only the mean is known, of clients with so many examples."""
        clients = sorted(num_examples)
        examples = torch.tensor([num_examples[client] for client in clients])
        state = collect_mean(self.replica, self.state, mean, examples, self.round_index)
        payloads = {
            name: tensor.expand(len(clients), *tensor.shape) for name, tensor in mean.items()
        }
        traffic = Ledger().add_round(
            next(iter(self.sent.values())),
            payloads,
            scalars=self.wire.scalars,
            num_sampled=len(self.sent),
            num_replied=len(clients),
            num_clients=self.replica.num_clients,
        )
        return Collected(state, traffic, clients, {})

    def _collect(self, replies: Mapping[int, ValidReply]) -> tuple[TrainingState, RoundReport]:
        """`collect`; private trees stay with the clients."""
        parts = _group_replies(replies, self.sent)
        state, report = collect(self.replica, self.state, [parts], self.round_index)
        return state._replace(private=self.state.private), report


def replica_of(setup: TrainingSetup, plan: Plan, num_clients: int) -> Replica:
    """The federation as the server knows it: so many clients, and no data."""
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    no_rows = np.zeros(0, dtype=np.int64)
    train = ClientData(nothing, (no_rows,) * num_clients)
    return Replica((GroupClients(setup.algorithm, train, setup.wire),), plan)


def check_reply(reply: Reply, wire: Wire) -> ValidReply:
    """A reply in the declared form; anything else is refused."""
    if reply.fault or reply.num_examples < 1:
        raise WireError(reply.fault or f"it reports {reply.num_examples} examples")
    payload = unpack(reply.payload, wire.payload)
    return ValidReply(payload, reply.num_examples, sums_of(reply.metrics))


def sums_of(metrics: Json) -> dict[str, WeightedSum]:
    """The metrics that are pairs of a total and a weight."""
    sums = {}
    for name, pair in metrics.items():
        if isinstance(pair, list):
            sums[name] = WeightedSum(*(torch.tensor(part, dtype=torch.float32) for part in pair))
    return sums


def _group_replies(replies: Mapping[int, ValidReply], sent: Mapping[int, Message]) -> GroupReplies:
    """The replies in the order of clients; whoever does not share a metric has none counted."""
    clients = sorted(replies)
    if not clients:
        nobody = torch.zeros(0, dtype=torch.int64)
        return GroupReplies([], [], {}, [], {}, nobody, len(sent))
    own = [replies[client] for client in clients]
    names = {"loss"}.union(*(reply.metrics for reply in own))
    nothing = WeightedSum(torch.zeros(()), torch.zeros(()))
    metrics = {}
    for name in sorted(names):
        pairs = [reply.metrics.get(name, nothing) for reply in own]
        totals = torch.stack([pair.total for pair in pairs])
        metrics[name] = WeightedSum(totals, torch.stack([pair.weight for pair in pairs]))
    return GroupReplies(
        clients,
        [sent[client] for client in clients],
        trees.stack([reply.payload for reply in own]),
        [{} for _ in clients],
        metrics,
        torch.tensor([reply.num_examples for reply in own]),
        left=len(sent) - len(clients),
    )


def _undecodable(wire: Wire, replies: Mapping[int, ValidReply]) -> dict[int, str]:
    """The clients whose payloads cannot be decoded, and why."""
    broken: dict[int, str] = {}
    for client, reply in replies.items():
        try:
            wire.decode(trees.stack([reply.payload]))
        except Exception as error:  # a hostile client may send anything
            broken[client] = f"its payload cannot be decoded ({describe_error(error)})"
    return broken


def _reason(reply: ValidReply) -> str:
    """Why a reply was left out."""
    try:
        require_finite(reply.payload)
    except WireError as error:
        return str(error)
    return "wire: its upload is not finite"
