"""Figures of the linear theory: the error of a mixture by alpha, in closed form and by trial."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.report.drawing import colour_theme, new_axes, new_figure, picture_kind, save_picture
from glocal.report.formatting import PERCENT
from glocal.report.styles import COLOURS, LineStyle
from liang2020.theory import LinearProblem, finite_sample_closed_form, uniform_inputs
from liang2020.theory_trials import Trials, run_trials

_ALPHAS, _MARKED = np.linspace(0, 1, 201), slice(None, None, 40)
_THEME = ("#1c2126", "#ffffff")
_DASHES = (0, (2, 2))
_MARKER_SIZE = 4.5
_TRIALS_STYLE = LineStyle(COLOURS[0], (), "o")
# The paper's text gives a standard deviation of 1.5; its released code squares that.
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
    """A problem and its trials; without trials, only the closed form is drawn."""

    problem: LinearProblem
    trials: Trials | None


def draw_mixture(result: TheoryResult, path: Path) -> Path:
    """Draw one problem's errors by alpha into an .svg or .png file."""
    with colour_theme(*_THEME):
        figure, axes = new_axes()
        _curve(axes, result, _TRIALS_STYLE, label="closed form")
        _mark_best(axes, finite_sample_closed_form(result.problem).best_alpha())
        if result.trials is not None:
            _add_trials_to_legend(axes)
        axes.set(xlabel="α, from all shared (0) to all local (1)", ylabel="error", ylim=(0, None))
        return _save_with_legend(figure, path)


def _add_trials_to_legend(axes: Axes) -> None:
    axes.plot(
        [],
        [],
        _TRIALS_STYLE.marker,
        color=_TRIALS_STYLE.colour,
        markersize=_MARKER_SIZE,
        label="trials ± one standard deviation",
    )


def draw_theory(path: Path, *, repeats: int = 10, seed: int = 0) -> Path:
    """Draw the paper's Figure 2(a) and (b) and its appendix's panels into an .svg or .png file."""
    picture_kind(path)
    results: dict[tuple[float, str], TheoryResult] = {}
    for rho in sorted({rho for _, rho in _PANELS}):
        for noise, (sigma, _) in _NOISES.items():
            problem = LinearProblem(uniform_inputs(20), clients=100, n=2000, rho=rho, sigma=sigma)
            trials = run_trials(problem, repeats=repeats, seed=seed)
            results[rho, noise] = TheoryResult(problem, trials)
    with colour_theme(*_THEME):
        return _save_with_legend(_six_panels(results), path)


def _six_panels(results: Mapping[tuple[float, str], TheoryResult]) -> Figure:
    """Two panels per row, each with both readings of the paper's noise."""
    figure = new_figure(7.0)
    panels = figure.subplots(3, 2, sharex=True)
    for axes, (title, rho) in zip(panels.flat, _PANELS, strict=True):
        for noise, (_, line_style) in _NOISES.items():
            _curve(axes, results[rho, noise], line_style, label=noise)
            _line_to_best(axes, results[rho, noise].problem, line_style)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set(ylim=(0, None))
    for axes in panels[:, 0]:
        axes.set(ylabel="error")
    for axes in panels[-1]:
        axes.set(xlabel="α, all shared to all local")
    return figure


def _line_to_best(axes: Axes, problem: LinearProblem, line_style: LineStyle) -> None:
    """A dotted line from alpha* up to the closed form's lowest error."""
    best = finite_sample_closed_form(problem)
    axes.vlines(
        best.best_alpha(),
        0,
        best.best_error(),
        color=line_style.colour,
        linestyle=_DASHES,
        linewidth=1,
    )


def _curve(axes: Axes, result: TheoryResult, line_style: LineStyle, *, label: str) -> None:
    """The closed form as a line, and the trials with it."""
    dashes = (0, line_style.dash) if line_style.dash else "solid"
    axes.plot(
        _ALPHAS,
        finite_sample_closed_form(result.problem).mixture_error(_ALPHAS),
        color=line_style.colour,
        linestyle=dashes,
        linewidth=1.8,
        label=label,
    )
    if result.trials is not None:
        _draw_trials(axes, result.trials, line_style)


def _draw_trials(axes: Axes, trials: Trials, line_style: LineStyle) -> None:
    """Means over trials as marks, in a band of one standard deviation to either side."""
    errors = np.stack([trials.mixture_errors(alpha) for alpha in _ALPHAS])
    mean, deviation = errors.mean(1), errors.std(1, ddof=1)
    colour = line_style.colour
    axes.fill_between(
        _ALPHAS, mean - deviation, mean + deviation, color=colour, alpha=0.28, linewidth=0
    )
    axes.plot(
        _ALPHAS[_MARKED],
        mean[_MARKED],
        line_style.marker,
        color=colour,
        markersize=_MARKER_SIZE,
        linestyle="none",
    )


def _mark_best(axes: Axes, alpha: float) -> None:
    """A dotted line at alpha*, with its text at the top, on the side with more room."""
    axes.axvline(alpha, color=axes.xaxis.label.get_color(), linestyle=_DASHES, linewidth=1)
    side, offset = ("left", 4) if alpha < 0.5 else ("right", -4)
    axes.annotate(
        f"α* = {alpha:.2f}: keep {PERCENT * alpha:.0f} % local",
        (alpha, 1),
        xytext=(offset, -2),
        ha=side,
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )


def _save_with_legend(figure: Figure, path: Path) -> Path:
    """Save a figure, with one legend for all its panels below."""
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(
        [*entries.values()],
        [*entries],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        columnspacing=1.2,
    )
    return save_picture(figure, path)
