"""What a run tells after every round, and how its rows are written."""

from dataclasses import dataclass, field
from typing import Any

from glocal.core.files import Json
from glocal.core.metric import Metric
from glocal.core.one_line import one_line
from glocal.wire import Ledger

_PURPOSES = ("download", "upload", "evaluation", "ensemble", "metrics")


@dataclass(frozen=True)
class RoundRecord:
    """One round of one seed, and of one group if there are several.

    - `done` is the number of rounds done, of `rounds` in all; `round_index` counts warm starts too.
    - `loss` is the mean over clients of the mean loss of each; None if nobody of the group trained.
    - `dropped` names clients whose upload was not finite: the round went on without them.
    - `validation` has every metric's mean over clients, if they were evaluated in this round;
      `score` is that of the `criterion`, by which rounds are selected.
    - `ledger` is the traffic so far.
    - `subgroups` has the metric of each set of clients that is reported by itself.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> experiment = glocal.Experiment.of(algorithm, data, glocal.Plan(1, clients_per_round=3))
    >>> [[record]] = glocal.Run(experiment)
    >>> record.done, record.rounds, len(record.clients), record.dropped
    (1, 1, 3, ())
    """

    seed: int
    group: str
    round_index: int
    done: int
    rounds: int
    loss: float | None
    clients: tuple[int, ...]
    dropped: tuple[str, ...]
    ledger: Ledger
    criterion: Metric | None = None
    score: float | None = None
    validation: dict[str, float | None] = field(default_factory=dict)
    num_validated: int = 0
    subgroups: Json | None = None
    seconds: float = 0.0

    def __repr__(self) -> str:
        return one_line(self)

    def as_row(self) -> Json:
        """For JSON lines, without the seconds: a resumed run has the same bytes."""
        row: Json = {"seed": self.seed}
        if self.group:
            row["group"] = self.group
        row |= {
            "round": self.round_index,
            "loss": self.loss,
            "validation": self.score,
            "bytes": self.ledger.total.bytes,
            "paper_parameters": self.ledger.paper.parameters,
            "bytes_by_purpose": _bytes_by_purpose(self.ledger),
        }
        if self.validation:
            row |= {"metrics": self.validation, "num_validated": self.num_validated}
        if self.dropped:
            row["dropped"] = list(self.dropped)
        if self.subgroups is not None:
            row["subgroups"] = self.subgroups
        return row


def _bytes_by_purpose(ledger: Ledger) -> dict[str, Any]:
    return {purpose: getattr(ledger, purpose).bytes for purpose in _PURPOSES}
