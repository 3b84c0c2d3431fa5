"""The accuracy of answers to questions about pictures, which several people have answered."""

from torch import Tensor

from glocal.core.errors import InputError
from glocal.core.metric import Metric
from glocal.core.training import Batch

_VOTES_FOR_FULL_SCORE = 3  # people


def vqa_accuracy(predictions: Tensor, people: Tensor) -> Tensor:
    """min(1, votes / 3) for each prediction (rows,): Antol et al. 2015.

    The votes are the people who gave that answer; `people` (rows, people) holds all their answers.

    >>> import torch
    >>> answers = torch.tensor([[7, 7, 8, -1], [7, 7, 8, -1]])
    >>> vqa_accuracy(torch.tensor([7, 8]), answers)
    tensor([0.6667, 0.3333])
    """
    votes = (people == predictions[..., None]).sum(-1)
    return (votes / _VOTES_FOR_FULL_SCORE).clamp(max=1)


class _VQAAccuracy(Metric):
    """It compares predictions with people's answers, which are the examples' group."""

    def sums(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The score and the weight of every prediction, each (rows,)."""
        if batch.group is None:
            raise InputError(
                "vqa_accuracy: the examples have no group; people's answers (rows, people) were "
                "expected there, or use the metric 'accuracy'"
            )
        scores = vqa_accuracy(outputs.argmax(-1), batch.group)
        return scores, scores.new_ones(scores.shape)


def _by_votes(outputs: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("vqa_accuracy reads the examples' group")


VQA_ACCURACY = _VQAAccuracy("vqa_accuracy", per_example=_by_votes, is_fraction=True)
