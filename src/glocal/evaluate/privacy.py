"""Differential privacy of clipping and noise: a client's epsilon, by Google's accountant.

It needs the extra `privacy`.
"""

import math

from glocal.core.errors import InputError


def epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon at delta of `rounds` uploads, each clipped and with Gaussian noise.

    The noise has a standard deviation of `noise_multiplier` times the clipping norm. The guarantee
    is at the level of a client: with all of its updates, or with none of them. The server sees
    every noisy upload and knows the sampled clients, so sampling does not amplify privacy. Without
    noise epsilon is infinite.
    """
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise InputError(
            "privacy: the accountant is not installed; run: pip install 'glocal[privacy]'"
        ) from error
    if noise_multiplier <= 0:
        return math.inf
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier), rounds)
    return float(accountant.get_epsilon(delta))
