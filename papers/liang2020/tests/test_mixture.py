"""The alpha that is best for linear models after training is close to the theory's."""

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.core.sampling import Plan
from glocal.personalize.mixing import losses_by_alpha
from liang2020.theory import LinearProblem, finite_sample_closed_form, normal_inputs
from tests.support import world


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
    task = glocal.Task(model, half_square)
    algorithm = glocal.APFL(task, optimizer=glocal.SGD(lr=0.5), alpha=1.0)
    plan = Plan(1, clients, local_epochs=200, batch_size=n)
    state, _ = world.last(world.simulate(algorithm, fed.train, plan))
    grid = tuple(np.linspace(0, 1, 41))
    losses = losses_by_alpha(algorithm, state.group(), fed.test, grid=grid)
    best = grid[int(losses.mean(1).argmin())]
    problem = LinearProblem(normal_inputs(d), clients, n, rho, sigma)
    theory = finite_sample_closed_form(problem).best_alpha()
    assert best == pytest.approx(theory, abs=0.08)
    assert 0.1 < theory < 0.9
