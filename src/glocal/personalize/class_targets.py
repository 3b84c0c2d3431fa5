"""Whether a task is about classes: only then are there classes to speak of."""

import torch
from torch import Tensor

from glocal.core.data import Examples
from glocal.core.metric_library import accuracy, balanced_accuracy
from glocal.core.task import Task
from glocal.federate.outputs import example_output, has_class_targets


def count_classes(task: Task, examples: Examples) -> int | None:
    """The number of classes: the model's outputs; None where targets are no class numbers.

    >>> from glocal import classification, regression
    >>> x, layer = torch.zeros(4, 2), torch.nn.Linear
    >>> count_classes(classification(layer(2, 3)), Examples(x, torch.tensor([0, 2, 1, 0])))
    3
    >>> count_classes(regression(layer(2, 1)), Examples(x, torch.rand(4))) is None
    True
    """
    output = example_output(task, examples.x)
    has_classes = output.dim() == 2 and output.shape[1] > 1
    return output.shape[1] if has_classes and are_whole_numbers(examples) else None


def predicts_classes(task: Task) -> bool:
    """Whether its loss or a metric says so, for where there are no targets to ask.

    >>> from glocal import classification, multilabel
    >>> layer = torch.nn.Linear(2, 3)
    >>> predicts_classes(classification(layer)), predicts_classes(multilabel(layer))
    (True, False)
    """
    of_classes = (accuracy, balanced_accuracy)
    return has_class_targets(task) or any(metric in of_classes for metric in task.all_metrics)


def are_whole_numbers(examples: Examples) -> bool:
    """Whether every example has one whole number as its target."""
    y = examples.y
    if not isinstance(y, Tensor) or not examples.has_targets:
        return False
    return y.dim() == 1 and not y.is_floating_point() and y.dtype != torch.bool
