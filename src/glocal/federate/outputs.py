"""Whether a task and its data fit each other: outputs, targets and metrics, tried on examples."""

import warnings

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.errors import InputError, describe_error, describe_value
from glocal.core.losses import WeightedCrossEntropy, ignored_index, per_example_cross_entropy
from glocal.core.metric import Metric
from glocal.core.modules import params_of
from glocal.core.task import Task, describe_loss
from glocal.core.training import Batch
from glocal.core.values import Values, describe_form, map_tensors, num_rows, take_rows
from glocal.datasets.federated import FederatedData
from glocal.datasets.validation import validate_data

_TRIED_ROWS = 3


def validate_task_data(task: Task, federation: FederatedData) -> None:
    """Refuse data that cannot be trained on, or that the model cannot take."""
    output = example_output(task, federation.train.examples.x)
    classes, ignored = None, None
    if has_class_targets(task):
        classes = _classes(output, federation.train.examples)
        ignored = ignored_index(task.loss)
    validate_data(federation, classes, ignored)
    try_metrics(task, federation.train.examples)


def has_class_targets(task: Task) -> bool:
    """Whether the loss is torch's cross entropy, whose targets are classes."""
    loss = task.per_example
    return loss is per_example_cross_entropy or isinstance(loss, WeightedCrossEntropy)


def num_classes(task: Task, inputs: Values) -> int:
    """The number of classes of a model whose output is (rows, classes)."""
    output = example_output(task, inputs)
    if output.dim() != 2:
        raise InputError(
            f"model: its output for one example is {tuple(output.shape)}; "
            "a tensor (1, classes) was expected"
        )
    return output.shape[1]


def example_output(task: Task, inputs: Values) -> Tensor:
    """The model's output for one of these inputs (1, ...)."""
    output = _predict(task, map_tensors(lambda tensor: tensor[:1].cpu(), inputs))
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != 1:
        given = tuple(output.shape) if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise InputError(
            f"model: its output for one example is {given}; a tensor (1, ...) was expected, "
            "or a Task with forward= that takes it from there"
        )
    return output


def _predict(task: Task, inputs: Values) -> Tensor:
    params = trees.to(params_of(task.model), torch.device("cpu"))
    mask = torch.ones(num_rows(inputs), dtype=torch.bool)
    try:
        with torch.no_grad():
            return task.predict(params, inputs, mask)
    except InputError:
        raise
    except Exception as error:  # a user's own module may raise anything
        raise InputError(
            f"model: it cannot take inputs {describe_form(inputs)}, "
            f"as the data have them ({describe_error(error)})"
        ) from error


def _classes(output: Tensor, examples: Examples) -> int | None:
    """How many classes targets may name; None for targets that are probabilities."""
    y = examples.y
    if isinstance(y, Tensor) and y.is_floating_point() and y.shape[1:] == output.shape[1:]:
        return None
    if output.dim() < 2:
        raise InputError(
            f"model: its output for one example is {tuple(output.shape)}; "
            "a tensor (1, classes) was expected for the cross entropy"
        )
    return output.shape[1]


def try_metrics(task: Task, examples: Examples) -> None:
    """Work out every metric on a few examples: what fails here would fail after training."""
    some = examples.take(torch.arange(min(_TRIED_ROWS, examples.num_rows)).numpy())
    cpu = some.to(torch.device("cpu"))
    outputs = _predict(task, cpu.x)
    mask = torch.ones(cpu.num_rows, dtype=torch.bool)
    for metric in task.all_metrics:
        if metric.name == "loss":  # its own check says more
            _try_loss(task, outputs, cpu.y)
        try:
            _try_metric(metric, outputs, Batch(cpu.x, cpu.y, cpu.group, mask, mask))
        except InputError:
            raise
        except Exception as error:  # a user's own function may raise anything
            raise InputError(
                f"metric: {metric.name} fails on outputs {describe_form(outputs)} and targets "
                f"{describe_form(cpu.y)} ({describe_error(error)}); choose or write another one"
            ) from error
    _try_loss(task, outputs, cpu.y)


def _try_loss(task: Task, outputs: Tensor, targets: Values) -> None:
    """Refuse outputs and targets that the loss does not take, or that torch's would broadcast.

    Where shapes are broadcast, each row meets all the others.
    """
    forms = f"outputs {describe_form(outputs)} and targets {describe_form(targets)}"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size", UserWarning)
        try:
            task.per_example(outputs, targets)
        except UserWarning as error:
            raise InputError(
                f"loss: an example has {forms}; equal shapes were expected: take away an axis of "
                "the outputs with forward=, or give the targets one"
            ) from error
        except InputError:
            raise
        except Exception as error:  # a user's own function may raise anything
            raise InputError(
                f"loss: {describe_loss(task.loss)} fails on {forms} ({describe_error(error)}); "
                "choose or write another one"
            ) from error


def _try_metric(metric: Metric, outputs: Tensor, batch: Batch) -> None:
    if metric.of_client is not None:
        value = metric.of_client(outputs, take_rows(batch.y, slice(None)))
        if value is not None:
            float(value)
        return
    sums, weights = metric.sums(outputs, batch)
    for values in (sums, weights):
        if not isinstance(values, Tensor) or values.shape != batch.mask.shape:
            raise InputError(
                f"metric: {metric.name} gave {describe_value(values)} for {len(batch.mask)} "
                "examples; one value per example was expected, or a pair of sums and weights"
            )
    float(metric.figure(float(sums.sum()), float(weights.sum())))
