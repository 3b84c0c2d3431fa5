"""When to keep models local: linear teachers and students, in closed form and by trial (Liang et al. 2020, section 4, appendix A).

Device m labels inputs x by its own teacher, u_m = v + r_m with r_m ~ N(0, rho^2 I), under noise of deviation sigma. It fits its
local model by least squares to N examples; the shared ("global") model is what all devices find together. A mixture is
alpha * local + (1 - alpha) * shared. Errors are squared distances to the noise-free targets u_m'x on fresh inputs; the noise of
labels in a test, sigma^2, would come on top of each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError, describe_error
from glocal.core.sampling import make_rng

Floats = npt.NDArray[np.float64]
Alpha = TypeVar("Alpha", float, Floats)
InputSampler = Callable[[np.random.Generator, tuple[int, ...]], Floats]
Weighting = Callable[[Floats], Floats]
_CHUNK_SIZE = 2**18  # numbers drawn at a time, which fit into a processor's cache
_MAX_PER_TRIAL, _MAX_TOTAL = 10**8, 5 * 10**10  # numbers: a GB or two, and some ten minutes
_MAX_DIMENSION, _MAX_VALUE = 10**6, 10**12


def sample_uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Numbers of mean 0 and variance 1, uniform between -sqrt(3) and sqrt(3)."""
    return generator.uniform(-sqrt(3), sqrt(3), shape)


def sample_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Numbers of mean 0 and variance 1, normal."""
    return generator.standard_normal(shape)


@dataclass(frozen=True)
class InputDistribution:
    """What devices see: d independent numbers of mean 0 and these variances, the eigenvalues of S = E[xx'].

    Correlated inputs need no more than that: r_m looks the same from every side, so that one may always look along the axes of S.
    """

    variances: tuple[float, ...]
    sample: InputSampler = sample_normal

    def __post_init__(self) -> None:
        if not self.variances:
            raise InputError("theory: d is 0; inputs need at least one number")
        for variance in self.variances:
            if not 0 < variance <= _MAX_VALUE:
                raise InputError(
                    f"theory: a variance of the inputs is {variance:g}; each must be above 0, and at most {_MAX_VALUE:.0e}"
                )

    @property
    def d(self) -> int:
        """How many numbers an input has."""
        return len(self.variances)

    @property
    def trace(self) -> float:
        """Tr S, the mean squared length of an input."""
        return sum(self.variances)


def uniform_inputs(d: int) -> InputDistribution:
    """U[-1, 1]^d, as in the paper's experiments: tr S = d / 3."""
    return _isotropic(d, trace=d / 3, sample=sample_uniform)


def normal_inputs(d: int) -> InputDistribution:
    """N(0, I), as in the paper's proofs: tr S = d."""
    return _isotropic(d, trace=d)


def unit_inputs(d: int) -> InputDistribution:
    """N(0, I / d), for which the paper's formulas hold as they are printed: tr S = 1."""
    return _isotropic(d, trace=1)


def correlated_inputs(covariance: npt.ArrayLike) -> InputDistribution:
    """N(0, S) for any covariance S (d, d).

    >>> round(correlated_inputs([[2.0, 1.0], [1.0, 2.0]]).trace, 6)
    4.0
    """
    try:
        matrix = np.asarray(covariance, dtype=np.float64)
    except ValueError as error:
        raise InputError(
            f"theory: the covariance is no table of numbers ({describe_error(error)}); a matrix (d, d) was expected"
        ) from error
    if (
        matrix.ndim != 2
        or matrix.shape[0] != matrix.shape[1]
        or not np.isfinite(matrix).all()
        or not np.allclose(matrix, matrix.T)
    ):
        raise InputError(
            f"theory: the covariance has shape {matrix.shape}; a symmetric matrix (d, d), finite, was expected"
        )
    return InputDistribution(tuple(np.linalg.eigvalsh(matrix).tolist()))


def _isotropic(d: int, *, trace: float, sample: InputSampler = sample_normal) -> InputDistribution:
    """Inputs of so many numbers, all with the same variance."""
    if not 1 <= d <= _MAX_DIMENSION:
        raise InputError(f"theory: d is {d}; inputs have from 1 to {_MAX_DIMENSION:,} numbers")
    return InputDistribution((trace / d,) * d, sample)


@dataclass(frozen=True)
class LinearProblem:
    """M devices with N examples each; rho is the deviation of their teachers' weights, sigma that of the labels' noise."""

    inputs: InputDistribution
    clients: int
    n: int
    rho: float
    sigma: float

    def __post_init__(self) -> None:
        if not 2 <= self.clients <= _MAX_VALUE:
            raise InputError(
                f"theory: clients is {self.clients}; at least 2 can share, at most {_MAX_VALUE:.0e} are meant"
            )
        if not self.inputs.d + 2 <= self.n <= _MAX_VALUE:
            least = f"d + 2 = {self.inputs.d + 2}"
            raise InputError(
                f"theory: n is {self.n}; from {least} examples on errors have a mean, at most {_MAX_VALUE:.0e} are meant"
            )
        for name, deviation in (("rho", self.rho), ("sigma", self.sigma)):
            if not 0 <= deviation <= _MAX_VALUE:
                raise InputError(
                    f"theory: {name} is {deviation:g}; it is a standard deviation, from 0 to {_MAX_VALUE:.0e}"
                )
        if not self.rho**2 + self.sigma**2:
            given = f"rho is {self.rho:g} and sigma {self.sigma:g}, with squares of 0"
            raise InputError(f"theory: {given}, so that every model is right; raise one of them")


class ClosedForm(NamedTuple):
    """The paper's results, by the three numbers that all of them come down to.

    >>> ClosedForm(within_variance=0.02, between_variance=0.06, clients=100).best_alpha()
    0.75
    """

    within_variance: float  # d sigma^2 / N: what noise does to a device that learns alone
    between_variance: float  # rho^2 tr S: how far a device's teacher is from the mean of very many
    clients: int

    def local_error(self) -> float:
        """Proposition 2: all local, d sigma^2 / N."""
        return self.within_variance

    def global_error(self) -> float:
        """Proposition 3: all shared, (M - 1) / M rho^2 tr S + d sigma^2 / (M N)."""
        return self.discrepancy() + self.shared_variance()

    def discrepancy(self) -> float:
        """Proposition 1, delta^2: what sharing misses without any noise, (M - 1) / M rho^2 tr S (appendix, first corollary)."""
        return (self.clients - 1) / self.clients * self.between_variance

    def shared_variance(self) -> float:
        """Var[f_v], what noise does to the shared model, and Cov[f_v, f_u]: d sigma^2 / (M N) (appendix, proof of Theorem 2)."""
        return self.within_variance / self.clients

    def bias(self, alpha: Alpha) -> Alpha:
        """Theorem 1 and Proposition 1, b^2 = (1 - alpha)^2 delta^2."""
        return (1 - alpha) ** 2 * self.discrepancy()

    def variance(self, alpha: Alpha) -> Alpha:
        """Theorem 1, Var[f] = (1 - alpha)^2 Var[f_v] + alpha^2 Var[f_u] + 2 alpha (1 - alpha) Cov (appendix, first corollary)."""
        return (
            (1 - alpha) ** 2 + 2 * alpha * (1 - alpha)
        ) * self.shared_variance() + alpha**2 * self.within_variance

    def mixture_error(self, alpha: Alpha) -> Alpha:
        """Theorem 2: alpha^2 d sigma^2 / N + (1 - alpha)^2 (M - 1) / M rho^2 tr S + (1 - alpha^2) d sigma^2 / (M N)."""
        return (
            alpha**2 * self.within_variance
            + (1 - alpha) ** 2 * self.discrepancy()
            + (1 - alpha**2) * self.shared_variance()
        )

    def derivative(self, alpha: Alpha) -> Alpha:
        """The derivative of that by alpha."""
        return (
            2 * alpha * (self.within_variance - self.shared_variance())
            - 2 * (1 - alpha) * self.discrepancy()
        )

    def best_alpha(self) -> float:
        """Corollary 1: alpha* = rho^2 tr S / (rho^2 tr S + d sigma^2 / N)."""
        return self.between_variance / (self.between_variance + self.within_variance)

    def best_error(self) -> float:
        """Theorem 2 at alpha*: with a = d sigma^2 / N and b = rho^2 tr S it is (M - 1) / M ab / (a + b) + a / M."""
        others = (self.clients - 1) / self.clients
        return others * self.within_variance * self.best_alpha() + self.shared_variance()

    def gains(self) -> tuple[float, float]:
        """Corollary 1: by how much the best mixture beats all local and all shared; above 0 where there is spread and noise."""
        others = (self.clients - 1) / self.clients
        return others * self.within_variance**2 / (
            self.within_variance + self.between_variance
        ), others * self.between_variance**2 / (self.within_variance + self.between_variance)


def closed_form(problem: LinearProblem) -> ClosedForm:
    """The paper's results for any inputs, to first order in d / N, which the paper takes to be small."""
    return ClosedForm(
        problem.inputs.d * problem.sigma**2 / problem.n,
        problem.rho**2 * problem.inputs.trace,
        problem.clients,
    )


def finite_sample_closed_form(problem: LinearProblem) -> ClosedForm:
    """The same at any N, by E[(X'X)^-1] = S^-1 / (N - d - 1): exact where inputs are normal and the shared model is `equal_weights`."""
    d = problem.inputs.d
    return ClosedForm(
        d * problem.sigma**2 / (problem.n - d - 1),
        problem.rho**2 * problem.inputs.trace,
        problem.clients,
    )


def published_closed_form(problem: LinearProblem) -> ClosedForm:
    """The paper's results as they are printed, without tr S; they are right for inputs with tr S = 1."""
    return ClosedForm(
        problem.inputs.d * problem.sigma**2 / problem.n, problem.rho**2, problem.clients
    )


def break_even_examples(problem: LinearProblem) -> float:
    """From how many examples a device on its local model does as well alone as on the shared one: where alpha* is a half."""
    d, spread = problem.inputs.d, problem.rho**2 * problem.inputs.trace
    return d + 1 + d * problem.sigma**2 / spread if spread else inf


class Trials(NamedTuple):
    """What came of worlds drawn at random, each a mean over devices (repeats,); f_u is the local model and f_v the shared one."""

    local: Floats  # E(f_u), which is Var[f_u] too: a local model has no bias
    shared: Floats  # E(f_v)
    cross_error: Floats  # of the two models' misses
    discrepancy: Floats  # delta^2: of the shared model, had there been no noise in the labels
    shared_variance: Floats  # Var[f_v]
    covariance: Floats  # Cov[f_v, f_u]

    def mixture_errors(self, alpha: float) -> Floats:
        """The error of a mixture, trial by trial."""
        return (
            alpha**2 * self.local
            + (1 - alpha) ** 2 * self.shared
            + 2 * alpha * (1 - alpha) * self.cross_error
        )

    def variances(self, alpha: float) -> Floats:
        """Var[f] of a mixture, trial by trial."""
        return (
            alpha**2 * self.local
            + (1 - alpha) ** 2 * self.shared_variance
            + 2 * alpha * (1 - alpha) * self.covariance
        )

    def best_alphas(self) -> Floats:
        """The alpha with the lowest mean error, and each trial's pull on it: their mean is that alpha (delta method)."""
        upper, lower = (
            self.shared - self.cross_error,
            self.local + self.shared - 2 * self.cross_error,
        )
        alpha = upper.mean() / lower.mean()
        return np.asarray(alpha + (upper - alpha * lower) / lower.mean(), dtype=np.float64)


def equal_weights(grams: Floats) -> Floats:
    """Local models (d,) weigh the same, as in FedAvg and the paper's proofs."""
    return np.broadcast_to(np.eye(grams.shape[-1]), grams.shape)


def gram_weights(grams: Floats) -> Floats:
    """Local models (d,) weigh by X'X (d, d), which gives least squares over all devices' examples: the paper's equation 1."""
    return grams


def run_trials(
    problem: LinearProblem,
    *,
    repeats: int = 50,
    seed: int = 0,
    weighting: Weighting = equal_weights,
) -> Trials:
    """Draw teachers, inputs and labels, fit the models, and measure them against the teachers, so many times."""
    drawn = problem.clients * problem.n * problem.inputs.d
    if repeats < 2:
        raise InputError(f"theory: repeats is {repeats}; an interval needs at least 2")
    if seed < 0:
        raise InputError(f"theory: seed is {seed}; it may not be negative")
    if drawn > _MAX_PER_TRIAL or drawn * repeats > _MAX_TOTAL:
        much = (
            f"a trial would draw {drawn:.1e} numbers, all {repeats} of them {drawn * repeats:.1e}"
        )
        raise InputError(
            f"theory: {much}; at most {_MAX_PER_TRIAL:.0e} and {_MAX_TOTAL:.0e} are drawn; choose fewer, or no trials"
        )
    side_by_side = max(1, _CHUNK_SIZE // drawn)
    batches = range(-(-repeats // side_by_side))
    found = [
        _run_trial_batch(
            problem, make_rng(seed, "theory", batch), side_by_side, weighting=weighting
        )
        for batch in batches
    ]
    return Trials(*(values[:repeats] for values in np.concatenate(found, axis=1)))


def _run_trial_batch(
    problem: LinearProblem,
    generator: np.random.Generator,
    side_by_side: int,
    *,
    weighting: Weighting,
) -> Floats:
    """The fields of so many trials (fields, trials): every device's models and teacher, some devices at a time."""
    d = problem.inputs.d
    teachers = generator.random((side_by_side, 1, d)) + problem.rho * generator.standard_normal(
        (side_by_side, problem.clients, d)
    )
    students, weights, sums = (
        np.empty_like(teachers),
        np.zeros((side_by_side, d, d)),
        np.zeros((side_by_side, d, 2)),
    )
    step = max(1, _CHUNK_SIZE // (side_by_side * problem.n * d))
    for start in range(0, problem.clients, step):
        block = slice(start, start + step)
        grams, students[:, block] = _fit_local_models(problem, teachers[:, block], generator)
        weight = weighting(grams)
        weights += weight.sum(1)
        # once what was learnt, and once what would have been learnt from labels without noise
        sums += (weight @ np.stack([students[:, block], teachers[:, block]], axis=-1)).sum(1)
    shared, noiseless = np.moveaxis(np.linalg.solve(weights, sums)[:, None], -1, 0)
    return _trial_errors(problem, students - teachers, shared - teachers, shared - noiseless)


def _fit_local_models(
    problem: LinearProblem, teachers: Floats, generator: np.random.Generator
) -> tuple[Floats, Floats]:
    """Some devices' X'X (trials, devices, d, d) and local models (trials, devices, d), learnt from fresh examples."""
    shape, d = teachers.shape[:2], problem.inputs.d
    # examples stand side by side, (trials, devices, d, n): d may be very small, and short rows are slow
    x = (
        problem.inputs.sample(generator, (*shape, d, problem.n))
        * np.sqrt(problem.inputs.variances)[:, None]
    )
    y = teachers[:, :, None] @ x + problem.sigma * generator.standard_normal((*shape, 1, problem.n))
    grams = x @ x.swapaxes(2, 3)
    return grams, np.asarray(np.linalg.solve(grams, x @ y.swapaxes(2, 3))[..., 0], dtype=np.float64)


def _trial_errors(problem: LinearProblem, local: Floats, shared: Floats, noise: Floats) -> Floats:
    """Fields of trials, from what models miss the teachers by (trials, devices, d) and the shared one's noise (trials, 1, d)."""

    def product(one: Floats, other: Floats) -> Floats:
        """Mean over devices of one'S other, which is the mean over fresh inputs of the product of what they predict."""
        return np.asarray(
            ((one * other) @ np.asarray(problem.inputs.variances)).mean(1), dtype=np.float64
        )

    without = shared - noise
    pairs = (
        (local, local),
        (shared, shared),
        (local, shared),
        (without, without),
        (noise, noise),
        (local, noise),
    )
    return np.stack([product(*pair) for pair in pairs])
