"""Between-client and within-client variance of updates, layer by layer.

Each client sends two updates, A_m and B_m, trained on two halves of its data. An update is a mean
that is particular to the client, plus noise. The two halves agree on the mean and differ by noise.
So, over M clients and without bias:

- between-client variance b: the sum of <A_m - mean A, B_m - mean B>, divided by M - 1,
- within-client variance a, of an update on all of a client's data: the mean of
  ||A_m - B_m||^2 / 4.

Then alpha* = b / (a + b) says how local to be (Liang et al. 2020, Corollary 1).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core import trees
from glocal.core.trees import Params

Floats = npt.NDArray[np.float64]
_NORMAL = 1.96  # quantile of a 95 % interval


class Variances(NamedTuple):
    """Variances of one layer or of all, and alpha* with its 95 % interval by the jackknife."""

    within_client: float
    between_client: float
    alpha: float
    low: float
    high: float


class _Products(NamedTuple):
    """Of one layer: <A_m, B_n> (clients, clients), and ||A_m - B_m||^2 / 4 (clients,)."""

    inner: Floats
    noise: Floats


def estimate_variances(
    first: Params, second: Params, layers: Mapping[str, Sequence[str]]
) -> dict[str, Variances]:
    """Variances from the updates of the two halves (clients, ...).

    `layers` has the names of each layer's tensors. The entry "all" is over all layers.
    """
    trees.require_same_names(second, first, "variances")
    products = {layer: _products(first, second, names) for layer, names in layers.items()}
    products["all"] = _Products(
        np.sum([layer.inner for layer in products.values()], 0),
        np.sum([layer.noise for layer in products.values()], 0),
    )
    return {layer: _variances(product) for layer, product in products.items()}


def _products(first: Params, second: Params, names: Sequence[str]) -> _Products:
    inner, noise = 0.0, 0.0
    for name in names:
        a, b = (tree[name].double().flatten(1).cpu().numpy() for tree in (first, second))
        inner, noise = inner + a @ b.T, noise + ((a - b) ** 2).sum(1) / 4
    return _Products(np.asarray(inner), np.asarray(noise))


def _variances(products: _Products) -> Variances:
    """The estimates, with an interval from leaving out one client at a time."""
    within, between = _within_and_between(products)
    count = len(products.noise)
    alpha, margin = _alpha(within, between), 1.0
    if count > 2:
        alphas = [_alpha(*_within_and_between(_without(products, m))) for m in range(count)]
        margin = _NORMAL * float(np.sqrt((count - 1) * np.var(alphas)))
    return Variances(within, between, _clip(alpha), _clip(alpha - margin), _clip(alpha + margin))


def _without(products: _Products, client: int) -> _Products:
    """The products without one client."""
    rows = np.delete(products.inner, client, 0)
    return _Products(np.delete(rows, client, 1), np.delete(products.noise, client))


def _within_and_between(products: _Products) -> tuple[float, float]:
    inner, noise = products
    count = len(noise)
    between = (np.trace(inner) - inner.sum() / count) / (count - 1)
    return float(noise.mean()), float(between)


def _alpha(within: float, between: float) -> float:
    """Alpha*; negative where the estimate of the between-client variance is."""
    return between / (between + within) if between + within > 0 else 0.0


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))
