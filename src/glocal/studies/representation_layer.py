"""The default layer of a model's representation, from the order in which modules are called."""

import copy

import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.model_tensors import canonical_names
from glocal.studies.build import build_split, named_split
from glocal.studies.saved_experiment import SavedExperiment


def default_representation(saved: SavedExperiment) -> tuple[str, str]:
    """The module whose output is audited, and the reason.

    The study's choice, else the end of the local part, else the last module before the output.
    """
    if saved.settings.audit is not None:
        return saved.settings.audit.layer, "from the study's [audit]"
    model = saved.trained_federation.task.model
    order = outer_modules(model, saved.federation.train.examples.x[:1].cpu())
    with_tensors = [name for name in order if tensors_in(model, name)]
    local_tensors = _local(saved)
    local = [name for name in with_tensors if tensors_in(model, name) <= local_tensors]
    if local and local == with_tensors[: len(local)] and len(local) < len(with_tensors):
        return local[-1], "the last module of the local part"
    before = order[: order.index(with_tensors[-1])] if with_tensors else []
    if not before:
        raise InputError(
            "audit: this model has no module before its output; "
            "name the representation's module with --layer"
        )
    return before[-1], "the last module before the output"


def outer_modules(model: nn.Module, example: Tensor) -> list[str]:
    """The outermost modules that are called for an example (1, ...), in order of their calls.

    If one module holds all others, those inside it.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
    >>> outer_modules(model, torch.zeros(1, 2))
    ['0', '1']
    """
    called, copied = [], copy.deepcopy(model).eval()
    for name, module in copied.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    with torch.no_grad():
        copied(example)
    names = [name for name in dict.fromkeys(called) if name]
    outer = [name for name in names if not _inside(name, names)]
    while len(outer) == 1 and len(names) > 1:
        names.remove(outer[0])
        outer = [name for name in names if not _inside(name, names)]
    return outer


def _inside(name: str, others: list[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def tensors_in(model: nn.Module, module: str) -> frozenset[str]:
    """The parameters and buffers in a module, by their canonical names."""
    return frozenset(
        first for name, first in canonical_names(model).items() if name.startswith(f"{module}.")
    )


def _local(saved: SavedExperiment) -> frozenset[str]:
    """What stays on the clients by the experiment's split, or by the study's.

    FedAvg is then audited at the same layer as LG-FedAvg.
    """
    sides = named_split(saved.settings, saved.settings.experiments[saved.experiment])
    if sides.local is None and sides.shared is None:
        return frozenset()
    return build_split(sides, saved.trained_federation.task.model).local
