"""Liang et al. 2020, Table 3: a client with digits rotated by 90 degrees joins a federation.

From then on, a fraction C of the existing clients trains with the new client in every round: none,
or a tenth. The text does not give the number of rounds. Here FedAvg and FedProx get as many as they
need for about the published numbers; LG-FedAvg gets as many as they do.
"""

from dataclasses import replace

from glocal.personalize.onboarding import JoinPlan
from glocal.studies.new_client_trial import NewClientSettings
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
from liang2020.published import published

_FIRST_ROUNDS, _LAST_ROUNDS = 400, 100  # with the existing clients only
_ROUNDS_ALONE, _ROUNDS_TOGETHER = 6, 20  # of the new client
_LOCAL_EPOCHS = 15  # of the new client's local part, before those rounds
_EXISTING_CLIENTS = {"0.0": 0, "0.1": 10}  # in every round, by the fraction C
_SPLITS = {"iid": 10, "2-classes": 2}

_BASE = Settings(
    data=DataSettings(source="mnist", clients=100, validation=0.05),
    model=ModelSettings("mlp", hidden=(512, 256, 256, 128)),
    split=SplitSettings(shared=("layer[3-5]",)),
    optimizer=OptimizerSettings(lr=0.05, momentum=0.5),
    plan=PlanSettings(clients_per_round=10, batch_size=10, seeds=10),
    run=RunSettings(select="best", save="metrics", validate_every=5, checkpoint_every=250),
    new_client=NewClientSettings(rotate=90, train=3000, test=500),
)


def _experiments() -> dict[str, ExperimentSettings]:
    """FedAvg and FedProx before the client joins; from there every method with every C."""
    experiments = {
        "FedAvg": ExperimentSettings("fedavg", rounds=_FIRST_ROUNDS),
        "FedProx": ExperimentSettings("fedprox", rounds=_FIRST_ROUNDS, hyperparameters={"mu": 0.1}),
    }
    for fraction, count in _EXISTING_CLIENTS.items():
        rounds = _ROUNDS_TOGETHER if count else _ROUNDS_ALONE
        shared_only = JoinPlan(epochs=0, rounds=rounds, existing_clients=count)
        local_first = replace(shared_only, epochs=_LOCAL_EPOCHS)
        fedavg = ExperimentSettings(
            "fedavg", rounds=_LAST_ROUNDS, start_from="FedAvg", join_plan=shared_only
        )
        experiments[f"FedAvg, C = {fraction}"] = fedavg
        experiments[f"FedProx, C = {fraction}"] = replace(
            fedavg, algorithm="fedprox", start_from="FedProx", hyperparameters={"mu": 0.1}
        )
        experiments[f"LG-FedAvg, C = {fraction}"] = replace(
            fedavg, algorithm="lg_fedavg", join_plan=local_first
        )
    return experiments


def _part(name: str, classes: int) -> StudyPart:
    partition = "iid" if classes == 10 else "random_shards"
    data = replace(_BASE.data, partition=partition, classes_per_client=classes)
    settings = replace(_BASE, name=f"rotated MNIST, {name}", data=data, experiments=_experiments())
    title = "IID client data" if classes == 10 else "non-IID client data, 2 classes per client"
    return StudyPart(title, "paper", settings, published("table3", classes))


def _claims() -> tuple[Claim, ...]:
    """The paper's claims about Table 3, for both splits."""
    claims: list[Claim] = []
    for part in _SPLITS:
        for fraction, count in _EXISTING_CLIENTS.items():
            others = ("FedAvg", "FedProx") if count else ("FedAvg",)  # as in the table
            for other in others:
                claims += _above(part, other, fraction)
    return tuple(claims)


def _above(part: str, other: str, fraction: str) -> list[Claim]:
    """LG-FedAvg is above another method on normal and on rotated digits."""
    claims = []
    for measure, digits in _MEASURES.items():
        ours = Measurement(part, f"LG-FedAvg, C = {fraction}", measure)
        theirs = Measurement(part, f"{other}, C = {fraction}", measure)
        statement = (
            f"{part}: LG-FedAvg is above {other} on {digits.lower()} digits with C = {fraction}"
        )
        claims.append(Claim(statement, (ours,), (theirs,)))
    return claims


_MEASURES = {"normal": "Normal", "rotated": "Rotated"}
ROTATED = Study(
    name="paper-rotated",
    title="Rotated MNIST: a new client with data unlike all others’",
    source="Liang et al. 2020, Table 3",
    statement=(
        "FedAvg suffers from catastrophic forgetting without fine-tuning (C = 0.0): it does well "
        "on the rotated digits of the new client and forgets the normal ones. LG-FedAvg relieves "
        "it and is above FedAvg and FedProx on both."
    ),
    parts={name: _part(name, classes) for name, classes in _SPLITS.items()},
    claims=_claims(),
    measures=_MEASURES,
    protocols={"paper": PAPER},
    caption=(
        "Normal: the ensemble of the existing clients (averaged logits) on all their test data, "
        "after the new client has joined. Rotated: the new client’s own model on its own test "
        "data. Sent: all bytes since the new client joined, a number that the paper does not give."
    ),
)
