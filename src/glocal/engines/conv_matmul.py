"""Convolutions as matrix products.

Over many clients, `vmap` turns a convolution into one with as many groups, which is slow for wide
layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]


class ConvAsMatmul(TorchFunctionMode):
    """While it is active, each plain 2-d convolution is one matrix product.

    `saw_conv2d` tells whether any convolution ran, also where the mode is not `enabled`.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        self.saw_conv2d = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the product instead of `conv2d`, and everything else as it is."""
        arguments = kwargs or {}
        if function is not torch.conv2d:
            return function(*args, **arguments)
        self.saw_conv2d = True
        return _conv2d(*args, **arguments) if self.enabled else function(*args, **arguments)


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d` as a matrix product; grouped convolutions are left to torch."""
    if groups != 1 or isinstance(padding, str):
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    pad_height, pad_width = _pair(padding)
    padded = functional.pad(x, (pad_width, pad_width, pad_height, pad_height))
    patches = _patches(padded, _pair(weight.shape[2:]), _pair(stride), _pair(dilation))
    examples, height, width = patches.shape[:3]
    rows = patches.reshape(examples * height * width, -1)
    out = rows @ weight.flatten(1).t()
    if bias is not None:
        out = out + bias
    return out.reshape(examples, height, width, len(weight)).permute(0, 3, 1, 2)


def _patches(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair) -> Tensor:
    """What the kernel covers at each output position.

    The shape is (examples, height, width, channels, kernel positions).

    The patches consist of shifted slices of x, one for each position in the kernel. Their gradient
    is then a sum of shifted slices too, in a fixed order. Torch's own way to cut patches sums its
    gradient in any order, so that the bits would vary.
    """
    height = _output_size(x.shape[2], kernel[0], stride[0], dilation[0])
    width = _output_size(x.shape[3], kernel[1], stride[1], dilation[1])
    rows = (height - 1) * stride[0] + 1
    columns = (width - 1) * stride[1] + 1
    slices = []
    for top in range(0, kernel[0] * dilation[0], dilation[0]):
        for left in range(0, kernel[1] * dilation[1], dilation[1]):
            covered = x[:, :, top:, left:][:, :, :rows, :columns]
            slices.append(covered[:, :, :: stride[0], :: stride[1]])
    return torch.stack(slices, -1).permute(0, 2, 3, 1, 4)


def _output_size(size: int, kernel: int, stride: int, dilation: int) -> int:
    """The number of output positions along one axis."""
    reach = dilation * (kernel - 1) + 1
    return (size - reach) // stride + 1


def _pair(value: Any) -> Pair:
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)
