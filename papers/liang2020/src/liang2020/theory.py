"""When to keep models local: linear models, in closed form.

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

Floats = npt.NDArray[np.float64]
Alpha = TypeVar("Alpha", float, Floats)
InputSampler = Callable[[np.random.Generator, tuple[int, ...]], Floats]
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
