"""Which parameters and buffers stay on the device (local) and which are averaged (shared)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from glocal.core import trees
from glocal.core.errors import InputError, suggest_name
from glocal.core.trees import Params

Term = str | Callable[[str, Tensor], bool]
Selector = Term | Iterable[Term]


@dataclass(frozen=True)
class Split:
    """Every parameter and buffer of a model, by name, on exactly one side."""

    local: frozenset[str]
    shared: frozenset[str]

    def __post_init__(self) -> None:
        both = self.local & self.shared
        if both:
            raise InputError(
                f"split: {sorted(both)} would be both local and shared; put each tensor on one side"
            )

    @classmethod
    def of(
        cls, model: nn.Module, *, local: Selector | None = None, shared: Selector | None = None
    ) -> "Split":
        """Split a model by naming one side, or both.

        A term is a module or tensor name ("encoder"), a glob ("blocks.[0-2].*"), or a predicate (name, tensor) -> bool;
        a selector is a term or several. Nothing on a side: an empty list.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> sorted(Split.of(model, local="0").shared)
        ['2.bias', '2.weight']
        """
        named = named_tensors(model)
        sides = {
            side: _select(term, named)
            for side, term in (("local", local), ("shared", shared))
            if term is not None
        }
        if not sides:
            raise InputError(
                "split: neither side given; name the private part with local= or the averaged one with shared="
            )
        everything = frozenset(named)
        chosen_local = sides.get("local", everything - sides.get("shared", everything))
        chosen_shared = sides.get("shared", everything - chosen_local)
        left_over = everything - chosen_local - chosen_shared
        if left_over:
            raise InputError(
                f"split: {sorted(left_over)} is on neither side; name only one side, and the rest is the other"
            )
        split = cls(chosen_local, chosen_shared)
        _refuse_tied_across(split, model)
        names = frozenset(unique_tensors(model))
        return cls(split.local & names, split.shared & names)

    def with_local(self, names: Iterable[str]) -> "Split":
        """The same with some more tensors that stay on the device, such as those of an auxiliary model."""
        return Split(self.local | frozenset(names), self.shared)

    def take_local(self, params: Params) -> Params:
        """The part that never leaves the device."""
        return trees.pick(params, self.local)

    def take_shared(self, params: Params) -> Params:
        """The part that is sent and averaged."""
        return trees.pick(params, self.shared)

    def describe(self, params: Params) -> str:
        """A table: name, side, parameters, bytes; and what part of the model is sent each round."""
        width = max(len(name) for name in params)
        lines = [f"{'tensor':<{width}}  side    {'parameters':>12}  {'bytes':>12}"]
        for name, tensor in params.items():
            side = "local " if name in self.local else "shared"
            size = f"{tensor.numel():>12,}  {trees.nbytes({name: tensor}):>12,}"
            lines.append(f"{name:<{width}}  {side}  {size}")
        sent, all_ = trees.numel(self.take_shared(params)), trees.numel(params)
        bytes_sent = trees.nbytes(self.take_shared(params))
        share = 100 * sent / all_ if all_ else 0.0
        lines.append(
            f"{share:.2f} % of the model is sent each round: {sent:,} of {all_:,} parameters, {bytes_sent:,} bytes"
        )
        return "\n".join(lines)


def named_tensors(model: nn.Module) -> Params:
    """Every parameter and buffer under every name it has: tied tensors appear once per name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def unique_tensors(model: nn.Module) -> Params:
    """Every parameter and buffer once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer, with the first name of the same tensor: they differ where weights are tied."""
    first = {id(tensor): name for name, tensor in unique_tensors(model).items()}
    return {name: first[id(tensor)] for name, tensor in named_tensors(model).items()}


def first_layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """A selector: the first `count` layers that hold weights, in the order the module registers them."""
    return tuple(_checked_layer_names(model, count)[:count])


def last_layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """A selector: the last `count` layers that hold weights.

    >>> last_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 1)
    ('2',)
    """
    layers = _checked_layer_names(model, count)
    return tuple(layers[len(layers) - count :])


def layer_names(model: nn.Module) -> list[str]:
    """The layers that hold weights, in the order the module registers them.

    >>> layer_names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    ['0', '2']
    """
    return [
        name
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]


def _checked_layer_names(model: nn.Module, count: int) -> list[str]:
    names = layer_names(model)
    if not 0 <= count <= len(names):
        raise InputError(
            f"split: asked for {count} layers, but the model has {len(names)} with weights: {', '.join(names)}"
        )
    return names


def _select(selector: Selector, named: Params) -> frozenset[str]:
    terms = [selector] if isinstance(selector, str) or callable(selector) else list(selector)
    return frozenset(name for term in terms for name in _matching_names(term, named))


def _matching_names(term: Term, named: Params) -> list[str]:
    if isinstance(term, nn.Module):
        raise InputError(
            f"split: a module ({type(term).__name__}) was given; give its name, such as 'encoder'"
        )
    matched = [name for name, tensor in named.items() if _term_matches(term, name, tensor)]
    if not matched:
        known = {*named, *(parent for name in named for parent in _parents(name))}
        given = f"'{term}'" if isinstance(term, str) else "the predicate"
        hint = (
            suggest_name(term, known)
            if isinstance(term, str)
            else f"names: {', '.join(sorted(named))}"
        )
        raise InputError(f"split: {given} matches no parameter or buffer of this model; {hint}")
    return matched


def _term_matches(term: Term, name: str, tensor: Tensor) -> bool:
    if isinstance(term, str):
        return any(fnmatchcase(part, term) for part in (name, *_parents(name)))
    return bool(term(name, tensor))


def _parents(name: str) -> list[str]:
    """The modules a tensor sits in: 'a.b.weight' -> ['a', 'a.b']."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _refuse_tied_across(split: Split, model: nn.Module) -> None:
    """One tensor under two names must not be both private and averaged."""
    for name, twin in canonical_names(model).items():
        if (name in split.local) != (twin in split.local):
            raise InputError(
                f"split: '{name}' and '{twin}' are one tied tensor; put both names on the same side"
            )
