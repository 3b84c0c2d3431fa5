"""The byte ledger: what really crossed, and the same rounds counted the way the paper counts."""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from glocal.core import trees
from glocal.core.trees import Params


class Traffic(NamedTuple):
    """An amount that crossed the wire."""

    parameters: int = 0
    bytes: int = 0

    def plus(self, tree: Params, copies: int = 1) -> "Traffic":
        """This and some copies of a tree more."""
        return Traffic(self.parameters + copies * trees.count(tree), self.bytes + copies * trees.nbytes(tree))

    def and_also(self, other: "Traffic") -> "Traffic":
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
        return Ledger(*(getattr(self, part.name).and_also(getattr(other, part.name)) for part in fields(self)))

    def after_round(self, sent: Params, uploads: Params, *, cohort: int, devices: int) -> "Ledger":
        """A round: `sent` went to each of the cohort, uploads (cohort, ...) came back."""
        return replace(
            self,
            download=self.download.plus(sent, cohort),
            upload=self.upload.plus(uploads),
            paper=self.paper.plus(sent, devices).plus(uploads),
        )

    def after_evaluation(self, sent: Params, devices: int) -> "Ledger":
        """`sent` went to devices that test it on their own data."""
        return replace(self, evaluation=self.evaluation.plus(sent, devices))

    def after_start(self, local: Params, devices: int) -> "Ledger":
        """Every device received the local part that a warm start gives it."""
        return replace(self, download=self.download.plus(local, devices))

    def after_ensemble(self, local: Params, whole: Params, *, trained: int, devices: int) -> "Ledger":
        """Every trained device sent its local part once for the New Test; nothing is sent where nothing is local.

        `devices` is how many the paper would count: all, or none where nothing is ever shared, for there it prints 0.
        """
        if not local:
            return self
        return replace(self, ensemble=self.ensemble.plus(local, trained), paper=self.paper.plus(whole, devices))

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For JSON: parameters and bytes by purpose."""
        parts = ("download", "upload", "evaluation", "ensemble", "total", "paper")
        return {part: getattr(self, part)._asdict() for part in parts}

    @classmethod
    def from_dict(cls, data: dict[str, dict[str, int]]) -> "Ledger":
        """Back from JSON."""
        return cls(**{part: Traffic(**amount) for part, amount in data.items() if part != "total"})
