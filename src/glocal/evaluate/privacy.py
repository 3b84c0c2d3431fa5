"""What clipping and noise promise: the epsilon of a device after so many rounds, by Google's accountant (the extra `privacy`)."""

import math

from glocal.core.errors import InputError


def epsilon(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon at delta of `rounds` uploads, each with Gaussian noise of `noise_multiplier` times its clipped length.

    Two worlds are told apart: with this device's moves, and with none of them. The server sees every noisy upload and knows who
    takes part, so that nothing is gained from sampling. No noise, no promise: infinity.
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
