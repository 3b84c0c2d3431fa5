"""The byte ledger: the traffic as it was, and the same rounds counted as the paper counts them."""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from glocal.core import trees
from glocal.core.trees import Params

_SENT = ("download", "upload", "evaluation", "ensemble")


class Traffic(NamedTuple):
    """An amount that crossed the wire."""

    parameters: int = 0
    bytes: int = 0

    def add_tree(self, tree: Params, copies: int = 1) -> "Traffic":
        """This amount plus some copies of a tree."""
        parameters = self.parameters + copies * trees.numel(tree)
        return Traffic(parameters, self.bytes + copies * trees.nbytes(tree))

    def add(self, other: "Traffic") -> "Traffic":
        """Both amounts together."""
        return Traffic(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclass(frozen=True)
class Ledger:
    """All traffic so far, by purpose.

    `paper` counts as Liang et al. do. In every round all M clients receive the shared tree, and the
    sampled clients send theirs. For the New Test ensemble, every client sends its whole model once;
    only this count reproduces all rows of their tables.

    The other columns are the honest count. Only sampled clients receive, the ensemble needs the
    local parts alone, and evaluation traffic is included. Bytes are those of the encoded payloads.
    `metrics` has what clients send besides parameters; it is no part of the total.

    >>> import torch
    >>> Ledger().add_evaluation({"w": torch.zeros(10)}, num_clients=3).total
    Traffic(parameters=30, bytes=120)
    """

    download: Traffic = Traffic()
    upload: Traffic = Traffic()
    evaluation: Traffic = Traffic()
    ensemble: Traffic = Traffic()
    metrics: Traffic = Traffic()
    paper: Traffic = Traffic()

    @property
    def total(self) -> Traffic:
        """The honest count of parameters."""
        total = Traffic()
        for purpose in _SENT:
            total = total.add(getattr(self, purpose))
        return total

    def __add__(self, other: "Ledger") -> "Ledger":
        sums = {}
        for part in fields(self):
            sums[part.name] = getattr(self, part.name).add(getattr(other, part.name))
        return Ledger(**sums)

    def add_round(
        self,
        sent: Params,
        payloads: Params,
        *,
        scalars: int,
        num_sampled: int,
        num_replied: int,
        num_clients: int,
        metrics: int = 1,
    ) -> "Ledger":
        """A round: `sent` went to each sampled client, payloads (replied, ...) came back.

        An upload has so many `scalars` before it is encoded. Besides, a client sends its number of
        examples, and a sum and a weight for each of its `metrics`.
        """
        uploads = Traffic(scalars * num_replied, trees.nbytes(payloads))
        return replace(
            self,
            download=self.download.add_tree(sent, num_sampled),
            upload=self.upload.add(uploads),
            metrics=self.metrics.add(_metrics_traffic(metrics, num_replied)),
            paper=self.paper.add_tree(sent, num_clients).add(uploads),
        )

    def add_evaluation(self, sent: Params, num_clients: int) -> "Ledger":
        """`sent` went to clients that evaluate it on their own data."""
        return replace(self, evaluation=self.evaluation.add_tree(sent, num_clients))

    def add_warm_start(self, local: Params, num_clients: int) -> "Ledger":
        """Every client received the local part of a warm start."""
        return replace(self, download=self.download.add_tree(local, num_clients))

    def add_ensemble(
        self, local: Params, whole: Params, *, num_trained: int, num_clients: int
    ) -> "Ledger":
        """Every trained client sent its local part once for the New Test, if it has one.

        `num_clients` is the number that the paper would count: all clients, or 0 where nothing is
        ever shared, as the paper prints 0 there.
        """
        if not local:
            return self
        return replace(
            self,
            ensemble=self.ensemble.add_tree(local, num_trained),
            paper=self.paper.add_tree(whole, num_clients),
        )

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For JSON: parameters and bytes by purpose."""
        purposes = (*_SENT, "metrics", "total", "paper")
        return {purpose: getattr(self, purpose)._asdict() for purpose in purposes}

    @classmethod
    def from_dict(cls, data: dict[str, dict[str, int]]) -> "Ledger":
        """Back from JSON."""
        amounts = {}
        for purpose, amount in data.items():
            if purpose != "total":
                amounts[purpose] = Traffic(**amount)
        return cls(**amounts)


def _metrics_traffic(metrics: int, num_replied: int) -> Traffic:
    """A number of examples (8 bytes), and a sum and a weight (4 each) for every metric."""
    return Traffic((1 + 2 * metrics) * num_replied, (8 + 8 * metrics) * num_replied)
