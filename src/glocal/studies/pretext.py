"""Pretext tasks: what an experiment's local models learn from besides labels, from settings."""

from dataclasses import dataclass

import torch
from torch import nn

from glocal.core.bounds import MAX_EPOCHS, MAX_WIDTH, count_field, require_counts
from glocal.core.data import Examples
from glocal.core.errors import InputError, suggest_name
from glocal.core.optimizers import SGD, Adam, Optimizer, PartitionedOptimizer
from glocal.core.sampling import make_rng
from glocal.core.task import Task
from glocal.core.values import require_tensor
from glocal.federate.outputs import num_classes
from glocal.personalize.representations import (
    Adversary,
    Auxiliary,
    Classifier,
    Decoder,
    Jigsaw,
)
from glocal.studies.models import mlp

_PERMUTATIONS = 24  # of 2 x 2 tiles
KINDS: dict[str, type[Auxiliary]] = {
    "adversary": Adversary,
    "classifier": Classifier,
    "decoder": Decoder,
    "jigsaw": Jigsaw,
}
SUPERVISED_KINDS = ("adversary", "classifier")


@dataclass(frozen=True)
class PretextSettings:
    """An auxiliary model of the `kind` adversary, classifier, decoder or jigsaw.

    Its input is the output of the module `layer`; `hidden` are its hidden widths. `weight` is the
    weight of its loss beside the main one; for an adversary, how strongly the encoder works against
    it. The auxiliary model may have its own learning rate, `lr`, and `steps_per_update` steps to
    each step of the rest. Before the first round, every client trains its local part alone for
    `pretrain_epochs` epochs: with the auxiliary loss, or against an adversary with the whole loss.
    """

    kind: str
    layer: str
    weight: float = 1.0
    hidden: tuple[int, ...] = count_field((32, 32), maximum=MAX_WIDTH)
    lr: float | None = None
    steps_per_update: int = count_field(0, minimum=0, maximum=MAX_EPOCHS)
    pretrain_epochs: int = count_field(0, minimum=0, maximum=MAX_EPOCHS)

    def __post_init__(self) -> None:
        require_counts("settings: pretext.", self)


def build_pretext(settings: PretextSettings, task: Task, some: Examples, *, seed: int) -> Auxiliary:
    """The pretext task, with a network whose weights are drawn from the seed.

    `some` are a few of the examples.
    """
    if settings.kind not in KINDS:
        raise InputError(
            f"settings: pretext.kind is '{settings.kind}'; {suggest_name(settings.kind, KINDS)}"
        )
    if settings.kind == "adversary":
        _require_adversary(task, some)
    network = _build_network(settings, task, some, seed=seed)
    return KINDS[settings.kind](network, settings.layer, settings.weight)


def _require_adversary(task: Task, some: Examples) -> None:
    if some.group is None:
        raise InputError(
            "settings: an adversary needs protected attributes, but these data have none; "
            "use data with groups"
        )
    if task.augment is not None:
        raise InputError(
            "settings: an adversary is trained on data without augmentation; leave data.augment out"
        )


def _build_network(
    settings: PretextSettings, task: Task, some: Examples, *, seed: int
) -> nn.Module:
    """The auxiliary network, from the width of the representation to that of its targets."""
    inputs = require_tensor(some.x, f"settings: pretext.kind {settings.kind}")
    outputs = {
        "adversary": lambda: 0 if some.group is None else some.group[0].numel(),
        "classifier": lambda: num_classes(task, some.x),
        "decoder": lambda: inputs[0].numel(),
        "jigsaw": lambda: _PERMUTATIONS,
    }
    one = torch.ones(1, dtype=torch.bool)
    represent = task.feature_extractor(settings.layer)
    width = represent(task.initial_params(), inputs[:1], one)[0].numel()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(make_rng(seed, "auxiliary").integers(2**62)))
        return mlp(width, settings.hidden, outputs[settings.kind]())


def with_auxiliary_optimizer(
    optimizer: Optimizer, settings: PretextSettings, auxiliary: Auxiliary
) -> Optimizer:
    """The optimiser, with another learning rate or more steps for the auxiliary model."""
    if settings.lr is None and not settings.steps_per_update:
        return optimizer
    assert isinstance(optimizer, SGD | Adam)
    other = optimizer if settings.lr is None else _with_lr(optimizer, settings.lr)
    return PartitionedOptimizer(optimizer, other, auxiliary.prefix, settings.steps_per_update)


def _with_lr(rule: SGD | Adam, lr: float) -> SGD | Adam:
    settings = {**vars(rule), "lr": lr}
    return type(rule)(**settings)
