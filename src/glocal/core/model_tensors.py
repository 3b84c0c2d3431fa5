"""The tensors of a model by name: those that clients have of their own, and the frozen ones.

A parameter is frozen if it needs no gradient. A buffer is frozen if the nearest module around it
that has parameters has frozen ones only: so are the statistics of a frozen batch norm. Frozen
tensors exist once for all clients. They are in no upload, ledger, checkpoint or personal file.
"""

import hashlib

import torch
from torch import Tensor, nn

from glocal.core import trees
from glocal.core.errors import InputError, describe_value
from glocal.core.trees import Params


def require_model(name: str, model: object) -> None:
    """Refuse what is no plain module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"{name} is the class {model.__name__}; give {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} is {describe_value(model)}; an nn.Module was expected")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(f"{name} is a scripted module; give the nn.Module it was made of")
    if hasattr(model, "_orig_mod"):
        raise InputError(
            f"{name} is compiled; give the module itself, the engines compile its steps"
        )


def named_tensors(model: nn.Module) -> Params:
    """Every parameter and buffer under every name it has: tied tensors appear once per name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def unique_tensors(model: nn.Module) -> Params:
    """Every parameter and buffer once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every tensor -> the tensor's first name; they differ for tied weights."""
    first = {id(tensor): name for name, tensor in unique_tensors(model).items()}
    return {name: first[id(tensor)] for name, tensor in named_tensors(model).items()}


def frozen_tensors(model: nn.Module) -> Params:
    """The frozen tensors by their first names, as they are: nothing is copied."""
    frozen = {}
    for name, tensor in unique_tensors(model).items():
        is_parameter = isinstance(tensor, nn.Parameter)
        if _is_frozen_parameter(tensor) if is_parameter else _is_frozen_buffer(model, name):
            frozen[name] = tensor.detach()
    return frozen


def client_tensors(model: nn.Module) -> Params:
    """The tensors that every client has of its own, local or shared: all but the frozen ones."""
    tensors = unique_tensors(model)
    return trees.pick(tensors, tensors.keys() - frozen_tensors(model).keys())


def base_fingerprint(model: nn.Module) -> str:
    """A hash of the frozen tensors; empty if there are none.

    >>> base_fingerprint(nn.Linear(2, 1))
    ''
    >>> len(base_fingerprint(nn.Linear(2, 1).requires_grad_(False)))
    16
    """
    frozen = frozen_tensors(model)
    if not frozen:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(frozen.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class FrozenTensors:
    """The frozen tensors of a model on whatever device they are needed, copied there once."""

    def __init__(self, model: nn.Module) -> None:
        self._source = frozen_tensors(model)
        self._copies: dict[torch.device, Params] = {}

    def on(self, device: torch.device) -> Params:
        """The frozen tensors by their first names."""
        if device not in self._copies:
            self._copies[device] = trees.to(self._source, device)
        return self._copies[device]


def _is_frozen_parameter(tensor: Tensor) -> bool:
    return not tensor.requires_grad


def _is_frozen_buffer(model: nn.Module, name: str) -> bool:
    """Whether the nearest module around a buffer that has parameters has frozen ones only."""
    path = name.rpartition(".")[0]
    while True:
        parameters = list(model.get_submodule(path).parameters())
        if parameters:
            return all(map(_is_frozen_parameter, parameters))
        if not path:
            return False
        path = path.rpartition(".")[0]
