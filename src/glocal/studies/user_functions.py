"""Functions of the user's, named in settings as "module:function"."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from glocal.core.errors import InputError, describe_error
from glocal.datasets.vqa import VQAMetadata
from glocal.studies.settings import ModelSettings

_REQUEST = "request"


class ModelRequest(NamedTuple):
    """What a model function gets, if it has a parameter `request`."""

    settings: ModelSettings
    example: Tensor
    classes: int
    questions: VQAMetadata | None = None


def import_function(address: str, where: str) -> Callable[..., Any]:
    """The function behind "module:function"."""
    module, _, name = address.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # an import of a user's module may raise anything
        raise InputError(
            f"settings: {where} = '{address}' cannot be found ({describe_error(error)}); "
            "write it as module:function, importable from here"
        ) from error
    if not callable(function):
        raise InputError(
            f"settings: {where} = '{address}' is not a function; write it as module:function"
        )
    return function  # type: ignore[no-any-return]


def call_user_function(function: Callable[[], Any], name: str) -> Any:
    """The result of a user's function; an error in it becomes one line."""
    try:
        return function()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise InputError(f"{name}: the function failed ({describe_error(error)})") from error


def takes_request(function: Callable[..., Any]) -> bool:
    """Whether a user's function has a parameter `request`."""
    try:
        return _REQUEST in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables have no signature that can be read
        return False


def call_model_function(address: str, where: str, request: ModelRequest) -> nn.Module:
    """The model that a function "module:function" builds; the request is passed if it takes one."""
    function = import_function(address, where)
    make = partial(function, request=request) if takes_request(function) else function
    model = call_user_function(make, address)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: {address} returned {type(model).__name__}; an nn.Module was expected"
        )
    return model
