"""The byte ledger: what really crossed, and the same rounds counted the way the paper counts."""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from glocal.core import trees
from glocal.core.trees import Params


class Traffic(NamedTuple):
    """An amount that crossed the wire."""

    parameters: int = 0
    bytes: int = 0

    def add_tree(self, tree: Params, copies: int = 1) -> "Traffic":
        """This and some copies of a tree more."""
        return Traffic(
            self.parameters + copies * trees.numel(tree), self.bytes + copies * trees.nbytes(tree)
        )

    def add(self, other: "Traffic") -> "Traffic":
        """Both amounts together."""
        return Traffic(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclass(frozen=True)
class Ledger:
    """Everything sent so far, by purpose.

    `paper` counts as Liang et al. do: in every round all M devices receive the shared tree, the sampled ones send theirs, and for
    the New Test ensemble every device sends its whole model once (only so do all rows of their tables come out). The other columns
    are the honest count: only who takes part receives, the ensemble needs the local parts alone, and evaluation traffic is in it.
    """

    download: Traffic = Traffic()
    upload: Traffic = Traffic()
    evaluation: Traffic = Traffic()
    ensemble: Traffic = Traffic()
    paper: Traffic = Traffic()

    @property
    def total(self) -> Traffic:
        """The honest count."""
        parts = (self.download, self.upload, self.evaluation, self.ensemble)
        return Traffic(sum(part.parameters for part in parts), sum(part.bytes for part in parts))

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(
            *(getattr(self, part.name).add(getattr(other, part.name)) for part in fields(self))
        )

    def add_round(
        self, sent: Params, uploads: Params, *, num_sampled: int, num_clients: int
    ) -> "Ledger":
        """A round: `sent` went to each of the cohort, uploads (cohort, ...) came back."""
        return replace(
            self,
            download=self.download.add_tree(sent, num_sampled),
            upload=self.upload.add_tree(uploads),
            paper=self.paper.add_tree(sent, num_clients).add_tree(uploads),
        )

    def add_evaluation(self, sent: Params, num_clients: int) -> "Ledger":
        """`sent` went to devices that test it on their own data."""
        return replace(self, evaluation=self.evaluation.add_tree(sent, num_clients))

    def add_warm_start(self, local: Params, num_clients: int) -> "Ledger":
        """Every device received the local part that a warm start gives it."""
        return replace(self, download=self.download.add_tree(local, num_clients))

    def add_ensemble(
        self, local: Params, whole: Params, *, num_trained: int, num_clients: int
    ) -> "Ledger":
        """Every trained device sent its local part once for the New Test; nothing is sent where nothing is local.

        `num_clients` is how many the paper would count: all, or none where nothing is ever shared, for there it prints 0.
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
        parts = ("download", "upload", "evaluation", "ensemble", "total", "paper")
        return {part: getattr(self, part)._asdict() for part in parts}

    @classmethod
    def from_dict(cls, data: dict[str, dict[str, int]]) -> "Ledger":
        """Back from JSON."""
        return cls(**{part: Traffic(**amount) for part, amount in data.items() if part != "total"})
