"""New clients for a federation of MNIST: upright digits, or digits rotated by 90 degrees.

The rotated ones are those of Table 3 of Liang et al. 2020.

glocal run mnist
glocal join runs/mnist --data examples.new_clients:rotated --name rotated
glocal join runs/mnist --data examples.new_clients:upright --name upright
"""

from torch import Tensor

from glocal import load_dataset, make_rng
from glocal.datasets.rotation import rotate_images

TrainAndTest = tuple[Tensor, Tensor, Tensor, Tensor]


def upright() -> TrainAndTest:
    """3,000 digits to train on and 500 to test on: x, y, x_test, y_test."""
    mnist = load_dataset("mnist")
    # the purpose is an address of randomness: another word would draw other digits
    train = make_rng(0, "newcomer, train").choice(60_000, 3000, replace=False)
    test = make_rng(0, "newcomer, test").choice(10_000, 500, replace=False)
    return mnist.train.x[train], mnist.train.y[train], mnist.test.x[test], mnist.test.y[test]


def rotated() -> TrainAndTest:
    """The same, rotated by 90 degrees."""
    x, y, x_test, y_test = upright()
    return rotate_images(x, 90), y, rotate_images(x_test, 90), y_test
