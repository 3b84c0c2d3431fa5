"""Studies that come with glocal, by name."""

from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    GroupSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    Settings,
    SplitSettings,
)

_DIGITS = Settings(
    name="digits",
    data=DataSettings(source="digits", clients=10, classes_per_client=2),
    model=ModelSettings("mlp", hidden=(64, 32, 32, 32)),
    split=SplitSettings(local=("layer1",)),
    optimizer=OptimizerSettings(lr=0.05, momentum=0.5),
    plan=PlanSettings(rounds=150, clients_per_round=3, batch_size=5, seeds=3),
    experiments={
        "FedAvg": ExperimentSettings("fedavg"),
        "FedProx": ExperimentSettings("fedprox", hyperparameters={"mu": 0.1}),
        "Local only": ExperimentSettings("local_only"),
        "MTL": ExperimentSettings("mtl", hyperparameters={"lam": 0.05}),
        "LG-FedAvg": ExperimentSettings(
            "lg_fedavg", rounds=40, start_from="FedAvg", start_round=100
        ),
    },
)

_MNIST = Settings(
    name="mnist",
    data=DataSettings(source="mnist", clients=100, classes_per_client=2),
    model=ModelSettings("mlp", hidden=(512, 256, 256, 128)),
    split=SplitSettings(shared=("layer[3-5]",)),
    optimizer=OptimizerSettings(lr=0.05, momentum=0.5),
    plan=PlanSettings(rounds=200, clients_per_round=10, batch_size=10),
    experiments={
        "FedAvg": ExperimentSettings("fedavg"),
        "LG-FedAvg": ExperimentSettings("lg_fedavg", rounds=50, start_from="FedAvg"),
    },
)

_CIFAR10 = Settings(
    name="cifar10",
    data=DataSettings(source="cifar10", clients=100, classes_per_client=2, augment="crop_and_flip"),
    model=ModelSettings("lenet5"),
    split=SplitSettings(shared=("conv1", "conv2")),
    optimizer=OptimizerSettings(lr=0.05, momentum=0.5),
    plan=PlanSettings(rounds=200, clients_per_round=10, batch_size=50),
    experiments={
        "FedAvg": ExperimentSettings("fedavg"),
        "LG-FedAvg": ExperimentSettings("lg_fedavg", rounds=50, start_from="FedAvg"),
    },
)

_ARRIVALS = Settings(
    name="arrivals",
    data=DataSettings(source="digits", clients=12, classes_per_client=2),
    model=ModelSettings("mlp", hidden=(64, 32, 32, 32)),
    split=SplitSettings(local=("layer1",)),
    optimizer=OptimizerSettings(lr=0.05, momentum=0.5),
    plan=PlanSettings(rounds=200, clients_per_round=4, batch_size=5, seeds=5),
    groups={
        "residents": GroupSettings(4),
        "leavers": GroupSettings(3, leave_round=80),
        "joiners": GroupSettings(3, join_round=80, rotate=90.0),
        "drifters": GroupSettings(2, drift=15.0, drift_start=100, drift_end=160),
    },
    experiments={
        "FedAvg": ExperimentSettings("fedavg"),
        "LG-FedAvg": ExperimentSettings("lg_fedavg"),
        "Local only": ExperimentSettings("local_only"),
    },
)

STUDIES = {study.name: study for study in (_DIGITS, _ARRIVALS, _MNIST, _CIFAR10)}
