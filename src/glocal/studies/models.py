"""The paper's networks (Liang et al. 2020, appendix C), with layer names that a split can use."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from glocal.core.errors import InputError
from glocal.core.modules import GaussianNoise, make_dropout


def mlp(
    inputs: int = 784, hidden: Sequence[int] = (512, 256, 256, 128), classes: int = 10
) -> nn.Sequential:
    """Linear layers layer1, layer2, ... with ReLU between.

    The defaults are the paper's MNIST network, 633,226 parameters.
    """
    if not all(width >= 1 for width in hidden):
        raise InputError(f"model: the hidden widths are {list(hidden)}; each must be at least 1")
    widths = [inputs, *hidden, classes]
    parts: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
    for number, (before, after) in enumerate(pairwise(widths), start=1):
        parts.append((f"layer{number}", nn.Linear(before, after)))
        parts.append((f"relu{number}", nn.ReLU()))
    return nn.Sequential(OrderedDict(parts[:-1]))


def softmax_mlp(
    inputs: int = 784, hidden: Sequence[int] = (512, 256, 256, 128), classes: int = 10
) -> nn.Sequential:
    """An mlp that ends in a softmax, as in the paper's released code.

    With cross entropy the softmax is then applied twice.
    """
    return nn.Sequential(
        OrderedDict(
            [*mlp(inputs, hidden, classes).named_children(), ("softmax", nn.Softmax(dim=1))]
        )
    )


def bottleneck_mlp(
    inputs: int = 93,
    hidden: Sequence[int] = (32, 32),
    classes: int = 2,
    *,
    bottleneck: int | None = None,
    noise_std: float | None = None,
    dropout: float | None = None,
) -> nn.Sequential:
    """An encoder to a narrow representation between -1 and 1, and a head of two layers.

    The representation is `bottleneck` wide (default 32), with noise of standard deviation
    `noise_std` in training. After each hidden layer of both parts a fraction `dropout` of the units
    is dropped in training.
    """
    width = 32 if bottleneck is None else bottleneck
    if width < 1:
        raise InputError(f"model: the bottleneck is {width} wide; it must be at least 1")
    inner = hidden[-1] if hidden else width
    encoder = _with_dropout(
        nn.Sequential(
            OrderedDict([*mlp(inputs, hidden, width).named_children(), ("tanh", nn.Tanh())])
        ),
        dropout,
    )
    head = _with_dropout(
        nn.Sequential(
            OrderedDict(
                layer1=nn.Linear(width, inner), relu1=nn.ReLU(), layer2=nn.Linear(inner, classes)
            )
        ),
        dropout,
    )
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            encoder=encoder, noise=GaussianNoise(noise_std or 0.0), head=head
        )
    )


def _with_dropout(layers: nn.Sequential, rate: float | None) -> nn.Sequential:
    """The same with dropout after every ReLU."""
    if not rate:
        return layers
    parts: list[tuple[str, nn.Module]] = []
    for name, layer in layers.named_children():
        parts.append((name, layer))
        if isinstance(layer, nn.ReLU):
            parts.append((f"drop{name[-1]}", make_dropout(rate)))
    return nn.Sequential(OrderedDict(parts))


def bottleneck_cnn(
    shape: Sequence[int] = (1, 28, 28), classes: int = 10, *, bottleneck: int | None = None
) -> nn.Sequential:
    """An encoder of two convolutions, and a head of two layers; for images.

    The representation is `bottleneck` wide (default 64).
    """
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise InputError(
            "model: bottleneck_cnn needs images (channels, height, width) of at least 16 x 16, "
            f"not {tuple(shape)}"
        )
    width = 64 if bottleneck is None else bottleneck
    height, breadth = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    encoder = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(shape[0], 8, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(8, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(16 * height * breadth, width),
        relu3=nn.ReLU(),
    )
    head = OrderedDict[str, nn.Module](
        layer1=nn.Linear(width, 64), relu1=nn.ReLU(), layer2=nn.Linear(64, classes)
    )
    return nn.Sequential(OrderedDict(encoder=nn.Sequential(encoder), head=nn.Sequential(head)))


def lenet5(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """The paper's CIFAR-10 network for 32 x 32 images, 64,102 parameters.

    Conv 6@5, pool, conv 16@5, pool, fc 120, fc 100, fc.
    """
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(channels, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * 5 * 5, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 100),
            relu4=nn.ReLU(),
            fc3=nn.Linear(100, classes),
        )
    )
