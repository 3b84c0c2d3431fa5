"""The candidate splits: each boundary between lower and upper layers, and the two extremes.

At a boundary, either the lower or the upper layers are shared. The extremes share nothing or all.
"""

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
    """A split, with the names of its shared and local layers."""

    name: str
    shared: tuple[str, ...]
    local: tuple[str, ...]
    split: Split

    def sent_fraction(self, params: Params) -> float:
        """The fraction of a model's bytes that is sent."""
        return trees.nbytes(self.split.take_shared(params)) / trees.nbytes(params)


def make_candidates(model: nn.Module, *, max_candidates: int = 12) -> list[Candidate]:
    """Candidate splits of a model, at most `max_candidates`.

    A deep model is split at evenly spaced depths.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> [candidate.name for candidate in make_candidates(model)]
    ['nothing shared', 'first 1 shared', 'last 1 shared', 'all shared']
    """
    layers = layer_names(model)
    if not layers:
        raise InputError("advise: the model has no layer with weights; there is nothing to share")
    candidates = [
        _candidate(model, NOTHING, ()),
        *_at_boundaries(model, layers, max_candidates - 2),
        _candidate(model, EVERYTHING, tuple(layers)),
    ]
    return [candidate for candidate in candidates if candidate is not None]


def _at_boundaries(
    model: nn.Module, layers: list[str], max_candidates: int
) -> list[Candidate | None]:
    """Candidates that share the first layers, then candidates that share the last ones."""
    depths = max(0, min(len(layers) - 1, max_candidates // 2))
    counts = sorted({round(count) for count in np.linspace(1, len(layers) - 1, depths).tolist()})
    first = [_candidate(model, f"first {count} shared", tuple(layers[:count])) for count in counts]
    last = [_candidate(model, f"last {count} shared", tuple(layers[-count:])) for count in counts]
    return first + last


def _candidate(model: nn.Module, name: str, shared: tuple[str, ...]) -> Candidate | None:
    """The candidate that shares these layers; None where tied weights forbid it."""
    local = tuple(layer for layer in layer_names(model) if layer not in shared)
    try:
        # A tensor outside all layers, such as a buffer of the model itself, is shared only if all
        # layers are.
        split = Split.of(model, local=[]) if not local else Split.of(model, shared=shared)
    except InputError:
        return None
    return Candidate(name, shared, local, split)
