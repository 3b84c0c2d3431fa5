"""Layers that take the places of torch's: pure functions of x, the mask of real rows, and a key.

Torch's batch norm would count padded rows, and its dropout draws from a generator with a state.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from glocal.core import random


class MaskedBatchNorm(nn.Module):
    """Batch normalisation with statistics of real rows only; each call sets `rows`, their mask."""

    rows: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum, self.affine = norm.eps, norm.momentum, norm.affine
        self.track_running_stats = norm.track_running_stats
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        self.register_buffer("rows", torch.ones(1, device="meta"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (batch, channels, ...) per channel."""
        if self.training or not self.track_running_stats:
            mean, variance = self._batch_statistics(x)
        else:
            mean, variance = self._running_statistics()
        scale = torch.rsqrt(_per_channel(variance, x) + self.eps)
        normalised = (x - _per_channel(mean, x)) * scale
        if self.affine:
            weight = _per_channel(self._tensor("weight"), x)
            bias = _per_channel(self._tensor("bias"), x)
            normalised = normalised * weight + bias
        return normalised.to(x.dtype)

    def _tensor(self, name: str) -> Tensor:
        tensor = {**self._parameters, **self._buffers}[name]
        assert tensor is not None
        return tensor

    def _running_statistics(self) -> tuple[Tensor, Tensor]:
        return self._tensor("running_mean"), self._tensor("running_var")

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()  # a sum of many half-precision numbers overflows
        weight = self._row_weights(x)
        axes = [0, *range(2, x.dim())]
        total = (weight.sum() * x[0, 0].numel()).clamp(min=1)
        mean = (x * weight).sum(axes) / total
        centred = (x - _per_channel(mean, x)) * weight
        variance = centred.square().sum(axes) / total
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), total)
        return mean, variance

    def _row_weights(self, x: Tensor) -> Tensor:
        """1 for real rows and 0 for padding (batch, 1, ...)."""
        # A model that folds time into the batch has several consecutive rows per example.
        rows = self.rows.repeat_interleave(x.shape[0] // self.rows.shape[0])
        axes = [1] * (x.dim() - 1)
        return rows.to(x.dtype).view(-1, *axes)

    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        """Update the running statistics by those of a batch with `total` values per channel."""
        old_mean, old_variance = self._running_statistics()
        unbiased = variance * total / (total - 1).clamp(min=1)
        new_variance = torch.where(total > 1, unbiased, old_variance)  # one value has no variance
        batches = self._tensor("num_batches_tracked") + 1
        factor = 1 / batches if self.momentum is None else self.momentum
        self._buffers["num_batches_tracked"] = batches
        self._buffers["running_mean"] = old_mean + factor * (mean - old_mean)
        self._buffers["running_var"] = old_variance + factor * (new_variance - old_variance)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Values of channels (channels,) in a shape that broadcasts with x (batch, channels, ...)."""
    axes = [1] * (x.dim() - 2)
    return values.view(1, -1, *axes)


class KeyedDropout(nn.Module):
    """Dropout with a pattern from a key: a client drops the same units alone and in a batch."""

    key: Tensor

    def __init__(self, dropout: _DropoutNd, layer: int) -> None:
        super().__init__()
        self.p, self.layer, self.calls = dropout.p, layer, 0
        self.whole_channels = not isinstance(dropout, nn.Dropout)
        self.register_buffer("key", _key_placeholder(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Set units of x (batch, ...), or whole channels, to zero with probability p."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = tuple(x.shape)
        if self.whole_channels:
            shape = (*x.shape[:2], *[1] * (x.dim() - 2))
        self.calls += 1  # a layer that is used twice in a step drops other units the second time
        key = random.fold_in(random.fold_in(self.key, self.layer), self.calls)
        mask = random.uniform(key, shape) >= self.p
        return x * mask / (1 - self.p)


class KeyedGaussianNoise(nn.Module):
    """Normal noise with numbers from a key."""

    key: Tensor

    def __init__(self, std: float, layer: int) -> None:
        super().__init__()
        self.std, self.layer, self.calls = std, layer, 0
        self.register_buffer("key", _key_placeholder(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add noise to x (batch, ...)."""
        if not self.training or self.std == 0:
            return x
        self.calls += 1
        key = random.fold_in(random.fold_in(self.key, self.layer), self.calls)
        return x + self.std * random.normal(key, x.shape)


def _key_placeholder() -> Tensor:
    return torch.zeros((), dtype=torch.int64, device="meta")
