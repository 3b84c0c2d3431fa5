"""How much devices differ, and how much their own data wobble, from what they send: two updates each, of two halves of their data.

A device's update is what is its own plus noise. Two halves agree on the first and not on the second, so that over devices
E<A_m - mean A, B_m - mean B> / (M - 1) is the device variance b, and the mean of ||A_m - B_m||^2 / 4 is the data variance a of an
update of all its data; neither has a bias. Of Liang et al. 2020, Corollary 1, alpha* = b / (a + b): how local to be.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core import trees
from glocal.core.trees import Params

Floats = npt.NDArray[np.float64]
_NORMAL = 1.96


class Variances(NamedTuple):
    """Of one layer, or of all: data variance a, device variance b, and alpha* with its 95 % interval, by the jackknife."""

    within_client: float
    between_client: float
    alpha: float
    low: float
    high: float


def estimate_variances(
    first: Params, second: Params, layers: Mapping[str, Sequence[str]]
) -> dict[str, Variances]:
    """From updates of the two halves (devices, ...), of the layers by the names of their tensors; "all" is all of them."""
    trees.require_same_names(second, first, "variances")
    products = {layer: _products(first, second, names) for layer, names in layers.items()}
    everything = (
        np.sum([agreed for agreed, _ in products.values()], 0),
        np.sum([noise for _, noise in products.values()], 0),
    )
    return {layer: _variance(*found) for layer, found in {**products, "all": everything}.items()}


def _products(first: Params, second: Params, names: Sequence[str]) -> tuple[Floats, Floats]:
    """Of a layer: <A_m, B_n> (devices, devices), and ||A_m - B_m||^2 / 4 (devices,)."""
    agreed, noise = 0.0, 0.0
    for name in names:
        a, b = (tree[name].double().flatten(1).cpu().numpy() for tree in (first, second))
        agreed, noise = agreed + a @ b.T, noise + ((a - b) ** 2).sum(1) / 4
    return np.asarray(agreed), np.asarray(noise)


def _variance(agreed: Floats, noise: Floats) -> Variances:
    """The estimates, and their spread over devices that are left out one by one."""
    data, device = _pair(agreed, noise)
    count = len(noise)
    without = [
        _alpha(*_pair(np.delete(np.delete(agreed, m, 0), m, 1), np.delete(noise, m)))
        for m in range(count)
    ]
    alpha = _alpha(data, device)
    reach = _NORMAL * float(np.sqrt((count - 1) * np.var(without))) if count > 2 else 1.0
    return Variances(
        data, device, *(min(1.0, max(0.0, each)) for each in (alpha, alpha - reach, alpha + reach))
    )


def _pair(agreed: Floats, noise: Floats) -> tuple[float, float]:
    """Data variance and device variance."""
    count = len(noise)
    return float(noise.mean()), float((np.trace(agreed) - agreed.sum() / count) / (count - 1))


def _alpha(data: float, device: float) -> float:
    """Alpha*; below 0 where the estimate of the device variance is."""
    return device / (device + data) if device + data > 0 else 0.0
