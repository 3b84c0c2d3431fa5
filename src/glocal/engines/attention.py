"""Attention that can be batched over clients.

Torch's own kernels for attention, and for whole encoder layers in evaluation mode, have no batching
rule on a CPU. The formulas that they stand for have: matrix products and a softmax.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def batchable_attention() -> Iterator[None]:
    """Compute attention by its formulas; the caller's settings are restored."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
