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
from glocal.evaluate import Accuracies, Credit, NewTest, Spread, matching
from glocal.wire import Ledger


@dataclass(frozen=True)
class Result:
    """One seed's outcome; `local` and `new` hold the figures behind `local_test` and `new_test`."""

    algorithm: Algorithm
    structure: nn.Module
    plan: Plan
    state: State
    selected_round: int
    accuracies: Accuracies
    local: Spread
    new: NewTest | None
    validation: Spread
    ledger: Ledger
    sizes: dict[str, list[int]]
    sampled: list[int]
    credit: Credit = matching

    @property
    def local_test(self) -> float | None:
        """Mean over devices of the accuracy of their own models on their own test data."""
        return self.local.mean

    @property
    def new_test(self) -> float | None:
        """Accuracy on everyone's test data of the averaged logits of all trained models."""
        return self.new.logits if self.new else None

    def state_dict(self, device: int) -> Params:
        """What one device predicts with, as a plain state dict."""
        if not 0 <= device < len(self.sampled):
            raise InputError(f"result: there is no device {device}; devices are 0..{len(self.sampled) - 1}")
        return state_dict(self.structure, self.algorithm.personal(self.state.shared, self.state.private.of(device)))

    def model(self, device: int) -> nn.Module:
        """One device's own model, an ordinary module in evaluation mode."""
        model = copy.deepcopy(self.structure)
        model.load_state_dict(self.state_dict(device))
        return model.eval()

    def as_dict(self) -> Json:
        """For JSON: every figure, and the table of devices."""
        return {
            "seed": self.plan.seed,
            "algorithm": self.algorithm.name,
            "rounds": self.plan.last_round,
            "selected_round": self.selected_round,
            "local_test": self.local._asdict(),
            "new_test": self.new._asdict() if self.new else None,
            "validation": self.validation._asdict(),
            "never_sampled": self.sampled.count(0),
            "ledger": self.ledger.as_dict(),
            "devices": self._devices(),
        }

    def _devices(self) -> list[Json]:
        accuracies = [None if np.isnan(accuracy) else accuracy for accuracy in self.accuracies.tolist()]
        columns = {**self.sizes, "sampled": self.sampled, "local_test": accuracies}
        rows = zip(range(len(self.sampled)), *columns.values(), strict=True)
        return [dict(zip(("device", *columns), row, strict=True)) for row in rows]


def save_models(result: Result, folder: Path) -> None:
    """Every device's personal model as a state dict of its own; one file where all devices have the same model."""
    about = {"algorithm": result.algorithm.name, "seed": result.plan.seed, "round": result.selected_round}
    if not result.state.private.initial:
        write_tensors(folder / "every-device.safetensors", result.state_dict(0), about)
        return
    for device in range(len(result.sampled)):
        write_tensors(folder / f"device-{device:04d}.safetensors", result.state_dict(device), about)
