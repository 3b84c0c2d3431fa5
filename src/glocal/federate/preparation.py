"""Data as a task takes them: numbers in the model's type, targets where data have none."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError, describe_error, describe_value
from glocal.core.losses import ignored_index
from glocal.core.task import Task
from glocal.core.values import num_rows
from glocal.datasets.federated import FederatedData
from glocal.federate.experiment import Experiment, Group, Phase


def prepare_data(data: FederatedData, task: Task) -> FederatedData:
    """The data as the task takes them; a store that several data share stays one."""
    return prepare_all([data], task)[0]


def prepare_all(data: Sequence[FederatedData], task: Task) -> list[FederatedData]:
    """The same for the data of several seeds, which may share stores."""
    stores: dict[int, Examples] = {}

    def prepared(subset: ClientData) -> ClientData:
        key = id(subset.examples)
        if key not in stores:
            stores[key] = prepare_examples(subset.examples, task)
        if stores[key] is subset.examples:
            return subset
        return replace(subset, examples=stores[key])

    return [each.map_subsets(prepared) for each in data]


def prepare_examples(examples: Examples, task: Task) -> Examples:
    """Numbers in the model's type, and targets made of the inputs where the task makes them."""
    return _with_targets(examples.with_dtype(_float_type(task)), task)


def prepare_experiment(experiment: Experiment) -> Experiment:
    """The experiment with all data as its tasks take them, and what its tasks have to know.

    That is the metric that rounds are selected by, and whether some targets do not count. An
    experiment that is prepared already stays as it is.
    """
    groups: list[Group] = []
    phase_data: list[list[tuple[FederatedData, ...]]] = [[] for _ in experiment.phases]
    for place, group in enumerate(experiment.groups):
        task = experiment.evaluation.with_criterion(group.algorithm.task)
        in_phases = [phase.data[place] if phase.data else () for phase in experiment.phases]
        every = [*group.data, *chain.from_iterable(in_phases)]
        prepared = iter(prepare_all(every, task))
        own = tuple(next(prepared) for _ in group.data)
        for data, by_seed in zip(phase_data, in_phases, strict=True):
            data.append(tuple(next(prepared) for _ in by_seed))
        algorithm = group.algorithm
        if task is not algorithm.task:
            algorithm = replace(algorithm, task=task)
        groups.append(replace(group, algorithm=prepare_algorithm(algorithm, own), data=own))
    phases: list[Phase] = []
    for phase, by_group in zip(experiment.phases, phase_data, strict=True):
        phases.append(replace(phase, data=tuple(by_group)) if phase.data else phase)
    return replace(experiment, groups=tuple(groups), phases=tuple(phases))


def prepare_algorithm(algorithm: Algorithm, data: Sequence[FederatedData]) -> Algorithm:
    """The algorithm; its task knows whether some targets do not count."""
    task = prepare_task(algorithm.task, data)
    return algorithm if task is algorithm.task else replace(algorithm, task=task)


def prepare_task(task: Task, data: Sequence[FederatedData]) -> Task:
    """The task, which knows whether some targets do not count."""
    subsets = chain.from_iterable(each.subsets() for each in data)
    stores = {id(subset.examples): subset.examples for subset in subsets}
    if task.has_ignored or not any(has_ignored_targets(task, each) for each in stores.values()):
        return task
    return replace(task, has_ignored=True)


def _float_type(task: Task) -> torch.dtype:
    """The type of the model's first floating parameter."""
    for parameter in task.model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


def _with_targets(examples: Examples, task: Task) -> Examples:
    """The examples; where they have no targets, those that the task makes of their inputs."""
    if examples.has_targets or task.make_targets is None:
        return examples
    try:
        targets = task.make_targets(examples.x)
        count = num_rows(targets)
    except InputError:
        raise
    except Exception as error:  # a user's own function may raise anything
        raise InputError(f"task: make_targets fails ({describe_error(error)})") from error
    if count != examples.num_rows:
        raise InputError(
            f"task: make_targets gave {describe_value(targets)} for {examples.num_rows} inputs; "
            "one target per input was expected"
        )
    return examples._replace(y=targets)


def has_ignored_targets(task: Task, examples: Examples) -> bool:
    """Whether some target is one that the loss does not count."""
    ignored, y = ignored_index(task.loss), examples.y
    return isinstance(y, Tensor) and ignored is not None and bool((y == ignored).any())
