"""Which algorithm's training each engine accepts, and the reason where it declines.

An algorithm that gains or loses an engine, or a reason that changes, fails here: the table is what
is true. It is for a chain of plain layers in float32, the cross entropy and SGD.
"""

import pytest

import glocal
from glocal.engines import EngineConfig, ExecutionPlan
from glocal.engines.factory import build_engine
from glocal.engines.fused import gpu
from glocal.engines.fused.cpu import FusedCpuTraining
from glocal.engines.fused.layer_chain import unsupported_data
from glocal.engines.protocol import run_one
from glocal.engines.traced import TracedTraining
from glocal.federate.rounds import assign, client_step
from tests.support import world
from tests.support.engine_runs import model_of, needs_compiler

YES = "accepts"
OWN = "the loss or the optimiser is one of your own"
PART = "not every weight of the model is trained"
PART_GPU = "some of the model's weights are not trained"
LINEAR = "the objective has a linear term"
MIXTURE = "the loss is mixture_loss, not a ModelLoss"
PROTOTYPES = "the loss is prototype_loss, not a ModelLoss"
ENGINES = ("vmapped", "traced", "fused C++", "fused Triton")
TABLE = {
    "fedavg": (YES, YES, YES, YES),
    "fedprox": (YES, YES, YES, YES),
    "lg_fedavg": (YES, YES, YES, YES),
    "local_only": (YES, YES, YES, YES),
    "mtl": (YES, YES, YES, YES),
    "apfl": (YES, OWN, MIXTURE, MIXTURE),
    "fedper": (YES, YES, YES, YES),
    "fedrep": (YES, YES, PART, PART_GPU),
    "ditto": (YES, YES, YES, YES),
    "scaffold": (YES, YES, LINEAR, LINEAR),
    "feddyn": (YES, YES, LINEAR, LINEAR),
    "fedavgm": (YES, YES, YES, YES),
    "fedadagrad": (YES, YES, YES, YES),
    "fedadam": (YES, YES, YES, YES),
    "fedyogi": (YES, YES, YES, YES),
    "fedproto": (YES, OWN, PROTOTYPES, PROTOTYPES),
    "ifca": (YES, YES, YES, YES),
    "fesem": (YES, YES, YES, YES),
}


class Asked:
    """A trainer that asks others whether they would train, and leaves the training to nobody."""

    def __init__(self, trainers):
        self.trainers = trainers
        self.answers = {name: set() for name in trainers}

    def __call__(self, objective, params, work, optimizer):
        for name, trainer in self.trainers.items():
            self.answers[name].add(trainer(objective, params, work, optimizer))


def answer_of(trainer):
    """Whether a `LocalTrainer` trains, in words."""

    def answer(objective, params, work, optimizer):
        trained = trainer(objective, params, work, optimizer)
        return YES if trained is not None else trainer.reason

    return answer


def triton_answer(objective, params, work, optimizer):
    """What the kernels for a GPU would say; it can be asked without one."""
    reason = unsupported_data(objective.loss, work.examples)
    shape = tuple(work.examples.x.shape[1:])
    dtype = next(iter(params.values())).dtype
    return reason or gpu.unsupported_reason(objective, optimizer, shape, dtype) or YES


def setup(name, model=None):
    """A client's step, its task, and the examples."""
    algorithm = world.algorithm(name, model or model_of("plain"))
    replica, state = world.set_up(algorithm, world.federation().train, glocal.Plan(1, 1))
    group = replica.groups[0]
    [task] = assign(replica, state, 0, [0], 0)
    return client_step(group.algorithm, group.wire), task, group.train.examples


def vmapped_answer(name):
    step, task, examples = setup(name)
    engine = build_engine(step, ExecutionPlan("vmapped"), EngineConfig())
    engine([task, task], examples, 0)
    return YES


def answers(name):
    """What every engine says to all training of one client's round."""
    asked = Asked(
        {
            "traced": answer_of(TracedTraining()),
            "fused C++": answer_of(FusedCpuTraining()),
            "fused Triton": triton_answer,
        }
    )
    step, task, examples = setup(name)
    run_one(step, task, examples, 0, asked)
    said = {engine: ", ".join(sorted(each)) for engine, each in asked.answers.items()}
    return {"vmapped": vmapped_answer(name), **said}


@needs_compiler
@pytest.mark.parametrize("name", world.NAMES)
def test_every_engine_accepts_or_says_why_not(name, monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: True)
    assert answers(name) == dict(zip(ENGINES, TABLE[name], strict=True))


def test_the_table_has_every_algorithm():
    assert list(TABLE) == world.NAMES
