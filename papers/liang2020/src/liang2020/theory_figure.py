"""Figures of the linear theory: error against the share of the local model in a mixture, in closed form and by trial."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.report.drawing import colour_theme, new_axes, new_figure, picture_kind, save_picture
from glocal.report.formatting import PERCENT
from glocal.report.styles import COLOURS, LineStyle
from liang2020.theory import (
    LinearProblem,
    Trials,
    finite_sample_closed_form,
    run_trials,
    uniform_inputs,
)

_LINE, _MARKED = np.linspace(0, 1, 201), slice(None, None, 40)
_TRIALS_STYLE = LineStyle(COLOURS[0], (), "o")
# the paper's text has a deviation of 1.5, its released code squares that
_NOISES = {
    "σ = 1.5 (text)": (1.5, _TRIALS_STYLE),
    "σ = 2.25 (released code)": (2.25, LineStyle(COLOURS[1], (6, 2), "s")),
}
# the paper's Figure 2(a) and (b), then its appendix's four
_PANELS = (
    ("Figure 2(a): ρ = 0.1", 0.1),
    ("Figure 2(b): ρ = 0.06", 0.06),
    ("Appendix: ρ = 0.5", 0.5),
    ("Appendix: ρ = 0.1", 0.1),
    ("Appendix: ρ = 0.06", 0.06),
    ("Appendix: ρ = 0.02", 0.02),
)


class TheoryResult(NamedTuple):
    """A world, and what came of it in trials; without any, the closed form is drawn alone."""

    problem: LinearProblem
    trials: Trials | None


def draw_mixture(result: TheoryResult, path: Path) -> Path:
    """Draw one world's errors against alpha into an .svg or .png file."""
    with colour_theme("#1c2126", "#ffffff"):
        figure, axes = new_axes()
        _curve(axes, result, _TRIALS_STYLE, label="closed form")
        _say_best(axes, finite_sample_closed_form(result.problem).best_alpha())
        if result.trials is not None:
            axes.plot(
                [],
                [],
                _TRIALS_STYLE.marker,
                color=_TRIALS_STYLE.colour,
                markersize=4.5,
                label="trials ± one standard deviation",
            )
        axes.set(xlabel="α, from all shared (0) to all local (1)", ylabel="error", ylim=(0, None))
        return _written(figure, path)


def draw_theory(path: Path, *, repeats: int = 10, seed: int = 0) -> Path:
    """Draw the paper's Figure 2(a) and (b) and the four panels of its appendix into an .svg or .png file."""
    picture_kind(path)
    result = {
        (rho, noise): TheoryResult(problem, run_trials(problem, repeats=repeats, seed=seed))
        for rho in sorted({rho for _, rho in _PANELS})
        for noise, (sigma, _) in _NOISES.items()
        for problem in [
            LinearProblem(uniform_inputs(20), clients=100, n=2000, rho=rho, sigma=sigma)
        ]
    }
    with colour_theme("#1c2126", "#ffffff"):
        return _written(_six_panels(result), path)


def _six_panels(result: Mapping[tuple[float, str], TheoryResult]) -> Figure:
    """Two panels to a row, each with both readings of the paper's noise."""
    figure = new_figure(7.0)
    panels = figure.subplots(3, 2, sharex=True)
    for axes, (title, rho) in zip(panels.flat, _PANELS, strict=True):
        for noise, (_, line_style) in _NOISES.items():
            _curve(axes, result[rho, noise], line_style, label=noise)
            best = finite_sample_closed_form(result[rho, noise].problem)
            axes.vlines(
                best.best_alpha(),
                0,
                best.best_error(),
                color=line_style.colour,
                linestyle=(0, (2, 2)),
                linewidth=1,
            )
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(ylim=(0, None))
    for axes in panels[:, 0]:
        axes.set(ylabel="error")
    for axes in panels[-1]:
        axes.set(xlabel="α, all shared to all local")
    return figure


def _curve(axes: Axes, result: TheoryResult, line_style: LineStyle, *, label: str) -> None:
    """The closed form as a line; the trials' means as marks, in a band of one standard deviation over trials to either side."""
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.plot(
        _LINE,
        finite_sample_closed_form(result.problem).mixture_error(_LINE),
        color=line_style.colour,
        linestyle=dashes,
        linewidth=1.8,
        label=label,
    )
    if result.trials is None:
        return
    errors = np.stack([result.trials.mixture_errors(alpha) for alpha in _LINE])
    mean, deviation = errors.mean(1), errors.std(1, ddof=1)
    axes.fill_between(
        _LINE, mean - deviation, mean + deviation, color=line_style.colour, alpha=0.28, linewidth=0
    )
    axes.plot(
        _LINE[_MARKED],
        mean[_MARKED],
        line_style.marker,
        color=line_style.colour,
        markersize=4.5,
        linestyle="none",
    )


def _say_best(axes: Axes, alpha: float) -> None:
    """A dotted line where the closed form is lowest; its words stand at the top, on the side with more room."""
    axes.axvline(alpha, color=axes.xaxis.label.get_color(), linestyle=(0, (2, 2)), linewidth=1)
    words = f"α* = {alpha:.2f}: keep {PERCENT * alpha:.0f} % local"
    side: dict[str, Any] = (
        {"ha": "left", "xytext": (4, -2)} if alpha < 0.5 else {"ha": "right", "xytext": (-4, -2)}
    )
    axes.annotate(
        words,
        (alpha, 1),
        **side,
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )


def _written(figure: Figure, path: Path) -> Path:
    """A figure as a file, with its legend below."""
    entries = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [*entries.values()],
        [*entries],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        columnspacing=1.2,
    )
    return save_picture(figure, path)
