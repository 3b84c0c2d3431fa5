"""Models, a plan and runs that the tests of engines have in common."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from glocal.core.sampling import Plan
from tests.support import world

PLAN = Plan(rounds=2, clients_per_round=4, local_epochs=2, batch_size=5)
EXACT = 1e-10  # in float64
NEAR = 1e-5  # in float32, which fused steps need


def images():
    """A network with a convolution on images of 2 x 3 pixels."""
    body = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(4 * 3 * 4, world.CLASSES))


# models that can be batched; the contract of algorithms has all others
KINDS = ("plain", "batch norm", "dropout", "convolution")
MODELS = {**{kind: world.MODELS[kind] for kind in KINDS}, "images": images}
every_algorithm = pytest.mark.parametrize("name", world.NAMES)
every_model = pytest.mark.parametrize("kind", MODELS)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no compiler here"
)


def model_of(kind, dtype=torch.float32):
    return world.seeded(MODELS[kind]).to(dtype)


def run(name, kind, engine, *, optimizer=None, dtype=torch.float32):
    """The last state of an algorithm by name on a model by name."""
    return train(world.algorithm(name, model_of(kind, dtype), optimizer=optimizer), engine)


def train(algorithm, engine, *, federation=None, plan=PLAN):
    """The last state of an algorithm, on data of its model's type."""
    data = data_for(algorithm, federation)
    return world.last(world.simulate(algorithm, data, plan, engine=engine))[0]


def data_for(algorithm, federation=None):
    """The training data in the type of the algorithm's model."""
    dtype = next(iter(algorithm.task.model.parameters())).dtype
    data = (federation or world.federation()).train
    return replace(data, examples=data.examples.with_dtype(dtype))
