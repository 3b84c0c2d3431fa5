"""The linear theory as a user sees it: what to keep local, three errors in closed form and by trial, and a picture."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from glocal.core.errors import InputError, nearest
from glocal.core.files import require_place
from glocal.evaluate.theory import (
    Floats,
    Inputs,
    Law,
    Trials,
    World,
    enough_examples,
    estimate,
    finite_law,
    law,
    normal,
    printed_law,
    trials,
    uniform,
    unit,
)
from glocal.report.drawing import picture_kind
from glocal.report.numerals import PERCENT
from glocal.report.theory import Tried, draw_mixture

_INPUTS = {"uniform": uniform, "normal": normal, "unit": unit}
_NOTEWORTHY = 0.005  # half a percent of the model


def inputs_of(name: str, d: int) -> Inputs:
    """The inputs that go by a name."""
    if name not in _INPUTS:
        raise InputError(f"theory: there are no inputs '{name}'; {nearest(name, _INPUTS)}")
    return _INPUTS[name](d)


def show_theory(world: World, *, repeats: int, seed: int, out: Path | None) -> None:
    """Print what the theory says of a world, try it out, and draw it; without repeats, the closed forms alone."""
    if out is not None:
        picture_kind(out)
        require_place(out)
    with Console(stderr=True).status(f"{repeats} trials"):
        tried = trials(world, repeats=repeats, seed=seed) if repeats else None
    _print_world(world)
    _print_errors(world, tried)
    print()
    for line in _advice(world):
        print(line)
    if out is not None:
        print(f"drawn: {draw_mixture(Tried(world, tried), out)}")


def _print_world(world: World) -> None:
    print(
        f"{world.devices:,} devices with {world.n:,} examples each; {world.inputs.d:,} inputs, tr S = {world.inputs.trace:.4g}; "
        f"rho^2 = {world.rho**2:.4g}, sigma^2 = {world.sigma**2:.4g}"
    )


def _print_errors(world: World, tried: Trials | None) -> None:
    """One row per model and one for alpha*: in closed form as N grows and at this N, and by trial."""
    large, this = law(world), finite_law(world)
    best = this.best_alpha()
    rows = [
        ["all local", "1", _four(large.local_error()), _four(this.local_error())],
        ["all shared", "0", _four(large.global_error()), _four(this.global_error())],
        ["best mixture", f"{best:.3f}", _four(large.best_error()), _four(this.best_error())],
        ["alpha*", "", _four(large.best_alpha()), _four(best)],
    ]
    heads = ["", "alpha", "N large", "this N"]
    if tried is not None:
        values = (tried.local, tried.shared, tried.mixture_errors(best), tried.best_alphas())
        rows = [[*row, *_by_trial(of)] for row, of in zip(rows, values, strict=True)]
        heads += ["trials", "95 % interval"]
    print()
    Console().print(_table(heads, rows), highlight=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(heads[0], box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in heads[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _by_trial(values: Floats) -> tuple[str, str]:
    """A mean over trials and its interval."""
    mean, low, high = estimate(values)
    return _four(mean), f"{_four(low)} to {_four(high)}"


def _advice(world: World) -> list[str]:
    """What to do, in plain words."""
    this, printed = finite_law(world), printed_law(world).best_alpha()
    lines = [_keep(this)]
    if 0 < this.best_alpha() < 1:
        enough = f"{ceil(enough_examples(world)):,} examples or more"
        lines.append(f"With {enough} each, devices do better on their own models alone than on the shared one alone.")
    if abs(printed - this.best_alpha()) > _NOTEWORTHY:
        lines.append(f"The paper's formula as printed, which holds where tr S = 1, would keep {_percent(printed)} local.")
    return lines


def _keep(this: Law) -> str:
    """The sentence that matters."""
    alpha, best = this.best_alpha(), this.best_error()
    if not alpha:
        return "Keep nothing local: devices hardly differ, so that one model for all is best."
    if alpha == 1:
        return "Keep all of it local: labels have hardly any noise, so that each device's own model is right."
    local, shared = (_percent(1 - best / error) for error in (this.local_error(), this.global_error()))
    mixture = f"{alpha:.2f} x a device's own model + {1 - alpha:.2f} x the shared one"
    return f"Keep {_percent(alpha)} local: {mixture}. Its error is {local} below all local, {shared} below all shared."


def _four(number: float) -> str:
    """Four digits, zeros at the end included."""
    return f"{number:#.4g}"


def _percent(share: float) -> str:
    return f"{PERCENT * share:.0f} %"
