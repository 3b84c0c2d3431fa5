"""Studies that come with glocal, by name."""

from glocal.studies.settings import (
    CaseSettings,
    DataSettings,
    GroupSettings,
    ModelSettings,
    OptimiserSettings,
    PlanSettings,
    Settings,
    SplitSettings,
)

_DIGITS = Settings(
    name="digits",
    data=DataSettings(source="digits", devices=10, classes_per_device=2),
    model=ModelSettings("mlp", hidden=(64, 32, 32, 32)),
    split=SplitSettings(local=("layer1",)),
    optimiser=OptimiserSettings(rate=0.05, momentum=0.5),
    plan=PlanSettings(rounds=150, cohort=3, batch=5, seeds=3),
    cases={
        "FedAvg": CaseSettings("fedavg"),
        "FedProx": CaseSettings("fedprox", knobs={"mu": 0.1}),
        "Local only": CaseSettings("local_only"),
        "MTL": CaseSettings("mtl", knobs={"tie": 0.05}),
        "LG-FedAvg": CaseSettings("lg_fedavg", rounds=40, after="FedAvg", after_round=100),
    },
)

_MNIST = Settings(
    name="mnist",
    data=DataSettings(source="mnist", devices=100, classes_per_device=2),
    model=ModelSettings("mlp", hidden=(512, 256, 256, 128)),
    split=SplitSettings(shared=("layer[3-5]",)),
    optimiser=OptimiserSettings(rate=0.05, momentum=0.5),
    plan=PlanSettings(rounds=200, cohort=10, batch=10),
    cases={
        "FedAvg": CaseSettings("fedavg"),
        "LG-FedAvg": CaseSettings("lg_fedavg", rounds=50, after="FedAvg"),
    },
)

_CIFAR10 = Settings(
    name="cifar10",
    data=DataSettings(source="cifar10", devices=100, classes_per_device=2, augment="crop_and_flip"),
    model=ModelSettings("lenet5"),
    split=SplitSettings(shared=("conv1", "conv2")),
    optimiser=OptimiserSettings(rate=0.05, momentum=0.5),
    plan=PlanSettings(rounds=200, cohort=10, batch=50),
    cases={
        "FedAvg": CaseSettings("fedavg"),
        "LG-FedAvg": CaseSettings("lg_fedavg", rounds=50, after="FedAvg"),
    },
)

_ARRIVALS = Settings(
    name="arrivals",
    data=DataSettings(source="digits", devices=12, classes_per_device=2),
    model=ModelSettings("mlp", hidden=(64, 32, 32, 32)),
    split=SplitSettings(local=("layer1",)),
    optimiser=OptimiserSettings(rate=0.05, momentum=0.5),
    plan=PlanSettings(rounds=200, cohort=4, batch=5, seeds=5),
    groups={
        "residents": GroupSettings(4),
        "leavers": GroupSettings(3, leaves=80),
        "newcomers": GroupSettings(3, arrives=80, rotate=90.0),
        "drifters": GroupSettings(2, drift=15.0, drifts_from=100, drifts_until=160),
    },
    cases={
        "FedAvg": CaseSettings("fedavg"),
        "LG-FedAvg": CaseSettings("lg_fedavg"),
        "Local only": CaseSettings("local_only"),
    },
)

STUDIES = {study.name: study for study in (_DIGITS, _ARRIVALS, _MNIST, _CIFAR10)}
