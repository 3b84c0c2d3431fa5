"""The splits that are compared: every boundary between lower and upper layers, with either side shared, and the two ends."""

from dataclasses import dataclass

import numpy as np
from torch import nn

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.split import Split, layer_names
from glocal.core.trees import Params

NOTHING, EVERYTHING = "nothing shared", "all shared"


@dataclass(frozen=True)
class Candidate:
    """A split by the names of layers."""

    name: str
    shared: tuple[str, ...]
    local: tuple[str, ...]
    split: Split

    def sent_fraction(self, params: Params) -> float:
        """The share of a model's bytes that is sent."""
        return trees.nbytes(self.split.take_shared(params)) / trees.nbytes(params)


def make_candidates(model: nn.Module, *, max_candidates: int = 12) -> list[Candidate]:
    """At most so many splits of a model, those of deep ones at evenly spaced depths; nothing and all of it shared among them.

    >>> [each.name for each in make_candidates(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))]
    ['nothing shared', 'first 1 shared', 'last 1 shared', 'all shared']
    """
    layers = layer_names(model)
    if not layers:
        raise InputError("advise: the model has no layer with weights; there is nothing to share")
    made = [
        _candidate(model, NOTHING, ()),
        *_between(model, layers, max_candidates - 2),
        _candidate(model, EVERYTHING, tuple(layers)),
    ]
    return [each for each in made if each is not None]


def _between(model: nn.Module, layers: list[str], max_candidates: int) -> list[Candidate | None]:
    depths = max(0, min(len(layers) - 1, max_candidates // 2))
    counts = sorted({round(count) for count in np.linspace(1, len(layers) - 1, depths).tolist()})
    lower = [_candidate(model, f"first {count} shared", tuple(layers[:count])) for count in counts]
    return lower + [
        _candidate(model, f"last {count} shared", tuple(layers[len(layers) - count :]))
        for count in counts
    ]


def _candidate(model: nn.Module, name: str, shared: tuple[str, ...]) -> Candidate | None:
    """A split by what it shares; None where tied weights forbid it."""
    local = tuple(layer for layer in layer_names(model) if layer not in shared)
    try:
        # what is nobody's layer, such as a buffer of its own, goes with all of it or stays
        split = Split.of(model, local=[]) if not local else Split.of(model, shared=shared)
    except InputError:
        return None
    return Candidate(name, shared, local, split)
