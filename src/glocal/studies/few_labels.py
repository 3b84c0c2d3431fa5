"""Liang et al. 2020, Figure 1 (b) and (c): local models that learn from inputs without labels, where labels are few.

The paper draws this and does not measure it. Here every device knows one label in a hundred; its encoder first learns to draw its
own digits, or to tell how their quarters were shuffled, and then takes part in LG-FedAvg with the labels that there are.
"""

from dataclasses import replace

from glocal.federate.fitting import Options
from glocal.studies.learning import LearnsSettings
from glocal.studies.settings import (
    CaseSettings,
    DataSettings,
    ModelSettings,
    OptimiserSettings,
    PlanSettings,
    Settings,
    SplitSettings,
)
from glocal.studies.study import Claim, Figure, Part, Study

_FIRST = LearnsSettings("decoder", at="encoder", weight=0.0, hidden=(200,), pretrain=3)
_CASES = {
    "LG": CaseSettings("lg_fedavg"),
    "LG + decoder": CaseSettings("lg_fedavg", learns=_FIRST),
    "LG + puzzle": CaseSettings("lg_fedavg", learns=replace(_FIRST, kind="puzzle", at="encoder.pool2", pretrain=10)),
}
_MNIST = Settings(
    name="mnist, one label in a hundred",
    data=DataSettings(source="mnist", partition="iid", devices=20, validation=0.05, labelled=0.01),
    model=ModelSettings("coded_cnn"),
    split=SplitSettings(local=("encoder",)),
    optimiser=OptimiserSettings("adam", rate=0.002),
    plan=PlanSettings(rounds=100, cohort=10, batch=20, seeds=10),
    run=Options(select="best", keep="figures", validate_every=10),
    cases=_CASES,
)


def _claims() -> tuple[Claim, ...]:
    plain = Figure("mnist", "LG", "local")
    return tuple(
        Claim(f"one label in a hundred: {case} is above LG on Local Test", (Figure("mnist", case, "local"),), (plain,))
        for case in _CASES
        if case != "LG"
    )


FEW_LABELS = Study(
    name="few-labels",
    title="MNIST with one label in a hundred: encoders that learn from the rest first",
    source="Liang et al. 2020, Figure 1 (b) and (c), which the paper draws and does not measure",
    says="local models may learn from the data themselves, as an autoencoder or by solving a jigsaw, before or beside labels.",
    parts={"mnist": Part("1 % of labels, 20 devices, iid", "paper", _MNIST)},
    claims=_claims(),
)
