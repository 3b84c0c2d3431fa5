"""Functions of the user's own, which settings name as "module:function"."""

import importlib
from collections.abc import Callable
from typing import Any

from glocal.core.errors import InputError, describe_error


def import_function(address: str, where: str) -> Callable[..., Any]:
    """The function behind "module:function"."""
    module, _, name = address.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's own module may raise while it is imported
        raise InputError(
            f"settings: {where} = '{address}' cannot be found ({describe_error(error)}); write it as module:function, importable from here"
        ) from error
    if not callable(found):
        raise InputError(
            f"settings: {where} = '{address}' is no function; write it as module:function"
        )
    return found  # type: ignore[no-any-return]


def call_user_function(function: Callable[[], Any], name: str) -> Any:
    """What a function of the user's makes; whatever it raises is told in one line."""
    try:
        return function()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's own function may raise
        raise InputError(f"{name}: the function failed ({describe_error(error)})") from error
