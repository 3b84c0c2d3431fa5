"""The command `liang2020 theory`: what to keep local, errors in closed form and by trial."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from glocal.core.errors import InputError, suggest_name
from glocal.core.files import require_writable
from glocal.evaluate.intervals import confidence_interval
from glocal.report.drawing import picture_kind
from glocal.report.formatting import PERCENT
from liang2020.theory import (
    ClosedForm,
    Floats,
    InputDistribution,
    LinearProblem,
    break_even_examples,
    closed_form,
    finite_sample_closed_form,
    normal_inputs,
    published_closed_form,
    uniform_inputs,
    unit_inputs,
)
from liang2020.theory_figure import TheoryResult, draw_mixture
from liang2020.theory_trials import Trials, run_trials

_INPUTS = {"uniform": uniform_inputs, "normal": normal_inputs, "unit": unit_inputs}
_NOTEWORTHY = 0.005  # half a percent of the model


def make_inputs(name: str, d: int) -> InputDistribution:
    """The input distribution of this name."""
    if name not in _INPUTS:
        raise InputError(f"theory: there are no inputs '{name}'; {suggest_name(name, _INPUTS)}")
    return _INPUTS[name](d)


def show_theory(problem: LinearProblem, *, repeats: int, seed: int, out: Path | None) -> None:
    """Print the theory's results for a problem and those of trials, and draw them.

    With 0 repeats there are no trials.
    """
    if out is not None:
        picture_kind(out)
        require_writable(out)
    with Console(stderr=True).status(f"{repeats} trials"):
        trials = run_trials(problem, repeats=repeats, seed=seed) if repeats else None
    _print_problem(problem)
    _print_errors(problem, trials)
    print()
    for line in _advice(problem):
        print(line)
    if out is not None:
        print(f"drawn: {draw_mixture(TheoryResult(problem, trials), out)}")


def _print_problem(problem: LinearProblem) -> None:
    inputs = problem.inputs
    print(
        f"{problem.clients:,} clients with {problem.n:,} examples each; "
        f"{inputs.d:,} inputs, tr S = {inputs.trace:.4g}; "
        f"rho^2 = {problem.rho**2:.4g}, sigma^2 = {problem.sigma**2:.4g}"
    )


def _print_errors(problem: LinearProblem, trials: Trials | None) -> None:
    """One row per model and one for alpha*: in closed form for large N, at this N, and by trial."""
    large, this = closed_form(problem), finite_sample_closed_form(problem)
    best = this.best_alpha()
    rows = [
        ["all local", "1", *_cells(large.local_error(), this.local_error())],
        ["all shared", "0", *_cells(large.global_error(), this.global_error())],
        ["best mixture", f"{best:.3f}", *_cells(large.best_error(), this.best_error())],
        ["alpha*", "", *_cells(large.best_alpha(), best)],
    ]
    heads = ["", "alpha", "N large", "this N"]
    if trials is not None:
        measured = (trials.local, trials.shared, trials.mixture_errors(best), trials.best_alphas())
        for row, values in zip(rows, measured, strict=True):
            row.extend(_trial_cells(values))
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


def _cells(*numbers: float) -> list[str]:
    return [_four_digits(number) for number in numbers]


def _trial_cells(values: Floats) -> tuple[str, str]:
    """A mean over trials and its interval."""
    mean, low, high = confidence_interval(values)
    return _four_digits(mean), f"{_four_digits(low)} to {_four_digits(high)}"


def _advice(problem: LinearProblem) -> list[str]:
    """What to keep local, in plain words."""
    this, printed = finite_sample_closed_form(problem), published_closed_form(problem).best_alpha()
    lines = [_local_share_line(this)]
    if 0 < this.best_alpha() < 1:
        enough = ceil(break_even_examples(problem))
        lines.append(
            f"With {enough:,} examples or more per client, local models alone are better than the "
            "shared model alone."
        )
    if abs(printed - this.best_alpha()) > _NOTEWORTHY:
        lines.append(
            "The paper's formula as printed, which holds where tr S = 1, would keep "
            f"{_percent(printed)} local."
        )
    return lines


def _local_share_line(this: ClosedForm) -> str:
    """The share of the local model in the best mixture, and its gains."""
    alpha, best = this.best_alpha(), this.best_error()
    if not alpha:
        return "Keep nothing local: clients hardly differ, so one shared model is best."
    if alpha == 1:
        return (
            "Keep everything local: labels have hardly any noise, so each client's own model "
            "is accurate."
        )
    below_local = _percent(1 - best / this.local_error())
    below_shared = _percent(1 - best / this.global_error())
    mixture = f"{alpha:.2f} x a client's own model + {1 - alpha:.2f} x the shared one"
    return (
        f"Keep {_percent(alpha)} local: {mixture}. "
        f"Its error is {below_local} below all local, {below_shared} below all shared."
    )


def _four_digits(number: float) -> str:
    """Four digits, zeros at the end included."""
    return f"{number:#.4g}"


def _percent(share: float) -> str:
    return f"{PERCENT * share:.0f} %"
