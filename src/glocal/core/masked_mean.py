"""The mean of a loss over the rows of a batch that are not padding."""

import torch
from torch import Tensor

from glocal.core.errors import InputError
from glocal.core.losses import PerExampleValues


def masked_mean(values: PerExampleValues, mask: Tensor) -> Tensor:
    """The mean of a loss over the rows with mask True; 0 when there are none.

    `values` are (rows,), or (rows, ...) whose mean counts, or a pair of sums and weights (rows,).
    """
    require_by_row(values, len(mask))
    if isinstance(values, tuple):
        return _ratio(*values, mask)
    by_row = values if values.dim() == 1 else values.flatten(1).mean(1)
    real = torch.where(mask, by_row, torch.zeros_like(by_row))
    return real.sum() / mask.sum().clamp(min=1)


def _ratio(sums: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """The total of the real rows' sums by that of their weights; 0 where nothing has a weight."""
    total = torch.where(mask, sums, torch.zeros_like(sums)).sum()
    weight = torch.where(mask, weights, torch.zeros_like(weights)).sum()
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1), 0 * total)


def require_by_row(values: object, rows: int) -> None:
    """Refuse a loss that reduces: padded rows are in its mean, and no mask can remove them."""
    if not isinstance(values, tuple):
        if not isinstance(values, Tensor) or values.shape[:1] != (rows,):
            _refuse_shape(values, rows, "one value per example")
        return
    for part in values:
        if not isinstance(part, Tensor) or part.shape != (rows,):
            _refuse_shape(part, rows, "a pair of sums and weights, one of each per example")


def _refuse_shape(values: object, rows: int, expected: str) -> None:
    shape = getattr(values, "shape", None)
    returned = f"a {type(values).__name__}" if shape is None else f"shape {tuple(shape)}"
    raise InputError(
        f"loss: it returned {returned} for {rows} examples; {expected}, shape ({rows},), was "
        "expected: use reduction='none' in it, or give torch's loss itself"
    )
