"""Liang et al. 2020, Table 3: a federation of normal digits meets a device whose digits are turned by 90 degrees.

When it comes, a fraction C of the old devices goes on training with it in every round: none, or a tenth. The text does not say for
how long: here FedAvg and FedProx get as many rounds as bring them to about the published numbers, and LG-FedAvg as many as they.
"""

from dataclasses import replace

from glocal.federate.fitting import Options
from glocal.personalize.onboarding import JoinPlan
from glocal.studies.new_client_trial import NewClientSettings
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    Settings,
    SplitSettings,
)
from glocal.studies.study import Claim, Measurement, Study, StudyPart
from liang2020.protocols import PAPER
from liang2020.published import published

_BEFORE, _LAST = 400, 100  # rounds with the old devices only
_ALONE, _TOGETHER, _SETTLE = 6, 20, 15  # rounds, rounds, epochs
_GUESTS = {"0.0": 0, "0.1": 10}
_SPLITS = {"iid": 10, "2-classes": 2}

_BASE = Settings(
    data=DataSettings(source="mnist", clients=100, validation=0.05),
    model=ModelSettings("mlp", hidden=(512, 256, 256, 128)),
    split=SplitSettings(shared=("layer[3-5]",)),
    optimizer=OptimizerSettings(lr=0.05, momentum=0.5),
    plan=PlanSettings(clients_per_round=10, batch_size=10, seeds=10),
    run=Options(select="best", save="metrics", validate_every=5, checkpoint_every=250),
    new_client=NewClientSettings(rotate=90, train=3000, test=500),
)


def _cases() -> dict[str, ExperimentSettings]:
    """FedAvg and FedProx before anything happens, and from there every method with every C, a newcomer at its end."""
    experiments = {
        "FedAvg": ExperimentSettings("fedavg", rounds=_BEFORE),
        "FedProx": ExperimentSettings("fedprox", rounds=_BEFORE, hyperparameters={"mu": 0.1}),
    }
    for fraction, guests in _GUESTS.items():
        shared_only = JoinPlan(
            epochs=0, rounds=_TOGETHER if guests else _ALONE, existing_clients=guests
        )
        local_first = replace(shared_only, epochs=_SETTLE)
        start = ExperimentSettings(
            "fedavg", rounds=_LAST, start_from="FedAvg", join_plan=shared_only
        )
        experiments[f"FedAvg, C = {fraction}"] = start
        experiments[f"FedProx, C = {fraction}"] = replace(
            start, algorithm="fedprox", start_from="FedProx", hyperparameters={"mu": 0.1}
        )
        experiments[f"LG-FedAvg, C = {fraction}"] = replace(
            start, algorithm="lg_fedavg", join_plan=local_first
        )
    return experiments


def _part(name: str, classes: int) -> StudyPart:
    partition = "iid" if classes == 10 else "random_shards"
    data = replace(_BASE.data, partition=partition, classes_per_client=classes)
    settings = replace(_BASE, name=f"rotated MNIST, {name}", data=data, experiments=_cases())
    title = "iid device data" if classes == 10 else "non-iid device data, 2 classes per device"
    return StudyPart(title, "paper", settings, published("table3", classes))


def _claims() -> tuple[Claim, ...]:
    """What the paper says of Table 3, for both splits."""
    claims = []
    for name in _SPLITS:
        for fraction in _GUESTS:
            for other in (
                ("FedAvg", "FedProx") if _GUESTS[fraction] else ("FedAvg",)
            ):  # as in the table
                for measure, words in _MEASURES.items():
                    ours, theirs = (
                        Measurement(name, f"{method}, C = {fraction}", measure)
                        for method in ("LG-FedAvg", other)
                    )
                    says = f"{name}: LG-FedAvg is above {other} on {words.lower()} digits with C = {fraction}"
                    claims.append(Claim(says, (ours,), (theirs,)))
    return tuple(claims)


_MEASURES = {"normal": "Normal", "rotated": "Rotated"}
ROTATED = Study(
    name="paper-rotated",
    title="Rotated MNIST: a new device with data never seen before",
    source="Liang et al. 2020, Table 3",
    statement=(
        "FedAvg suffers from catastrophic forgetting without fine-tuning (C = 0.0): it does well on the rotated digits of the new "
        "device and forgets the normal ones. LG-FedAvg relieves it and is above FedAvg and FedProx on both."
    ),
    parts={name: _part(name, classes) for name, classes in _SPLITS.items()},
    claims=_claims(),
    measures=_MEASURES,
    protocols={"paper": PAPER},
    caption=(
        "Normal: the ensemble of the old devices (averaged logits) on everyone’s test data, once the newcomer is in. Rotated: the "
        "newcomer’s own model on its own test data. Sent: all bytes from the newcomer’s coming on; the paper does not tell."
    ),
)
