"""Liang et al. 2020, Figure 1 (b) and (c): self-supervised local models where labels are few.

The paper proposes this without measurements. Here every client has labels for 1 % of its digits.
It first trains its encoder on a pretext task: to reconstruct its digits, or to solve a jigsaw of
their quarters. Then it takes part in LG-FedAvg with the labels.
"""

from dataclasses import replace

from glocal.studies.pretext import PretextSettings
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    RunSettings,
    Settings,
    SplitSettings,
)
from glocal.studies.study import Claim, Measurement, Study, StudyPart
from liang2020.protocols import PAPER

_PRETRAINED = PretextSettings(
    "decoder", layer="encoder", weight=0.0, hidden=(200,), pretrain_epochs=3
)
_EXPERIMENTS = {
    "LG": ExperimentSettings("lg_fedavg"),
    "LG + decoder": ExperimentSettings("lg_fedavg", pretext=_PRETRAINED),
    "LG + jigsaw": ExperimentSettings(
        "lg_fedavg",
        pretext=replace(_PRETRAINED, kind="jigsaw", layer="encoder.pool2", pretrain_epochs=10),
    ),
}
_MNIST = Settings(
    name="mnist, one label in a hundred",
    data=DataSettings(
        source="mnist", partition="iid", clients=20, validation=0.05, labeled_fraction=0.01
    ),
    model=ModelSettings("bottleneck_cnn"),
    split=SplitSettings(local=("encoder",)),
    optimizer=OptimizerSettings("adam", lr=0.002),
    plan=PlanSettings(rounds=100, clients_per_round=10, batch_size=20, seeds=10),
    run=RunSettings(select="best", save="metrics", validate_every=10),
    experiments=_EXPERIMENTS,
)


def _claims() -> tuple[Claim, ...]:
    plain = Measurement("mnist", "LG", "local")
    return tuple(
        Claim(
            f"one label in a hundred: {experiment} is above LG on Local Test",
            (Measurement("mnist", experiment, "local"),),
            (plain,),
        )
        for experiment in _EXPERIMENTS
        if experiment != "LG"
    )


FEW_LABELS = Study(
    name="few-labels",
    title="MNIST with one label in a hundred: encoders pre-trained without labels",
    source="Liang et al. 2020, Figure 1 (b) and (c), for which the paper has no measurements",
    statement=(
        "local models may learn from the data themselves, as an autoencoder or by solving a "
        "jigsaw, before or beside labels."
    ),
    parts={"mnist": StudyPart("1 % of labels, 20 clients, IID", "paper", _MNIST)},
    claims=_claims(),
    protocols={"paper": PAPER},
)
