"""What the local models of a case learn from besides labels, as settings name it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from glocal.core.bounds import MAX_EPOCHS, MAX_WIDTH, count_field, require_counts
from glocal.core.data import Examples
from glocal.core.errors import InputError, suggest_name
from glocal.core.modules import feature_extractor, params_of
from glocal.core.optimizers import SGD, Adam, Optimizer, PartitionedOptimizer
from glocal.core.sampling import make_rng
from glocal.core.training import Objective
from glocal.federate.fitting import num_outputs
from glocal.personalize.representations import (
    Auxiliary,
    add_auxiliary,
    adversarial,
    autoencoder,
    auxiliary_classifier,
    jigsaw,
)
from glocal.studies.models import mlp

_PERMUTATIONS = 24  # of two by two tiles
KINDS = ("adversary", "classifier", "decoder", "jigsaw")
SUPERVISED_KINDS = ("adversary", "classifier")


@dataclass(frozen=True)
class PretextSettings:
    """An auxiliary model of the `kind` adversary, classifier, decoder or puzzle, on what the module `layer` puts out.

    `weight` is what its loss counts beside the main one; an adversary's is how strongly it is worked against. `hidden` are its
    hidden widths. `lr` and `steps_per_update` are those of its own rule, if it has one: so many steps of it to each of the others. For
    `pretrain_epochs` epochs before the first round every device trains its local part alone: by the auxiliary loss, and with an
    adversary by the whole one.
    """

    kind: str
    layer: str
    weight: float = 1.0
    hidden: tuple[int, ...] = count_field((32, 32), maximum=MAX_WIDTH)
    lr: float | None = None
    steps_per_update: int = count_field(0, minimum=0, maximum=MAX_EPOCHS)
    pretrain_epochs: int = count_field(0, minimum=0, maximum=MAX_EPOCHS)

    def __post_init__(self) -> None:
        require_counts("settings: learns.", self)


def build_pretext(
    settings: PretextSettings, objective: Objective, model: nn.Module, some: Examples, *, seed: int
) -> tuple[Objective, Auxiliary]:
    """The whole objective and the auxiliary model, whose weights are drawn from the seed; `some` are a few of the examples."""
    if settings.kind not in KINDS:
        raise InputError(
            f"settings: learns.kind is '{settings.kind}'; {suggest_name(settings.kind, KINDS)}"
        )
    if settings.kind == "adversary" and some.group is None:
        raise InputError(
            "settings: an adversary needs protected attributes, and these data have none; use data with groups"
        )
    extra = build_auxiliary_network(settings, model, some, seed=seed)
    if settings.kind == "adversary":
        return adversarial(model, extra, layer=settings.layer, strength=settings.weight)
    makes: dict[str, Callable[..., Auxiliary]] = {
        "classifier": auxiliary_classifier,
        "decoder": autoencoder,
        "jigsaw": jigsaw,
    }
    made = makes[settings.kind](model, extra, layer=settings.layer)
    return add_auxiliary(
        objective, made, weight=settings.weight
    ) if settings.weight else objective, made


def build_auxiliary_network(
    settings: PretextSettings, model: nn.Module, some: Examples, *, seed: int
) -> nn.Module:
    """The auxiliary network: as wide as the representation where it begins, and as what it tells where it ends."""
    outputs = {
        "adversary": some.group[0].numel() if some.group is not None else 0,
        "classifier": num_outputs(model, some.x),
        "decoder": some.x[0].numel(),
        "jigsaw": _PERMUTATIONS,
    }
    width = feature_extractor(model, settings.layer)(
        params_of(model), some.x[:1], torch.ones(1, dtype=torch.bool)
    )[0].numel()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(make_rng(seed, "auxiliary").integers(2**62)))
        return mlp(width, settings.hidden, outputs[settings.kind])


def with_auxiliary_optimizer(
    optimizer: Optimizer, settings: PretextSettings, name: str
) -> Optimizer:
    """The optimiser, with another rate or other turns for the auxiliary model."""
    if settings.lr is None and not settings.steps_per_update:
        return optimizer
    assert isinstance(optimizer, SGD | Adam)
    other = optimizer if settings.lr is None else _with_lr(optimizer, settings.lr)
    return PartitionedOptimizer(optimizer, other, f"{name}/", settings.steps_per_update)


def _with_lr(rule: SGD | Adam, lr: float) -> SGD | Adam:
    settings = {**vars(rule), "lr": lr}
    return type(rule)(**settings)
