"""Where a model's representation is, if nobody says: the outermost modules in the order in which they are called."""

import copy

import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.split import canonical_names
from glocal.studies.build import build_split
from glocal.studies.saved_experiment import SavedExperiment


def default_representation(saved: SavedExperiment) -> tuple[str, str]:
    """The module whose output is looked at, and why: the study's choice, else the end of the local part, else before the last."""
    if saved.settings.audit is not None:
        return saved.settings.audit.layer, "as the study's [audit] says"
    model = saved.trained_federation.model
    order = outer_modules(model, saved.federation.train.examples.x[:1].cpu())
    weighty = [name for name in order if tensors_in(model, name)]
    kept = _local(saved)
    local = [name for name in weighty if tensors_in(model, name) <= kept]
    if local and local == weighty[: len(local)] and len(local) < len(weighty):
        return local[-1], "the last module that stays on the devices"
    before = order[: order.index(weighty[-1])] if weighty else []
    if not before:
        raise InputError(
            "audit: this model has no module before its output; say with --at where the representation is"
        )
    return before[-1], "the last module before the output"


def outer_modules(model: nn.Module, example: Tensor) -> list[str]:
    """The outermost modules that are called for an example (1, ...), in that order; those inside where one holds all others.

    >>> outer_modules(nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1)), torch.zeros(1, 2))
    ['0', '1']
    """
    called, copied = [], copy.deepcopy(model).eval()
    for name, module in copied.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: called.append(name))
    with torch.no_grad():
        copied(example)
    found = [name for name in dict.fromkeys(called) if name]
    while (
        len(outer := [name for name in found if not _inside(name, found)]) == 1 and len(found) > 1
    ):
        found = [name for name in found if name != outer[0]]
    return outer


def _inside(name: str, others: list[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def tensors_in(model: nn.Module, module: str) -> frozenset[str]:
    """The parameters and buffers in a module, by their first names."""
    return frozenset(
        first for name, first in canonical_names(model).items() if name.startswith(f"{module}.")
    )


def _local(saved: SavedExperiment) -> frozenset[str]:
    """What stays on the devices by the split of the case, or of its study: so that FedAvg is looked at where LG-FedAvg is."""
    settings, experiment = saved.settings, saved.settings.experiments[saved.experiment]
    sides = (experiment.local, experiment.shared, settings.split.local, settings.split.shared)
    named = any(side is not None for side in sides)
    return (
        build_split(settings, experiment, saved.trained_federation.model).local
        if named
        else frozenset()
    )
