"""Models, a plan and runs that the tests of engines have in common."""

import shutil

import pytest
from torch import nn

from glocal import algorithms
from glocal.core.modules import params_of
from glocal.core.sampling import Plan
from glocal.federate.rounds import simulate
from tests.support import world

PLAN = Plan(rounds=2, clients_per_round=4, local_epochs=2, batch_size=5)


def images():
    """A network with a convolution on images of 2 x 3 pixels."""
    body = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(4 * 3 * 4, world.CLASSES))


# models that can be batched; the contract of algorithms has all others
KINDS = ("plain", "batch norm", "dropout", "convolution")
MODELS = {**{kind: world.MODELS[kind] for kind in KINDS}, "images": images}
every_algorithm = pytest.mark.parametrize("name", algorithms.__all__)
every_model = pytest.mark.parametrize("kind", MODELS)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no compiler here"
)


def run(name, kind, engine, *, optimizer=None):
    """The last state of an algorithm by name on a model by name."""
    model = world.seeded(MODELS[kind])
    return train(world.algorithm(name, model, optimizer=optimizer), model, engine)


def train(algorithm, model, engine, *, federation=None, plan=PLAN):
    """The last state of an algorithm on a model."""
    data = (federation or world.federation()).train
    rounds = simulate(algorithm, params_of(model), data, plan, engine=engine)
    return world.last(rounds)[0]
