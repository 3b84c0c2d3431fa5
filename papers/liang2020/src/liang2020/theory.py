"""When to keep models local: linear models, in closed form and by trial.

This is section 4 and appendix A of Liang et al. 2020. Client m labels inputs x by its own teacher,
u_m = v + r_m with r_m ~ N(0, rho^2 I), plus noise of standard deviation sigma. It fits its local
model to N examples by least squares. The shared ("global") model is the mean of all local models. A
mixture is alpha * local + (1 - alpha) * shared. Errors are mean squared distances to the noise-free
targets u_m'x on new inputs; against noisy test labels, each would be higher by sigma^2.
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
_CHUNK_SIZE = 2**18  # numbers drawn at a time; they fit into a processor's cache
_MAX_PER_TRIAL, _MAX_TOTAL = 10**8, 5 * 10**10  # numbers: 1 or 2 GB, and about ten minutes
_MAX_DIMENSION, _MAX_VALUE = 10**6, 10**12


def sample_uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Numbers of mean 0 and variance 1, uniform between -sqrt(3) and sqrt(3)."""
    return generator.uniform(-sqrt(3), sqrt(3), shape)


def sample_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Numbers of mean 0 and variance 1, normal."""
    return generator.standard_normal(shape)


@dataclass(frozen=True)
class InputDistribution:
    """Inputs of d independent numbers, with mean 0 and these variances.

    The variances are the eigenvalues of S = E[xx']. Correlated inputs need nothing more: the
    distribution of r_m is the same in all directions, so the axes of S can be the coordinates.
    """

    variances: tuple[float, ...]
    sample: InputSampler = sample_normal

    def __post_init__(self) -> None:
        if not self.variances:
            raise InputError("theory: d is 0; inputs need at least one number")
        for variance in self.variances:
            if not 0 < variance <= _MAX_VALUE:
                raise InputError(
                    f"theory: a variance of the inputs is {variance:g}; "
                    f"each must be above 0, and at most {_MAX_VALUE:.0e}"
                )

    @property
    def d(self) -> int:
        """The dimension of an input."""
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
            f"theory: the covariance is no table of numbers ({describe_error(error)}); "
            "a matrix (d, d) was expected"
        ) from error
    if not _is_symmetric(matrix):
        raise InputError(
            f"theory: the covariance has shape {matrix.shape}; "
            "a symmetric matrix (d, d) of finite numbers was expected"
        )
    return InputDistribution(tuple(np.linalg.eigvalsh(matrix).tolist()))


def _is_symmetric(matrix: Floats) -> bool:
    """Whether it is a square, finite, symmetric matrix."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return False
    return bool(np.isfinite(matrix).all()) and np.allclose(matrix, matrix.T)


def _isotropic(d: int, *, trace: float, sample: InputSampler = sample_normal) -> InputDistribution:
    """Inputs of d numbers, all with the same variance."""
    if not 1 <= d <= _MAX_DIMENSION:
        raise InputError(f"theory: d is {d}; inputs have from 1 to {_MAX_DIMENSION:,} numbers")
    return InputDistribution((trace / d,) * d, sample)


@dataclass(frozen=True)
class LinearProblem:
    """M clients with N examples each.

    rho is the standard deviation of their teachers' weights, sigma that of the label noise.
    """

    inputs: InputDistribution
    clients: int
    n: int
    rho: float
    sigma: float

    def __post_init__(self) -> None:
        if not 2 <= self.clients <= _MAX_VALUE:
            raise InputError(
                f"theory: clients is {self.clients}; "
                f"at least 2 and at most {_MAX_VALUE:.0e} were expected"
            )
        self._require_examples()
        for name, deviation in (("rho", self.rho), ("sigma", self.sigma)):
            if not 0 <= deviation <= _MAX_VALUE:
                raise InputError(
                    f"theory: {name} is {deviation:g}; "
                    f"it is a standard deviation, from 0 to {_MAX_VALUE:.0e}"
                )
        if not self.rho**2 + self.sigma**2:
            given = f"rho is {self.rho:g} and sigma {self.sigma:g}, with squares of 0"
            raise InputError(f"theory: {given}, so that every model is right; raise one of them")

    def _require_examples(self) -> None:
        """Refuse so few examples that errors have no mean."""
        least = self.inputs.d + 2
        if not least <= self.n <= _MAX_VALUE:
            raise InputError(
                f"theory: n is {self.n}; "
                f"at least d + 2 = {least} and at most {_MAX_VALUE:.0e} examples were expected"
            )


class ClosedForm(NamedTuple):
    """The paper's results, as functions of the three numbers on which all of them depend.

    >>> ClosedForm(within_variance=0.02, between_variance=0.06, clients=100).best_alpha()
    0.75
    """

    within_variance: float  # d sigma^2 / N: the error that label noise causes in a local model
    between_variance: float  # rho^2 tr S: the distance of a client's teacher from v
    clients: int

    def local_error(self) -> float:
        """Proposition 2: all local, d sigma^2 / N."""
        return self.within_variance

    def global_error(self) -> float:
        """Proposition 3: all shared, (M - 1) / M rho^2 tr S + d sigma^2 / (M N)."""
        return self.discrepancy() + self.shared_variance()

    def discrepancy(self) -> float:
        """Proposition 1, delta^2: the shared model's error without noise, (M - 1) / M rho^2 tr S.

        The appendix has it as its first corollary.
        """
        return (self.clients - 1) / self.clients * self.between_variance

    def shared_variance(self) -> float:
        """Var[f_v], the shared model's variance, and Cov[f_v, f_u]: d sigma^2 / (M N).

        Both are in the appendix, in the proof of Theorem 2.
        """
        return self.within_variance / self.clients

    def bias(self, alpha: Alpha) -> Alpha:
        """Theorem 1 and Proposition 1, b^2 = (1 - alpha)^2 delta^2."""
        return (1 - alpha) ** 2 * self.discrepancy()

    def variance(self, alpha: Alpha) -> Alpha:
        """Theorem 1, Var[f] = (1 - alpha)^2 Var[f_v] + alpha^2 Var[f_u] + 2 alpha (1 - alpha) Cov.

        The appendix has it in its first corollary. Cov equals Var[f_v].
        """
        shared = (1 - alpha) ** 2 + 2 * alpha * (1 - alpha)
        return shared * self.shared_variance() + alpha**2 * self.within_variance

    def mixture_error(self, alpha: Alpha) -> Alpha:
        """Theorem 2, with a = d sigma^2 / N and b = rho^2 tr S.

        alpha^2 a + (1 - alpha)^2 (M - 1) / M b + (1 - alpha^2) a / M
        """
        return (
            alpha**2 * self.within_variance
            + (1 - alpha) ** 2 * self.discrepancy()
            + (1 - alpha**2) * self.shared_variance()
        )

    def derivative(self, alpha: Alpha) -> Alpha:
        """The derivative of the mixture's error with respect to alpha."""
        of_variance = 2 * alpha * (self.within_variance - self.shared_variance())
        return of_variance - 2 * (1 - alpha) * self.discrepancy()

    def best_alpha(self) -> float:
        """Corollary 1: alpha* = rho^2 tr S / (rho^2 tr S + d sigma^2 / N)."""
        return self.between_variance / (self.between_variance + self.within_variance)

    def best_error(self) -> float:
        """Theorem 2 at alpha*: (M - 1) / M ab / (a + b) + a / M, with a and b as there."""
        others = (self.clients - 1) / self.clients
        return others * self.within_variance * self.best_alpha() + self.shared_variance()

    def gains(self) -> tuple[float, float]:
        """Corollary 1: the error of all local, and of all shared, minus that of the best mixture.

        Both are above 0 where clients differ and labels are noisy.
        """
        others = (self.clients - 1) / self.clients
        total = self.within_variance + self.between_variance
        over_local = others * self.within_variance**2 / total
        over_shared = others * self.between_variance**2 / total
        return over_local, over_shared


def closed_form(problem: LinearProblem) -> ClosedForm:
    """The paper's results for any inputs, to first order in d / N, which it assumes to be small."""
    return ClosedForm(
        problem.inputs.d * problem.sigma**2 / problem.n,
        problem.rho**2 * problem.inputs.trace,
        problem.clients,
    )


def finite_sample_closed_form(problem: LinearProblem) -> ClosedForm:
    """The same at any N, by E[(X'X)^-1] = S^-1 / (N - d - 1).

    It is exact for normal inputs and a shared model with `equal_weights`.
    """
    d = problem.inputs.d
    return ClosedForm(
        d * problem.sigma**2 / (problem.n - d - 1),
        problem.rho**2 * problem.inputs.trace,
        problem.clients,
    )


def published_closed_form(problem: LinearProblem) -> ClosedForm:
    """The paper's results as printed, without tr S; they are right for inputs with tr S = 1."""
    within_variance = problem.inputs.d * problem.sigma**2 / problem.n
    return ClosedForm(within_variance, problem.rho**2, problem.clients)


def break_even_examples(problem: LinearProblem) -> float:
    """The number of examples at which a local model is as good as the shared one: alpha* = 1/2."""
    d, between_variance = problem.inputs.d, problem.rho**2 * problem.inputs.trace
    if not between_variance:
        return inf
    return d + 1 + d * problem.sigma**2 / between_variance


class Trials(NamedTuple):
    """Errors in trials with random data (repeats,), each a mean over clients.

    f_u is the local model and f_v the shared one.
    """

    local: Floats  # E(f_u), which is Var[f_u] too, as a local model has no bias
    shared: Floats  # E(f_v)
    cross_error: Floats  # the mean product of the errors of the two models' predictions
    discrepancy: Floats  # delta^2: of the shared model, from labels without noise
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
        """The alpha with the lowest mean error, plus each trial's influence on it (repeats,).

        This is the delta method: alpha is a ratio of two means over trials. The mean of the
        returned numbers is that alpha, and their spread gives its confidence interval.
        """
        upper = self.shared - self.cross_error
        lower = self.local + self.shared - 2 * self.cross_error
        alpha = upper.mean() / lower.mean()
        return np.asarray(alpha + (upper - alpha * lower) / lower.mean(), dtype=np.float64)


def equal_weights(grams: Floats) -> Floats:
    """Equal weights for all local models (d,), as in FedAvg and the paper's proofs."""
    return np.broadcast_to(np.eye(grams.shape[-1]), grams.shape)


def gram_weights(grams: Floats) -> Floats:
    """X'X (d, d) as weights of local models (d,).

    This gives least squares over all clients' examples, the paper's equation 1.
    """
    return grams


def run_trials(
    problem: LinearProblem,
    *,
    repeats: int = 50,
    seed: int = 0,
    weighting: Weighting = equal_weights,
) -> Trials:
    """Draw teachers, inputs and labels, fit the models, and measure their errors, per trial."""
    per_trial = problem.clients * problem.n * problem.inputs.d
    _require_trials(per_trial, repeats, seed)
    batch_size = max(1, _CHUNK_SIZE // per_trial)
    num_batches = -(-repeats // batch_size)
    batches = []
    for batch in range(num_batches):
        generator = make_rng(seed, "theory", batch)
        batches.append(_run_trial_batch(problem, generator, batch_size, weighting=weighting))
    fields = np.concatenate(batches, axis=1)
    return Trials(*(values[:repeats] for values in fields))


def _require_trials(per_trial: int, repeats: int, seed: int) -> None:
    """Refuse trials without an interval, without a seed, or with too many numbers to draw."""
    if repeats < 2:
        raise InputError(f"theory: repeats is {repeats}; an interval needs at least 2")
    if seed < 0:
        raise InputError(f"theory: seed is {seed}; it may not be negative")
    total = per_trial * repeats
    if per_trial > _MAX_PER_TRIAL or total > _MAX_TOTAL:
        raise InputError(
            f"theory: a trial would draw {per_trial:.1e} numbers, "
            f"all {repeats} of them {total:.1e}; at most {_MAX_PER_TRIAL:.0e} and "
            f"{_MAX_TOTAL:.0e} are drawn; choose fewer, or no trials"
        )


def _run_trial_batch(
    problem: LinearProblem,
    generator: np.random.Generator,
    batch_size: int,
    *,
    weighting: Weighting,
) -> Floats:
    """The fields of a batch of trials (fields, trials).

    Examples are drawn for a chunk of clients at a time. Local models and teachers of all clients
    are kept; of the examples only X'X is, summed over clients.
    """
    d = problem.inputs.d
    common = generator.random((batch_size, 1, d))
    own = problem.rho * generator.standard_normal((batch_size, problem.clients, d))
    teachers = common + own
    students = np.empty_like(teachers)
    weights, sums = np.zeros((batch_size, d, d)), np.zeros((batch_size, d, 2))
    chunk_size = max(1, _CHUNK_SIZE // (batch_size * problem.n * d))
    for start in range(0, problem.clients, chunk_size):
        chunk = slice(start, start + chunk_size)
        grams, students[:, chunk] = _fit_local_models(problem, teachers[:, chunk], generator)
        weight = weighting(grams)
        weights += weight.sum(1)
        # The sums of two kinds of local models: as trained, and as trained without label noise.
        # Least squares recovers the teacher from labels without noise.
        models = np.stack([students[:, chunk], teachers[:, chunk]], axis=-1)
        sums += (weight @ models).sum(1)
    shared, noiseless = np.moveaxis(np.linalg.solve(weights, sums)[:, None], -1, 0)
    return _trial_errors(problem, students - teachers, shared - teachers, shared - noiseless)


def _fit_local_models(
    problem: LinearProblem, teachers: Floats, generator: np.random.Generator
) -> tuple[Floats, Floats]:
    """X'X (trials, clients, d, d) and local models (trials, clients, d), from new examples.

    Examples are columns, (trials, clients, d, n): d may be very small, and short rows are slow.
    """
    shape, d, n = teachers.shape[:2], problem.inputs.d, problem.n
    deviations = np.sqrt(problem.inputs.variances)[:, None]
    x = problem.inputs.sample(generator, (*shape, d, n)) * deviations
    noise = problem.sigma * generator.standard_normal((*shape, 1, n))
    y = teachers[:, :, None] @ x + noise
    grams = x @ x.swapaxes(2, 3)
    models = np.linalg.solve(grams, x @ y.swapaxes(2, 3))[..., 0]
    return grams, np.asarray(models, dtype=np.float64)


def _trial_errors(problem: LinearProblem, local: Floats, shared: Floats, noise: Floats) -> Floats:
    """The fields of trials (fields, trials).

    `local` and `shared` are model minus teacher (trials, clients, d). `noise` is the part of the
    shared model that label noise causes (trials, 1, d).
    """
    variances = np.asarray(problem.inputs.variances)
    noiseless = shared - noise
    pairs = (
        (local, local),
        (shared, shared),
        (local, shared),
        (noiseless, noiseless),
        (noise, noise),
        (local, noise),
    )
    return np.stack([_mean_product(one, other, variances) for one, other in pairs])


def _mean_product(one: Floats, other: Floats, variances: Floats) -> Floats:
    """Mean over clients of one' S other (trials,).

    That is the mean, over new inputs, of the product of two linear models' predictions.
    """
    return np.asarray(((one * other) @ variances).mean(1), dtype=np.float64)
