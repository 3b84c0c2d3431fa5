"""Convolutions as matrix products: over many devices one becomes a convolution with as many groups, slow for wide layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class ConvAsMatmul(TorchFunctionMode):
    """While it is on, plain 2-d convolutions are one matrix product each; all else is left as it is."""

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled, self.saw_conv2d = enabled, False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Instead of `conv2d`, the product."""
        self.saw_conv2d = self.saw_conv2d or function is torch.conv2d
        if self.enabled and function is torch.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    if groups != 1 or isinstance(padding, str):
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    kernel, (down, right) = tuple(weight.shape[2:]), _pair(padding)
    columns, (height, width) = _columns(
        functional.pad(x, (right, right, down, down)), kernel, _pair(stride), _pair(dilation)
    )
    out = columns @ weight.flatten(1).t()
    out = out if bias is None else out + bias
    return out.reshape(len(x), height, width, len(weight)).permute(0, 3, 1, 2)


def _columns(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """For every place of the kernel what it covers (places, channels * kernel), and how many places there are down and across.

    Made of shifted slices: their slope is a sum of shifted slices too, in a fixed order, where torch's own adds in any order.
    """
    reach = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    height, width = ((x.shape[2 + i] - reach[i]) // stride[i] + 1 for i in (0, 1))
    slices = [
        x[:, :, i * dilation[0] :, j * dilation[1] :][
            :, :, : (height - 1) * stride[0] + 1, : (width - 1) * stride[1] + 1
        ][:, :, :: stride[0], :: stride[1]]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    together = torch.stack(slices, -1).permute(0, 2, 3, 1, 4)
    return together.reshape(len(x) * height * width, -1), (height, width)


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)
