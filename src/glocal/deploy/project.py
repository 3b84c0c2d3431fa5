"""A project folder of the server or of a client: its settings, its algorithm and its model."""

import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import torch

from glocal.core.data import ClientData, Examples, concatenate
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.sampling import Plan
from glocal.datasets.federated import FederatedData, train_val_test_split
from glocal.deploy.settings import ClientSettings, DeploymentSettings, read_settings
from glocal.deploy.setup import TrainingSetup, require_maskable, require_private, uplink_codec
from glocal.deploy.version import require_current_folder
from glocal.studies.build import (
    OWN_TEST_FRACTION,
    Components,
    build_algorithm,
    build_model,
    build_task,
)
from glocal.studies.run import plans_of
from glocal.studies.settings import Settings, from_toml
from glocal.studies.user_functions import call_user_function, import_function
from glocal.wire import parse_codec, require_enough_clients

STUDY, DEPLOYMENT, CLIENT = "study.toml", "deploy.toml", "client.toml"


@dataclass(frozen=True)
class Project:
    """A folder and the settings in its two files."""

    folder: Path
    study: Settings
    deployment: DeploymentSettings

    @classmethod
    def from_folder(cls, folder: Path) -> "Project":
        """Read a folder; refuse a study that cannot be deployed."""
        require_current_folder(folder)
        study = from_toml(folder / STUDY)
        deployment = read_settings(DeploymentSettings, folder / DEPLOYMENT)
        _require_deployable(study)
        plans_of(study)  # refuses an impossible plan
        return cls(folder.resolve(), study, deployment)

    @property
    def plan(self) -> Plan:
        """Rounds, clients per round, seed and batches."""
        return next(iter(plans_of(self.study).values()))

    def client_settings(self) -> ClientSettings:
        """The settings of the client whose folder it is."""
        return read_settings(ClientSettings, self.folder / CLIENT)

    @cached_property
    def setup(self) -> TrainingSetup:
        """The algorithm and its initial model: the same on the server and on every client."""
        self.make_importable()
        example = torch.zeros(1)  # a user's own model knows its inputs
        seed, nothing = self.study.plan.seed, _empty_data()
        model = build_model(self.study.model, example, 0, seed=seed)
        task = build_task(self.study, model, nothing)
        name, experiment = next(iter(self.study.experiments.items()))
        parts = Components(task, (seed,), (nothing,), (params_of(model),))
        algorithm = build_algorithm(self.study, experiment, parts)
        uplink = parse_codec(self.study.plan.uplink or (), "plan.uplink")
        codec = uplink_codec(uplink, self.deployment.privacy)
        params = algorithm.task.initial_params()
        setup = TrainingSetup(name, algorithm, codec, params, self._training_settings())
        sampled = min(self.plan.clients_per_round, self.deployment.clients)
        require_enough_clients(algorithm.aggregation, sampled)
        if self.deployment.privacy is not None:
            require_private(setup)
        if self.deployment.secure_aggregation:
            _require_enough_clients(self)
            require_maskable(setup)
        return setup

    def _training_settings(self) -> Json:
        """The settings that a client must share with the server, beside algorithm and codec.

        The number of rounds and the time limits are the server's own.
        """
        names = ("local_epochs", "batch_size", "max_tokens", "seed")
        return {
            **{name: getattr(self.study.plan, name) for name in names},
            "validation": self.study.data.validation,
            "secure_aggregation": self.deployment.secure_aggregation,
        }

    def make_importable(self) -> None:
        """Import names such as "federation:model" from this folder, not from another project's.

        Another project is a folder of the import path with a deploy.toml. It leaves the path and
        its modules are unloaded, so that each of several projects in one process has its own.
        """
        for entry in list(sys.path):
            is_project = (Path(entry) / DEPLOYMENT).exists()
            if is_project and Path(entry) != self.folder:
                sys.path.remove(entry)
                _unload_modules(Path(entry))
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        for module in self._user_modules():
            loaded = getattr(sys.modules.get(module), "__file__", None)
            elsewhere = loaded and Path(loaded).resolve().parent != self.folder
            if elsewhere and (self.folder / f"{module}.py").exists():
                del sys.modules[module]

    def _user_modules(self) -> set[str]:
        """The modules of the user's functions that the settings name."""
        addresses = [self.study.model.name, self.study.task.kind, self.deployment.data]
        addresses += [experiment.algorithm for experiment in self.study.experiments.values()]
        return {address.partition(":")[0] for address in addresses if ":" in address}

    @contextmanager
    def importable(self) -> Iterator[None]:
        """The same for a while; afterwards no other project of this process finds these modules."""
        sys.modules.update(self._unloaded_modules)
        self.make_importable()
        try:
            yield
        finally:
            sys.path[:] = [path for path in sys.path if path != str(self.folder)]
            self._unloaded_modules.update(_unload_modules(self.folder))

    @cached_property
    def _unloaded_modules(self) -> dict[str, ModuleType]:
        """The modules of this folder, while it is not importable."""
        return {}

    def unload_modules(self) -> None:
        """Unload the modules of this folder, so that their next import reads changed files."""
        _unload_modules(self.folder)

    def client_data(self, client: int) -> FederatedData:
        """One client's examples, split into train, validation and test as in the simulator."""
        self.make_importable()
        address = self.deployment.data
        function = import_function(address, "data")
        with chdir(self.folder):  # file names are relative to it, wherever the program was started
            pair = call_user_function(lambda: function(client), address)
        if not isinstance(pair, list | tuple):
            raise InputError(
                f"data: {address} returned {type(pair).__name__} for client {client}; "
                "(x, y) was expected"
            )
        return train_val_test_split(
            concatenate([tuple(pair)]),
            test=OWN_TEST_FRACTION,
            validation=self.study.data.validation,
            seed=self.study.plan.seed,
            first_client=client,
        )


def _unload_modules(folder: Path) -> dict[str, ModuleType]:
    """Unload and return the modules of a folder; their next import reads the files again."""
    prefix, unloaded = f"{folder}{os.sep}", {}
    for name, module in list(sys.modules.items()):
        # `__dict__`, as an attribute of a lazy module could import it
        file = getattr(module, "__dict__", {}).get("__file__")
        if str(file).startswith(prefix):
            unloaded[name] = sys.modules.pop(name)
    return unloaded


def _empty_data() -> FederatedData:
    """A federation without clients: no data are needed to build an algorithm."""
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    empty = ClientData(nothing, ())
    return FederatedData(empty, empty, empty)


def _require_deployable(study: Settings) -> None:
    """Refuse what only the simulator supports."""
    if len(study.experiments) != 1:
        raise InputError(
            f"deploy: study.toml has {len(study.experiments)} experiments; "
            "a deployment trains one, keep one table [experiments.NAME]"
        )
    experiment = next(iter(study.experiments.values()))
    extras = {
        "groups": bool(study.groups),
        "new_client": study.new_client is not None,
        "audit": study.audit is not None,
        "data.augment": study.data.augment != "none",
        "data.labeled_fraction": study.data.labeled_fraction is not None,
        "ordinal": study.ordinal is not None,
        "plan.seeds": study.plan.seeds != 1,
        "plan.restarts": study.plan.restarts != 1,
        "experiments.start_from": experiment.start_from is not None,
        "experiments.join_plan": experiment.join_plan is not None,
        "experiments.pretext": experiment.pretext is not None,
    }
    unsupported = [name for name, is_set in extras.items() if is_set]
    if unsupported:
        raise InputError(
            f"deploy: study.toml has {', '.join(unsupported)}, which only the simulator supports; "
            "leave it out"
        )
    if ":" not in study.model.name:
        raise InputError(
            f"deploy: model.name is '{study.model.name}'; your own function was expected, "
            "such as federation:model"
        )


def _require_enough_clients(project: Project) -> None:
    clients_per_round = min(project.plan.clients_per_round, project.deployment.clients)
    if clients_per_round < 2:
        raise InputError(
            "deploy: secure_aggregation hides a client among others, but only "
            f"{clients_per_round} is sampled per round; have at least 2 clients"
        )
