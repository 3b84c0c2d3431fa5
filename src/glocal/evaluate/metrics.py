"""Metrics: the value of each prediction, which evaluation averages."""

from collections.abc import Callable

from torch import Tensor

Metric = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_VOTES_FOR_FULL_SCORE = 3  # people


def accuracy(predictions: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
    """Whether each prediction is the label (rows,)."""
    return predictions == labels


def vqa_accuracy(predictions: Tensor, labels: Tensor, group: Tensor | None) -> Tensor:
    """min(1, votes / 3) for each prediction (rows,): Antol et al. 2015.

    The votes are the people who gave that answer; group (rows, people) holds all their answers.

    >>> import torch
    >>> answers = torch.tensor([[7, 7, 8, -1], [7, 7, 8, -1]])
    >>> vqa_accuracy(torch.tensor([7, 8]), torch.tensor([7, 7]), answers)
    tensor([0.6667, 0.3333])
    """
    if group is None:
        raise ValueError("VQA accuracy needs people's answers, as the examples' group")
    votes = (group == predictions[..., None]).sum(-1)
    return (votes / _VOTES_FOR_FULL_SCORE).clamp(max=1)
