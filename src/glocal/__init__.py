"""Personalised federated learning with local and shared representations.

All public names and submodules are available here and are loaded on first use, so that importing
glocal is fast. `__init__.pyi` beside this file tells type checkers where each name is defined.
"""

from importlib import import_module
from pkgutil import iter_modules

__version__ = "0.2.0.dev0"

_HOMES = {
    "algorithms": (
        "APFL",
        "Ditto",
        "FedAdagrad",
        "FedAdam",
        "FedAvg",
        "FedAvgM",
        "FedDyn",
        "FedPer",
        "FedProto",
        "FedProx",
        "FedRep",
        "FedYogi",
        "FeSEM",
        "IFCA",
        "LGFedAvg",
        "LocalOnly",
        "MTL",
        "Scaffold",
    ),
    "algorithms.contract": ("Algorithm", "State", "Update", "Uploads"),
    "core.data": ("ClientData", "Examples"),
    "core.errors": ("GlocalWarning", "InputError"),
    "core.metric": ("Metric",),
    "core.modules": ("params_of",),
    "core.optimizers": ("SGD", "Adam", "AdamW", "StepLR"),
    "core.sampling": ("Availability", "Plan", "make_rng"),
    "core.split": ("Split", "first_layers", "last_layers"),
    "core.task": ("Task", "classification", "multilabel", "regression", "tokens"),
    "core.training": ("Objective", "WeightedSum", "Work", "local_train"),
    "datasets": (
        "crop_and_flip",
        "dirichlet",
        "iid",
        "load_dataset",
        "natural",
        "random_shards",
        "shards",
    ),
    "datasets.federated": ("FederatedData",),
    "engines": ("EngineConfig",),
    "federate.callbacks": ("Callback", "EarlyStopping"),
    "federate.experiment": ("Experiment", "Group", "Phase", "Pretraining"),
    "federate.fit": ("fit",),
    "federate.group_result": ("GroupResult", "load_model"),
    "federate.metrics_table": ("MetricRow", "MetricsTable"),
    "federate.options": ("Evaluation", "Options"),
    "federate.records": ("RoundRecord",),
    "federate.result": ("Result", "load"),
    "federate.run": ("Run",),
    "federate.warm_groups": ("warm_start_groups",),
    "personalize.advisor": ("Advice", "Budget", "AdvisorConfig", "advise"),
    "personalize.mixing": ("alphas_of", "tune_alphas"),
    "personalize.onboarding": ("TrainedFederation", "JoinPlan", "join"),
    "wire": (
        "Clip",
        "Half",
        "Int4",
        "Int8",
        "Ledger",
        "Mean",
        "Median",
        "Noise",
        "TopK",
        "chain",
    ),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"glocal.{home}"), name)
    if name in _submodules():
        return import_module(f"glocal.{name}")
    raise AttributeError(f"glocal has no '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, *_submodules(), "__version__"]


def _submodules() -> list[str]:
    return [name for _, name, _ in iter_modules(__path__) if not name.startswith("_")]
