"""New devices for a federation of MNIST: upright digits, or digits turned by a quarter as in Table 3 of Liang et al. 2020.

glocal run mnist
glocal join runs/mnist --data examples.newcomers:rotated --name rotated
glocal join runs/mnist --data examples.newcomers:upright --name upright
"""

from torch import Tensor

from glocal.core.sampling import make_rng
from glocal.datasets import load
from glocal.datasets.rotation import rotate_images as turned

NewClient = tuple[Tensor, Tensor, Tensor, Tensor]


def upright() -> NewClient:
    """3,000 digits to learn from and 500 to be tested on: x, y, x_test, y_test."""
    mnist = load("mnist")
    train, test = (
        make_rng(0, f"newcomer, {part}").choice(rows, count, replace=False)
        for part, rows, count in _PARTS
    )
    return mnist.train.x[train], mnist.train.y[train], mnist.test.x[test], mnist.test.y[test]


def rotate_images() -> NewClient:
    """The same, turned by 90 degrees."""
    x, y, x_test, y_test = upright()
    return turned(x, 90), y, turned(x_test, 90), y_test


_PARTS = (("train", 60_000, 3000), ("test", 10_000, 500))
