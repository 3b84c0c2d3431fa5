"""The alpha that is best for linear models after training is close to the theory's."""

from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms import apfl
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.training import supervised
from glocal.federate.rounds import simulate
from glocal.personalize.mixing import TrainedAPFL, losses_by_alpha
from liang2020.theory import LinearProblem, finite_sample_closed_form, normal_inputs


def half_square(output, target):
    return 0.5 * (output.squeeze(1) - target).square()


@pytest.mark.parametrize(("rho", "sigma"), [(0.3, 1.5), (0.3, 3.0)])
def test_for_linear_models_the_best_alpha_is_near_the_theorys(rho, sigma):
    """At alpha 1 local models are least squares, and one round of averaging is the shared model."""
    d, clients, n, fresh = 5, 60, 40, 400
    generator = torch.Generator().manual_seed(0)
    centre = torch.rand(d, generator=generator)

    def examples(teacher, count, noise):
        x = torch.randn(count, d, generator=generator)
        return x, x @ teacher + noise * torch.randn(count, generator=generator)

    teachers = [centre + rho * torch.randn(d, generator=generator) for _ in range(clients)]
    train = [examples(teacher, n, sigma) for teacher in teachers]
    test = [examples(teacher, fresh, 0.0) for teacher in teachers]
    fed = glocal.FederatedData.from_tensors(train, test=test, validation=0.0)
    model = nn.Linear(d, 1, bias=False)
    algorithm = apfl(supervised(model, half_square), SGD(0.5), alpha=1.0)
    plan = Plan(1, clients, local_epochs=200, batch_size=n)
    rounds = simulate(algorithm, params_of(model), fed.train, plan)
    state, _ = deque(rounds, maxlen=1).pop()
    grid = tuple(np.linspace(0, 1, 41))
    mixture = TrainedAPFL(algorithm, model, state)
    losses = losses_by_alpha(mixture, fed.test, grid=grid, per_example=half_square)
    best = grid[int(losses.mean(1).argmin())]
    problem = LinearProblem(normal_inputs(d), clients, n, rho, sigma)
    theory = finite_sample_closed_form(problem).best_alpha()
    assert best == pytest.approx(theory, abs=0.08)
    assert 0.1 < theory < 0.9
