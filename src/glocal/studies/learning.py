"""What the local models of a case learn from besides labels, as settings name it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from glocal.core.bounds import EPOCHS, WIDTH, count, require_counts
from glocal.core.data import Examples
from glocal.core.errors import InputError, nearest
from glocal.core.modules import params_of, representing
from glocal.core.optimizers import Adam, Apart, Optimiser, Sgd
from glocal.core.sampling import stream
from glocal.core.training import Objective
from glocal.federate.fitting import outputs_of
from glocal.personalize.representations import Auxiliary, adversarial, autoencoder, beside, jigsaw, supervised
from glocal.studies.models import mlp

_ORDERS = 24  # of two by two tiles
KINDS = ("adversary", "classifier", "decoder", "puzzle")
WITH_LABELS = ("adversary", "classifier")


@dataclass(frozen=True)
class LearnsSettings:
    """An auxiliary model of the `kind` adversary, classifier, decoder or puzzle, on what the module `at` puts out.

    `weight` is what its loss counts beside the main one; an adversary's is how strongly it is worked against. `hidden` are its
    hidden widths. `rate` and `turns` are those of its own rule, if it has one: so many steps of it to each of the others. For
    `pretrain` epochs before the first round every device trains its local part alone: by the auxiliary loss, and with an
    adversary by the whole one.
    """

    kind: str
    at: str
    weight: float = 1.0
    hidden: tuple[int, ...] = count((32, 32), most=WIDTH)
    rate: float | None = None
    turns: int = count(0, least=0, most=EPOCHS)
    pretrain: int = count(0, least=0, most=EPOCHS)

    def __post_init__(self) -> None:
        require_counts("settings: learns.", self)


def build_learning(
    settings: LearnsSettings, objective: Objective, model: nn.Module, some: Examples, *, seed: int
) -> tuple[Objective, Auxiliary]:
    """The whole objective and the auxiliary model, whose weights are drawn from the seed; `some` are a few of the examples."""
    if settings.kind not in KINDS:
        raise InputError(f"settings: learns.kind is '{settings.kind}'; {nearest(settings.kind, KINDS)}")
    if settings.kind == "adversary" and some.group is None:
        raise InputError("settings: an adversary needs protected attributes, and these data have none; use data with groups")
    extra = build_extra(settings, model, some, seed=seed)
    if settings.kind == "adversary":
        return adversarial(model, extra, at=settings.at, strength=settings.weight)
    makes: dict[str, Callable[..., Auxiliary]] = {"classifier": supervised, "decoder": autoencoder, "puzzle": jigsaw}
    made = makes[settings.kind](model, extra, at=settings.at)
    return beside(objective, made, weight=settings.weight) if settings.weight else objective, made


def build_extra(settings: LearnsSettings, model: nn.Module, some: Examples, *, seed: int) -> nn.Module:
    """The auxiliary network: as wide as the representation where it begins, and as what it tells where it ends."""
    outputs = {
        "adversary": some.group[0].numel() if some.group is not None else 0,
        "classifier": outputs_of(model, some.x),
        "decoder": some.x[0].numel(),
        "puzzle": _ORDERS,
    }
    width = representing(model, settings.at)(params_of(model), some.x[:1], torch.ones(1, dtype=torch.bool))[0].numel()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(stream(seed, "auxiliary").integers(2**62)))
        return mlp(width, settings.hidden, outputs[settings.kind])


def with_own_rule(optimiser: Optimiser, settings: LearnsSettings, name: str) -> Optimiser:
    """The optimiser, with another rate or other turns for the auxiliary model."""
    if settings.rate is None and not settings.turns:
        return optimiser
    assert isinstance(optimiser, Sgd | Adam)
    other = optimiser if settings.rate is None else _at_rate(optimiser, settings.rate)
    return Apart(optimiser, other, f"{name}/", settings.turns)


def _at_rate(rule: Sgd | Adam, rate: float) -> Sgd | Adam:
    settings = {**vars(rule), "rate": rate}
    return type(rule)(**settings)
