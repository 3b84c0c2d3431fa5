"""The linear theory: closed forms against trials and published numbers, its command and figures."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from glocal.core.errors import InputError
from glocal.evaluate.intervals import confidence_interval
from liang2020.cli import main
from liang2020.theory import (
    ClosedForm,
    InputDistribution,
    LinearProblem,
    break_even_examples,
    closed_form,
    correlated_inputs,
    finite_sample_closed_form,
    normal_inputs,
    published_closed_form,
    uniform_inputs,
    unit_inputs,
)
from liang2020.theory_figure import TheoryResult, draw_mixture, draw_theory
from liang2020.theory_trials import equal_weights, gram_weights, run_trials

PAGE = (Path(__file__).parents[1] / "docs/theory.md").read_text()
CLOSE = 0.03
SURE = 0.99999  # about six hundred intervals are tested


def paper(rho, sigma):
    """The paper's own experiment."""
    return LinearProblem(uniform_inputs(20), clients=100, n=2000, rho=rho, sigma=sigma)


def skewed(d):
    """Inputs of which some directions are far longer than others."""
    generator = np.random.default_rng(d)
    axes, _ = np.linalg.qr(generator.standard_normal((d, d)))
    return correlated_inputs(axes @ np.diag(np.geomspace(0.2, 3, d)) @ axes.T)


SHAPES = [(2, 3, 240), (3, 3, 320), (4, 2, 400), (6, 2, 560), (8, 2, 720)]
VARIANCES = [(0.5, 1.0), (0.1, 1.5), (0.2, 2.25), (0.05, 0.5)]
GRID = [
    LinearProblem(inputs(d), clients, n, rho, sigma)
    for (d, clients, n), (rho, sigma), inputs in product(
        SHAPES, VARIANCES, (uniform_inputs, skewed)
    )
]


ALPHAS = (0.25, 0.5, 0.75)


def forms(of):
    """Every closed form that trials measure too, by name."""
    values = {
        "local": of.local_error(),
        "shared": of.global_error(),
        "discrepancy": of.discrepancy(),
        "shared_variance": of.shared_variance(),
        "covariance": of.shared_variance(),
        "best": of.mixture_error(of.best_alpha()),
        "variance": of.variance(0.5),
        "bias": of.bias(0.5),
    }
    for alpha in ALPHAS:
        values[f"mixture {alpha}"] = of.mixture_error(alpha)
        values[f"bias and variance {alpha}"] = of.bias(alpha) + of.variance(alpha)
    return values


def measured(trials, best):
    """The same values of every trial, by name."""
    values = {
        "local": trials.local,
        "shared": trials.shared,
        "discrepancy": trials.discrepancy,
        "shared_variance": trials.shared_variance,
        "covariance": trials.covariance,
        "best": trials.mixture_errors(best),
        "variance": trials.variances(0.5),
        "bias": 0.25 * trials.discrepancy,
    }
    for alpha in ALPHAS:
        errors = trials.mixture_errors(alpha)
        values |= {f"mixture {alpha}": errors, f"bias and variance {alpha}": errors}
    return values


def sure_interval(values):
    return confidence_interval(values, confidence=SURE)


def test_the_grid_has_forty_settings():
    assert len(set(GRID)) == 40


@pytest.mark.parametrize("place", range(len(GRID)))
def test_every_closed_form_is_within_three_percent_of_trials(place):
    """With 20,000 / d repeats the standard error of Var[f_v], the widest, is one percent."""
    problem = GRID[place]
    this, large = finite_sample_closed_form(problem), forms(closed_form(problem))
    trials = run_trials(problem, repeats=20_000 // problem.inputs.d, seed=place)
    values = measured(trials, this.best_alpha())
    for name, exact in forms(this).items():
        mean, low, high = sure_interval(values[name])
        assert low <= exact <= high, name
        assert exact == pytest.approx(mean, rel=CLOSE), name
        # For large N the form is off by (d + 1) / N, here more than a percent. The trials' own
        # error comes on top of the three percent.
        nearest = np.clip(large[name], low, high)
        assert large[name] == pytest.approx(nearest, rel=CLOSE), name


@pytest.mark.parametrize(("rho", "sigma"), [(0.5, 1.5), (0.1, 1.5), (0.06, 2.25), (0.02, 2.25)])
def test_closed_forms_hold_in_the_papers_own_experiment(rho, sigma):
    problem = paper(rho, sigma)
    best = finite_sample_closed_form(problem).best_alpha()
    trials = run_trials(problem, repeats=16, seed=1)
    for of in (closed_form(problem), finite_sample_closed_form(problem)):
        assert of.local_error() == pytest.approx(trials.local.mean(), rel=CLOSE)
        assert of.global_error() == pytest.approx(trials.shared.mean(), rel=CLOSE)
        assert of.best_error() == pytest.approx(trials.mixture_errors(best).mean(), rel=CLOSE)


@pytest.mark.parametrize("place", [0, 13, 27, 39])
def test_trials_find_the_best_mixture_where_the_closed_form_has_it(place):
    problem = GRID[place]
    interval = sure_interval(run_trials(problem, repeats=300, seed=place).best_alphas())
    assert interval.low <= finite_sample_closed_form(problem).best_alpha() <= interval.high


@pytest.mark.parametrize("n", [12, 16, 24, 40])
def test_with_few_examples_the_form_for_any_n_still_holds(n):
    problem = LinearProblem(normal_inputs(5), clients=4, n=n, rho=0.3, sigma=1.0)
    trials = run_trials(problem, repeats=6000, seed=n)
    this = finite_sample_closed_form(problem)
    values = measured(trials, this.best_alpha())
    for name, exact in forms(this).items():
        interval = sure_interval(values[name])
        assert interval.low <= exact <= interval.high, name
    assert closed_form(problem).local_error() < sure_interval(trials.local).low


def plain_errors(covariance, problem, generator):
    """One trial as a plain loop over clients, with a thousand test examples each.

    Inputs are correlated; least squares is run per client, and over the examples of all.
    """
    d = len(covariance)
    v = generator.random(d)
    teachers = [v + problem.rho * generator.standard_normal(d) for _ in range(problem.clients)]
    examples = [generator.multivariate_normal(np.zeros(d), covariance, problem.n) for _ in teachers]
    labels = [
        x @ u + problem.sigma * generator.standard_normal(problem.n)
        for x, u in zip(examples, teachers, strict=True)
    ]
    students = [np.linalg.lstsq(x, y, rcond=None)[0] for x, y in zip(examples, labels, strict=True)]
    together = np.linalg.lstsq(np.concatenate(examples), np.concatenate(labels), rcond=None)[0]
    tests = [generator.multivariate_normal(np.zeros(d), covariance, 1000) for _ in teachers]

    def error(models):
        return np.mean(
            [np.mean((x @ (w - u)) ** 2) for x, w, u in zip(tests, models, teachers, strict=True)]
        )

    return [
        error(students),
        error([together] * problem.clients),
        error([0.5 * student + 0.5 * together for student in students]),
    ]


def test_a_plain_loop_with_correlated_inputs_finds_the_same():
    covariance = np.array([[1.0, 0.6, 0.0], [0.6, 0.8, -0.3], [0.0, -0.3, 2.0]])
    problem = LinearProblem(correlated_inputs(covariance), clients=8, n=250, rho=0.2, sigma=1.5)
    generator = np.random.default_rng(0)
    errors = np.array([plain_errors(covariance, problem, generator) for _ in range(400)]).T
    of = finite_sample_closed_form(problem)
    exact = (of.local_error(), of.global_error(), of.mixture_error(0.5))
    for values, closed in zip(errors, exact, strict=True):
        interval = sure_interval(values)
        assert interval.low <= closed <= interval.high


def test_least_squares_over_all_examples_is_the_mean_of_local_models_where_examples_are_many():
    problem = LinearProblem(uniform_inputs(5), clients=10, n=1000, rho=0.1, sigma=1.5)
    at_once, mean = (
        run_trials(problem, repeats=400, weighting=weighting)
        for weighting in (gram_weights, equal_weights)
    )
    assert np.allclose(at_once.local, mean.local)
    assert at_once.shared.mean() == pytest.approx(mean.shared.mean(), rel=0.005)
    assert at_once.mixture_errors(0.5).mean() == pytest.approx(
        mean.mixture_errors(0.5).mean(), rel=0.005
    )


def test_the_same_seed_gives_the_same_trials_and_more_repeats_go_on_from_them():
    problem = LinearProblem(uniform_inputs(3), clients=4, n=20, rho=0.1, sigma=1.0)
    few, many = run_trials(problem, repeats=3, seed=5), run_trials(problem, repeats=6, seed=5)
    assert all(np.array_equal(one, other[:3]) for one, other in zip(few, many, strict=True))
    assert not np.allclose(few.local, run_trials(problem, repeats=3, seed=6).local)


def test_clients_drawn_in_chunks_are_clients_all_the_same(monkeypatch):
    problem = LinearProblem(normal_inputs(3), clients=7, n=20, rho=0.1, sigma=1.0)
    monkeypatch.setattr("liang2020.theory_trials._CHUNK_SIZE", 3 * 20 * 3)
    interval = sure_interval(run_trials(problem, repeats=2000).shared)
    assert interval.low <= finite_sample_closed_form(problem).global_error() <= interval.high


AMOUNTS = st.floats(1e-6, 1e6)
CLOSED_FORMS = st.builds(ClosedForm, AMOUNTS, AMOUNTS, st.integers(2, 10**6))
PROBLEMS = st.builds(
    lambda variances, clients, more, rho, sigma: LinearProblem(
        InputDistribution(tuple(variances)), clients, len(variances) + 2 + more, rho, sigma
    ),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30),
    st.integers(2, 10**6),
    st.integers(0, 10**6),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)


@given(PROBLEMS)
def test_where_clients_differ_and_labels_are_noisy_the_best_mixture_beats_both(problem):
    """The paper's Corollary 1; where one extreme is nearly best, rounding may make them equal."""
    for of in (
        closed_form(problem),
        finite_sample_closed_form(problem),
        published_closed_form(problem),
    ):
        over_local, over_shared = of.gains()
        assert over_local > 0
        assert over_shared > 0
        assert of.best_error() <= of.local_error() * (1 + 1e-12)
        assert of.best_error() <= of.global_error() * (1 + 1e-12)
        if 1e-6 < of.best_alpha() < 1 - 1e-6:
            assert of.best_error() < of.local_error()
            assert of.best_error() < of.global_error()


@given(CLOSED_FORMS)
def test_gains_are_what_is_left_of_the_errors(of):
    scale = of.within_variance + of.between_variance
    assert of.local_error() - of.gains()[0] == pytest.approx(of.best_error(), abs=1e-12 * scale)
    assert of.global_error() - of.gains()[1] == pytest.approx(of.best_error(), abs=1e-12 * scale)


@given(CLOSED_FORMS)
def test_the_derivative_is_zero_at_the_best_alpha_and_only_there(of):
    best, scale = of.best_alpha(), of.within_variance + of.between_variance
    smaller, larger = sorted((of.within_variance, of.between_variance))
    assert 0 < best < 1 or larger > 1e11 * smaller
    assert of.derivative(best) == pytest.approx(0, abs=1e-12 * scale)
    assert of.derivative(best - 0.1) < 0 < of.derivative(best + 0.1)


@given(CLOSED_FORMS, st.floats(0, 1))
def test_the_derivative_is_that_of_the_error(of, alpha):
    step, scale = 1e-3, of.within_variance + of.between_variance
    rise = of.mixture_error(alpha + step) - of.mixture_error(alpha - step)
    quotient = rise / (2 * step)  # exact for a parabola
    assert of.derivative(alpha) == pytest.approx(quotient, abs=1e-9 * scale)


@given(CLOSED_FORMS, st.floats(0, 1))
def test_no_mixture_is_better_than_the_best(of, alpha):
    tolerance = 1e-12 * (of.within_variance + of.between_variance)
    assert of.mixture_error(alpha) >= of.best_error() - tolerance
    assert of.mixture_error(of.best_alpha()) == pytest.approx(of.best_error(), abs=tolerance)


@given(CLOSED_FORMS, st.floats(0, 1))
def test_an_error_is_bias_and_variance(of, alpha):
    """Theorem 1 and Proposition 1 add up to Theorem 2, whose ends are Propositions 2 and 3."""
    assert of.bias(alpha) + of.variance(alpha) == pytest.approx(of.mixture_error(alpha), rel=1e-9)
    assert of.mixture_error(1.0) == pytest.approx(of.local_error())
    assert of.mixture_error(0.0) == pytest.approx(of.global_error())


@given(PROBLEMS)
@settings(max_examples=50)
def test_with_enough_examples_local_beats_shared(problem):
    this, enough = finite_sample_closed_form(problem), break_even_examples(problem)
    if abs(problem.n - enough) > 1e-6 * enough:
        local_is_better = this.local_error() < this.global_error()
        assert local_is_better == (problem.n > enough) == (this.best_alpha() > 0.5)


def test_the_papers_formulas_are_those_for_inputs_of_trace_one():
    problem = LinearProblem(unit_inputs(20), clients=100, n=2000, rho=0.1, sigma=1.5)
    assert problem.inputs.trace == pytest.approx(1)
    of = closed_form(problem)
    assert of == pytest.approx(published_closed_form(problem))
    assert of.best_alpha() == pytest.approx(0.1**2 / (0.1**2 + 20 / 2000 * 1.5**2))
    assert of.global_error() == pytest.approx(99 / 100 * 0.1**2 + 20 / (100 * 2000) * 1.5**2)


def test_traces_are_those_of_the_inputs():
    assert uniform_inputs(21).trace == pytest.approx(7)
    assert normal_inputs(20).trace == pytest.approx(20)
    inputs = uniform_inputs(2)
    x = inputs.sample(np.random.default_rng(0), (100_000, 2)) * np.sqrt(inputs.variances)
    assert -1 <= x.min() < -0.99 < 0.99 < x.max() <= 1
    assert (x**2).sum(1).mean() == pytest.approx(2 / 3, rel=0.01)


def test_the_papers_experiment_in_numbers():
    """Worked out by hand: d = 20, N = 2000, M = 100, x ~ U[-1, 1]^20, noise 2.25, rho = .06."""
    of = closed_form(paper(0.06, 2.25))
    assert of.best_alpha() == pytest.approx(0.322, abs=5e-4)
    assert [of.mixture_error(alpha) for alpha in (0.0, 0.4, 1.0)] == pytest.approx(
        [0.0243, 0.0171, 0.0506], abs=5e-5
    )


def test_the_shared_model_is_better_at_little_variance_only_under_the_noise_of_the_released_code():
    """The paper claims it for Figure 2(b), with sigma = 1.5 and rho = .06."""
    text, released = (finite_sample_closed_form(paper(0.06, sigma)) for sigma in (1.5, 1.5**2))
    assert text.local_error() < text.global_error()
    assert released.local_error() > released.global_error()
    trials = run_trials(paper(0.06, 1.5), repeats=20)
    assert confidence_interval(trials.shared - trials.local).low > 0


def test_the_papers_formula_misses_its_own_experiment():
    problem = paper(0.1, 1.5)
    measurement = confidence_interval(run_trials(problem, repeats=4).shared)
    assert published_closed_form(problem).global_error() < 0.2 * measurement.low
    assert closed_form(problem).global_error() == pytest.approx(measurement.mean, rel=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: uniform_inputs(0), "d is 0"),
        (lambda: normal_inputs(-2), "d is -2"),
        (lambda: InputDistribution(()), "at least one number"),
        (lambda: InputDistribution((1.0, 0.0)), "a variance of the inputs is 0"),
        (lambda: correlated_inputs([[1.0, 2.0], [2.0, 1.0]]), "a variance of the inputs is -1"),
        (lambda: InputDistribution((1.0, float("nan"))), "a variance of the inputs is nan"),
        (lambda: InputDistribution((1.0, 1e300)), r"a variance of the inputs is 1e\+300"),
        (lambda: correlated_inputs([[1.0, 0.5], [0.5]]), "the covariance is no table of numbers"),
        (lambda: correlated_inputs([[1.0, 0.5]]), r"shape \(1, 2\)"),
        (lambda: correlated_inputs([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (lambda: LinearProblem(uniform_inputs(3), 1, 10, 0.1, 1.0), "clients is 1; at least 2"),
        (lambda: LinearProblem(uniform_inputs(3), 2, 4, 0.1, 1.0), r"n is 4; at least d \+ 2 = 5"),
        (lambda: run_trials(paper(0.1, 1.5), repeats=1), "repeats is 1"),
        (lambda: run_trials(paper(0.1, 1.5), seed=-1), "seed is -1"),
        (
            lambda: run_trials(LinearProblem(uniform_inputs(100), 1000, 10_000, 0.1, 1.0)),
            "a trial would draw",
        ),
    ],
)
def test_a_problem_that_cannot_be_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def run(*arguments):
    """Exit code of the command in this process."""
    with pytest.raises(SystemExit) as stopped:
        main(["theory", *map(str, arguments)])
    return stopped.value.code


QUICK = ("--d", 4, "--clients", 5, "--n", 50, "--repeats", 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--d", 0), "d is 0"),
        (("--n", 21), "n is 21; at least d + 2 = 22"),
        (("--clients", 1), "clients is 1"),
        (("--rho", -1), "rho is -1; it is a standard deviation"),
        (("--rho", "nan"), "rho is nan"),
        (("--sigma", "inf"), "sigma is inf"),
        (("--rho", 0, "--sigma", 0), "rho is 0 and sigma 0, with squares of 0"),
        (("--repeats", 1), "repeats is 1; an interval needs at least 2"),
        (("--repeats", 10**8), "choose fewer, or no trials"),
        (("--seed", -1), "seed is -1"),
        (("--inputs", "uniforn"), "did you mean 'uniform'?"),
        (("--out", "curve.pdf"), "curve.pdf is neither .svg nor .png"),
        (("--d", "many"), "not a valid integer"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments, words, capsys):
    assert run(*arguments) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("glocal: ")
    assert "\n" not in message
    assert words in message


def test_a_picture_that_cannot_be_written_is_refused_before_the_trials(capsys, tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for place in ("folder.png", "file/curve.png"):
        assert run("--out", tmp_path / place) == 2
        output = capsys.readouterr()
        assert "cannot be written" in output.err
        assert not output.out


def test_the_command_says_what_to_keep_local(capsys):
    assert run("--repeats", 0, "--rho", 0.1) == 0
    printed = capsys.readouterr().out
    assert "Keep 75 % local" in printed
    assert "0.7477" in printed
    assert "would keep 31 % local" in printed
    assert "interval" not in printed


@pytest.mark.parametrize(
    ("option", "words"), [("--rho", "Keep nothing local"), ("--sigma", "Keep everything local")]
)
def test_without_spread_or_noise_one_extreme_is_best(option, words, capsys):
    assert run(*QUICK, option, 0) == 0
    assert words in capsys.readouterr().out


def test_inputs_of_trace_one_need_no_word_on_the_papers_formula(capsys):
    assert run("--repeats", 0, "--inputs", "unit") == 0
    assert "as printed" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize("repeats", [0, 5])
def test_the_command_draws_its_curve(kind, repeats, tmp_path, capsys):
    path = tmp_path / f"curve.{kind}"
    assert run(*QUICK[:-1], repeats, "--out", path) == 0
    assert f"drawn: {path}" in capsys.readouterr().out.replace("\n", " ")
    if kind == "svg":
        assert "keep" in path.read_text()
        assert ("standard deviation" in path.read_text()) == bool(repeats)


def test_the_papers_figures_have_six_panels_with_both_readings_of_the_noise(tmp_path, monkeypatch):
    drawn = []

    def save(figure, path, **options):
        drawn.append(figure)
        path.touch()

    def few_trials(problem, **options):
        return run_trials(small(problem), repeats=3)

    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr("liang2020.theory_figure.run_trials", few_trials)
    draw_theory(tmp_path / "theory.png")
    panels = drawn[0].axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        *(f"Figure 2({panel}): ρ = {rho}" for panel, rho in (("a", 0.1), ("b", 0.06))),
        *(f"Appendix: ρ = {rho}" for rho in (0.5, 0.1, 0.06, 0.02)),
    ]
    for axes in panels:
        assert len(axes.lines) == 4
        assert len(axes.get_legend_handles_labels()[1]) == 2
        assert sum("FillBetween" in type(part).__name__ for part in axes.collections) == 2


def small(problem):
    return LinearProblem(uniform_inputs(3), 4, 20, problem.rho, problem.sigma)


def test_the_same_trials_give_the_same_picture(tmp_path):
    problem = LinearProblem(uniform_inputs(3), clients=4, n=20, rho=0.1, sigma=1.0)
    result = TheoryResult(problem, run_trials(problem, repeats=3))
    one, other = (draw_mixture(result, tmp_path / name) for name in ("a.svg", "b.svg"))
    assert one.read_bytes() == other.read_bytes()


def test_the_page_shows_what_the_command_prints(capsys):
    command, shown = re.search(
        r"^\$ liang2020 theory (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    ).groups()
    assert run(*command.split()) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == [
        line.rstrip() for line in shown.splitlines()
    ]
