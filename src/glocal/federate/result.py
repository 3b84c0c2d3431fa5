"""A trained federation: each device's model, and how good it is."""

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from glocal.algorithms.contract import Algorithm
from glocal.core.errors import InputError
from glocal.core.files import Json, write_tensors
from glocal.core.modules import state_dict
from glocal.core.sampling import Plan
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.evaluate import Accuracies, AccuracySummary, Metric, NewTest, accuracy
from glocal.wire import Ledger


@dataclass(frozen=True)
class Result:
    """One seed's outcome; `local` and `new` hold the figures behind `local_test` and `new_test`."""

    algorithm: Algorithm
    architecture: nn.Module
    plan: Plan
    state: State
    selected_round: int
    accuracies: Accuracies
    local_spread: AccuracySummary
    new_spread: NewTest | None
    validation: AccuracySummary
    ledger: Ledger
    sizes: dict[str, list[int]]
    times_sampled: list[int]
    metric: Metric = accuracy

    @property
    def local_test(self) -> float | None:
        """Mean over devices of the accuracy of their own models on their own test data."""
        return self.local_spread.mean

    @property
    def new_test(self) -> float | None:
        """Accuracy on everyone's test data of the averaged logits of all trained models."""
        return self.new_spread.logits if self.new_spread else None

    def state_dict(self, client: int) -> Params:
        """What one device predicts with, as a plain state dict."""
        if not 0 <= client < len(self.times_sampled):
            raise InputError(
                f"result: there is no device {client}; devices are 0..{len(self.times_sampled) - 1}"
            )
        return state_dict(
            self.architecture,
            self.algorithm.personal(self.state.shared, self.state.private.of(client)),
        )

    def model(self, client: int) -> nn.Module:
        """One device's own model, an ordinary module in evaluation mode."""
        model = copy.deepcopy(self.architecture)
        model.load_state_dict(self.state_dict(client))
        return model.eval()

    def as_dict(self) -> Json:
        """For JSON: every figure, and the table of devices."""
        return {
            "seed": self.plan.seed,
            "algorithm": self.algorithm.name,
            "rounds": self.plan.total_rounds,
            "selected_round": self.selected_round,
            "local_test": self.local_spread._asdict(),
            "new_test": self.new_spread._asdict() if self.new_spread else None,
            "validation": self.validation._asdict(),
            "never_sampled": self.times_sampled.count(0),
            "ledger": self.ledger.as_dict(),
            "clients": self._client_rows(),
        }

    def _client_rows(self) -> list[Json]:
        accuracies = [
            None if np.isnan(accuracy) else accuracy for accuracy in self.accuracies.tolist()
        ]
        columns = {**self.sizes, "times_sampled": self.times_sampled, "local_test": accuracies}
        rows = zip(range(len(self.times_sampled)), *columns.values(), strict=True)
        return [dict(zip(("client", *columns), row, strict=True)) for row in rows]


def save_models(result: Result, folder: Path) -> None:
    """Every device's personal model as a state dict of its own; one file where all devices have the same model."""
    about = {
        "algorithm": result.algorithm.name,
        "seed": result.plan.seed,
        "round": result.selected_round,
    }
    if not result.state.private.initial:
        write_tensors(folder / "every-device.safetensors", result.state_dict(0), about)
        return
    for client in range(len(result.times_sampled)):
        write_tensors(folder / f"device-{client:04d}.safetensors", result.state_dict(client), about)
