"""Trials of the linear theory: random data, fitted models, and their errors (Liang et al. 2020)."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from glocal.core.errors import InputError
from glocal.core.sampling import make_rng
from liang2020.theory import Floats, LinearProblem

Weighting = Callable[[Floats], Floats]
_CHUNK_SIZE = 2**18  # numbers drawn at a time; they fit into a processor's cache
_MAX_PER_TRIAL, _MAX_TOTAL = 10**8, 5 * 10**10  # numbers: 1 or 2 GB, and about ten minutes


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
    """The fields of a batch of trials (fields, trials)."""
    teachers = _draw_teachers(problem, generator, batch_size)
    students = np.empty_like(teachers)
    d = problem.inputs.d
    weights, sums = np.zeros((batch_size, d, d)), np.zeros((batch_size, d, 2))
    # Examples are drawn for a chunk of clients at a time; only X'X is kept, summed over clients.
    for chunk in _chunks(problem, batch_size):
        grams, students[:, chunk] = _fit_local_models(problem, teachers[:, chunk], generator)
        weight = weighting(grams)
        weights += weight.sum(1)
        # The sums of two kinds of local models: as trained, and as trained without label noise.
        # Least squares recovers the teacher from labels without noise.
        models = np.stack([students[:, chunk], teachers[:, chunk]], axis=-1)
        sums += (weight @ models).sum(1)
    shared, noiseless = np.moveaxis(np.linalg.solve(weights, sums)[:, None], -1, 0)
    return _trial_errors(problem, students - teachers, shared - teachers, shared - noiseless)


def _draw_teachers(
    problem: LinearProblem, generator: np.random.Generator, batch_size: int
) -> Floats:
    """The teachers of all clients (trials, clients, d): v, which is uniform, plus r_m."""
    common = generator.random((batch_size, 1, problem.inputs.d))
    own = generator.standard_normal((batch_size, problem.clients, problem.inputs.d))
    return np.asarray(common + problem.rho * own, dtype=np.float64)


def _chunks(problem: LinearProblem, batch_size: int) -> list[slice]:
    """Slices of clients whose examples are drawn at once."""
    numbers_per_client = batch_size * problem.n * problem.inputs.d
    size = max(1, _CHUNK_SIZE // numbers_per_client)
    return [slice(start, start + size) for start in range(0, problem.clients, size)]


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
