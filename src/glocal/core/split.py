"""The split of a model: local tensors stay on the client, shared tensors are averaged."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from torch import Tensor, nn

from glocal.core import trees
from glocal.core.checks import require_instance
from glocal.core.errors import InputError, describe_error, describe_value, suggest_name
from glocal.core.model_tensors import (
    canonical_names,
    frozen_tensors,
    named_tensors,
    require_model,
    unique_tensors,
)
from glocal.core.one_line import one_line
from glocal.core.trees import Params

Term = str | Callable[[str, Tensor], bool]
Selector = Term | Iterable[Term]


@dataclass(frozen=True)
class Split:
    """Every parameter and buffer of a model, by name, on exactly one side.

    >>> split = Split.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), local="0")
    >>> sorted(split.local), sorted(split.shared)
    (['0.bias', '0.weight'], ['1.bias', '1.weight'])
    """

    local: frozenset[str]
    shared: frozenset[str]

    def __repr__(self) -> str:
        return one_line(self)

    def __post_init__(self) -> None:
        for side in ("local", "shared"):
            require_instance(
                f"split: {side}", getattr(self, side), frozenset, "a frozenset of names"
            )
        both = self.local & self.shared
        if both:
            raise InputError(
                f"split: {sorted(both)} would be both local and shared; put each tensor on one side"
            )

    @classmethod
    def of(
        cls, model: nn.Module, *, local: Selector | None = None, shared: Selector | None = None
    ) -> "Split":
        """Split a model by the names of one side, or of both.

        A term is the name of a module or tensor ("encoder"), a glob ("blocks.[0-2].*"), or a
        predicate (name, tensor) -> bool. A selector is a term or several; an empty list selects
        nothing.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> sorted(Split.of(model, local="0").shared)
        ['2.bias', '2.weight']
        """
        require_model("split: the model", model)
        frozen, first = frozen_tensors(model), canonical_names(model)
        named = {
            name: tensor
            for name, tensor in named_tensors(model).items()
            if first[name] not in frozen
        }
        split = cls(*_select_sides(named, frozen, local, shared))
        _refuse_tied_across(split, model)
        names = frozenset(unique_tensors(model))
        return cls(split.local & names, split.shared & names)

    def with_local(self, names: Iterable[str]) -> "Split":
        """The same split with more local tensors, such as those of an auxiliary model."""
        return Split(self.local | frozenset(names), self.shared)

    def take_local(self, params: Params) -> Params:
        """The part that never leaves the client."""
        return trees.pick(params, self.local)

    def take_shared(self, params: Params) -> Params:
        """The part that is sent and averaged."""
        return trees.pick(params, self.shared)

    def describe(self, model: nn.Module) -> str:
        """A table (tensor, role, parameters, bytes), and the fraction that is sent each round."""
        tensors = unique_tensors(model)
        width = max(len(name) for name in tensors)
        lines = [f"{'tensor':<{width}}  role    {'parameters':>12}  {'bytes':>12}"]
        for name, tensor in tensors.items():
            size = f"{tensor.numel():>12,}  {trees.nbytes({name: tensor}):>12,}"
            lines.append(f"{name:<{width}}  {self._role(name)}  {size}")
        return "\n".join([*lines, self._describe_sent(tensors)])

    def _role(self, name: str) -> str:
        if name in self.local:
            return "local "
        return "shared" if name in self.shared else "frozen"

    def _describe_sent(self, tensors: Params) -> str:
        shared = self.take_shared(tensors)
        sent, total = trees.numel(shared), trees.numel(tensors)
        percent = 100 * sent / total if total else 0.0
        return (
            f"{percent:.2f} % of the model is sent each round: "
            f"{sent:,} of {total:,} parameters, {trees.nbytes(shared):,} bytes"
        )


def with_frozen(model: nn.Module, frozen: Selector) -> nn.Module:
    """The model with more of its parameters frozen: a copy that shares their values with it.

    >>> model = with_frozen(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "0")
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['1.weight', '1.bias']
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = [parameters[name] for name in _select(frozen, dict(parameters), {})]
    if not any(parameter.requires_grad for parameter in chosen):
        return model
    shared = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in chosen}
    return copy.deepcopy(model, shared)


def first_layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """A selector: the first `count` layers with weights, in the order of registration.

    >>> first_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 1)
    ('0',)
    """
    return tuple(_checked_layer_names(model, count)[:count])


def last_layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """A selector: the last `count` layers with weights.

    >>> last_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 1)
    ('2',)
    """
    layers = _checked_layer_names(model, count)
    return tuple(layers[len(layers) - count :])


def layer_names(model: nn.Module) -> list[str]:
    """The layers with weights, in the order of registration.

    >>> layer_names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    ['0', '2']
    """
    return [name for name, module in model.named_modules() if _has_weights(module)]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _checked_layer_names(model: nn.Module, count: int) -> list[str]:
    require_model("split: the model", model)
    names = layer_names(model)
    is_whole = isinstance(count, int) and not isinstance(count, bool)
    if not is_whole or not 0 <= count <= len(names):
        raise InputError(
            f"split: {describe_value(count)} layers were requested, but the model has "
            f"{len(names)} with weights: {', '.join(names)}"
        )
    return names


def _select_sides(
    named: Params, frozen: Params, local: Selector | None, shared: Selector | None
) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the local and of the shared side; a side that is not given is the rest."""
    everything = frozenset(named)
    if local is not None and shared is not None:
        local_names, shared_names = _select(local, named, frozen), _select(shared, named, frozen)
    elif local is not None:
        local_names = _select(local, named, frozen)
        shared_names = everything - local_names
    elif shared is not None:
        shared_names = _select(shared, named, frozen)
        local_names = everything - shared_names
    else:
        raise InputError(
            "split: neither side given; name the private part with local= "
            "or the averaged one with shared="
        )
    left_over = everything - local_names - shared_names
    if left_over:
        raise InputError(
            f"split: {sorted(left_over)} is on neither side; "
            "name only one side, and the rest is the other"
        )
    return local_names, shared_names


def _select(selector: Selector, named: Params, frozen: Params) -> frozenset[str]:
    if isinstance(selector, str) or callable(selector):
        selector = [selector]
    if not isinstance(selector, list | tuple | set | frozenset):
        _refuse_term(selector)
    names: set[str] = set()
    for term in selector:
        names.update(_matching_names(term, named, frozen))
    return frozenset(names)


def _matching_names(term: Term, named: Params, frozen: Params) -> list[str]:
    if isinstance(term, nn.Module):
        raise InputError(
            f"split: a module ({type(term).__name__}) was given; give its name, such as 'encoder'"
        )
    if isinstance(term, type) or not (isinstance(term, str) or callable(term)):
        _refuse_term(term)
    matched = [name for name, tensor in named.items() if _term_matches(term, name, tensor)]
    if not matched:
        shown = f"'{term}'" if isinstance(term, str) else "the predicate"
        if any(_term_matches(term, name, tensor) for name, tensor in frozen.items()):
            raise InputError(
                f"split: {shown} matches frozen tensors only, which are neither local nor shared; "
                "leave it out, or let them be trained with requires_grad_(True)"
            )
        hint = _suggest_term(term, named)
        raise InputError(f"split: {shown} matches no parameter or buffer of this model; {hint}")
    return matched


def _refuse_term(given: object) -> NoReturn:
    raise InputError(
        f"split: {describe_value(given)} was given; the name of a module or tensor, a glob, a "
        "predicate (name, tensor) -> bool, or a list of these was expected"
    )


def _suggest_term(term: Term, named: Params) -> str:
    if not isinstance(term, str):
        return f"names: {', '.join(sorted(named))}"
    known = set(named)
    for name in named:
        known.update(_parents(name))
    return suggest_name(term, known)


def _term_matches(term: Term, name: str, tensor: Tensor) -> bool:
    if isinstance(term, str):
        return any(fnmatchcase(part, term) for part in (name, *_parents(name)))
    try:
        return bool(term(name, tensor))
    except Exception as error:  # a user's own function may raise anything
        raise InputError(
            f"split: the predicate fails on '{name}' ({describe_error(error)})"
        ) from error


def _parents(name: str) -> list[str]:
    """The modules that contain a tensor: 'a.b.weight' -> ['a', 'a.b']."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _refuse_tied_across(split: Split, model: nn.Module) -> None:
    """Refuse one tensor under two names that would be both private and averaged."""
    for name, twin in canonical_names(model).items():
        if (name in split.local) != (twin in split.local):
            raise InputError(
                f"split: '{name}' and '{twin}' are one tied tensor; put both names on the same side"
            )
