"""A project folder, on the server or on a device: its settings, and the algorithm and model made of them."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import nn

from glocal.algorithms.contract import Algorithm
from glocal.algorithms.privacy import DifferentialPrivacy, secure_noise, with_differential_privacy
from glocal.core.data import ClientData, Examples, concatenate, hold_out
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.sampling import Plan
from glocal.core.training import cross_entropy
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.deploy.settings import ClientSettings, DeploymentSettings, read_settings
from glocal.studies.build import OWN_TEST_FRACTION, Components, build_algorithm, build_model
from glocal.studies.run import plans_of
from glocal.studies.settings import Settings, from_toml
from glocal.studies.user_functions import call_user_function, import_function
from glocal.wire import pack

STUDY, DEPLOYMENT, CLIENT = "study.toml", "deploy.toml", "device.toml"


@dataclass(frozen=True)
class Project:
    """The folder and what its two files say."""

    folder: Path
    study: Settings
    deployment: DeploymentSettings

    @classmethod
    def from_folder(cls, folder: Path) -> "Project":
        """Read a folder; refuse a study that cannot be deployed."""
        study, deployment = (
            from_toml(folder / STUDY),
            read_settings(DeploymentSettings, folder / DEPLOYMENT),
        )
        _require_deployable(study)
        plans_of(study)  # refuses a plan that cannot be carried out
        return cls(folder.resolve(), study, deployment)

    @property
    def plan(self) -> Plan:
        """How long, with how many devices, from which seed."""
        return next(iter(plans_of(self.study).values()))

    def client_settings(self) -> ClientSettings:
        """Whose folder it is."""
        return read_settings(ClientSettings, self.folder / CLIENT)

    @cached_property
    def setup(self) -> "TrainingSetup":
        """The algorithm and the model it starts from: the same on the server and on every device."""
        self.make_importable()
        example = torch.zeros(1)  # a model of one's own knows its inputs
        model = build_model(self.study.model, example, 0, seed=self.study.plan.seed)
        name, experiment = next(iter(self.study.experiments.items()))
        parts = Components(
            model,
            cross_entropy(model),
            (self.study.plan.seed,),
            (_empty_data(self.deployment.clients),),
            (params_of(model),),
        )
        algorithm = build_algorithm(self.study, experiment, parts)
        if self.deployment.privacy is not None:
            _require_equal_weights(self.study, algorithm, parts.params[0])
            bounds = self.deployment.privacy
            algorithm = with_differential_privacy(
                algorithm,
                DifferentialPrivacy(bounds.clipping_norm, bounds.noise_multiplier),
                draw=secure_noise,
            )
        if self.deployment.secure_aggregation:
            _require_enough_clients(self)
            _require_maskable(algorithm, parts.params[0])
        return TrainingSetup(name, algorithm, model, parts.params[0], self._training_settings())

    def _training_settings(self) -> Json:
        """What else a device must have as the server has it; how many rounds and how long to wait are the server's own."""
        plan = {
            name: getattr(self.study.plan, name)
            for name in ("local_epochs", "batch_size", "max_tokens", "seed", "weighting")
        }
        return {
            **plan,
            "validation": self.study.data.validation,
            "secure_aggregation": self.deployment.secure_aggregation,
        }

    def make_importable(self) -> None:
        """Let "federation:model" be found in this folder, and not in another project's.

        Another project is a folder of the import path with a deploy.toml: it leaves the path, and
        its modules are forgotten, so that of several projects in one process each has its own.
        """
        for entry in [path for path in sys.path if (Path(path) / DEPLOYMENT).exists()]:
            if Path(entry) != self.folder:
                sys.path.remove(entry)
                _unload_modules(Path(entry))
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        named = (self.study.model.name, self.deployment.data)
        algorithms = (experiment.algorithm for experiment in self.study.experiments.values())
        for module in {
            address.partition(":")[0] for address in (*named, *algorithms) if ":" in address
        }:
            loaded = getattr(sys.modules.get(module), "__file__", None)
            elsewhere = loaded and Path(loaded).resolve().parent != self.folder
            if elsewhere and (self.folder / f"{module}.py").exists():
                del sys.modules[module]

    @contextmanager
    def importable(self) -> Iterator[None]:
        """The same for a while: afterwards, no other project of this process finds these modules."""
        sys.modules.update(self._unloaded_modules)
        self.make_importable()
        try:
            yield
        finally:
            sys.path[:] = [path for path in sys.path if path != str(self.folder)]
            self._unloaded_modules.update(_unload_modules(self.folder))

    @cached_property
    def _unloaded_modules(self) -> dict[str, ModuleType]:
        """The modules of this folder while it is not importable."""
        return {}

    def unload_modules(self) -> None:
        """Have the modules of this folder imported anew: they may have been changed."""
        _unload_modules(self.folder)

    def client_data(self, client: int) -> FederatedData:
        """One device's examples, parted into train, validation and test as the simulator would; all others have none."""
        self.make_importable()
        address = self.deployment.data
        function = import_function(address, "data")
        with chdir(
            self.folder
        ):  # Flower's programs run elsewhere; a file is named as seen from the device's folder
            given = call_user_function(lambda: function(client), address)
        if not isinstance(given, list | tuple):
            raise InputError(
                f"data: {address} returned {type(given).__name__} for device {client}; (x, y) was expected"
            )
        held = concatenate([tuple(given)])
        seed, share = self.study.plan.seed, self.study.data.validation
        kept, test = hold_out(held.rows[0], OWN_TEST_FRACTION, seed, "test", client)
        train, val = hold_out(kept, share, seed, "validation", client)
        return FederatedData(*(ClientData(held.examples, (rows,)) for rows in (train, val, test)))


@dataclass(frozen=True)
class TrainingSetup:
    """What server and devices must have in common."""

    experiment: str
    algorithm: Algorithm
    model: nn.Module
    params: Params
    training: Json

    @cached_property
    def fingerprint(self) -> str:
        """Algorithm, split, names, shapes, types, initial numbers and how to train, as one short word."""
        about = json.dumps({**self.about(), "training": self.training}, sort_keys=True).encode()
        return hashlib.sha256(about + pack(self.params)).hexdigest()[:16]

    def about(self) -> Json:
        """The same in words, for a file's header."""
        shared, private = self.algorithm.init(self.params)
        shapes = {
            side: {name: [*tensor.shape, str(tensor.dtype)] for name, tensor in tree.items()}
            for side, tree in (("shared", shared), ("private", private))
        }
        return {
            "algorithm": f"{self.algorithm.name}: {self.algorithm.description}",
            "model": shapes,
        }


def _unload_modules(folder: Path) -> dict[str, ModuleType]:
    """Have the modules of a folder imported anew when they are asked for again; those that were."""
    loaded = [(name, getattr(module, "__dict__", {})) for name, module in list(sys.modules.items())]
    inside = f"{folder}{os.sep}"
    own = [name for name, about in loaded if str(about.get("__file__")).startswith(inside)]
    return {name: sys.modules.pop(name) for name in own}


def _empty_data(clients: int) -> FederatedData:
    """A federation of so many devices, none of whose data are here."""
    nothing = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    holdings = ClientData(nothing, tuple(np.zeros(0, dtype=np.int64) for _ in range(clients)))
    return FederatedData(holdings, holdings, holdings)


def _require_deployable(study: Settings) -> None:
    """Refuse what only the simulator can do."""
    if len(study.experiments) != 1:
        raise InputError(
            f"deploy: study.toml has {len(study.experiments)} cases; a deployment trains one, keep one table [experiments.NAME]"
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
        "experiments.welcome": experiment.join_plan is not None,
        "experiments.learns": experiment.pretext is not None,
    }
    given = [name for name, there in extras.items() if there]
    if given:
        raise InputError(
            f"deploy: study.toml has {', '.join(given)}, which only the simulator knows; leave it out"
        )
    if ":" not in study.model.name:
        raise InputError(
            f"deploy: model.name is '{study.model.name}'; a function of yours was expected, such as federation:model"
        )


def _require_enough_clients(project: Project) -> None:
    clients_per_round = min(project.plan.clients_per_round, project.deployment.clients)
    if clients_per_round < 2:
        raise InputError(
            f"deploy: secure hides a device among others, but a cohort is of {clients_per_round}; have 2 devices at least"
        )


def _require_maskable(algorithm: Algorithm, params: Params) -> None:
    _require_averaging(algorithm, params, "secure_aggregation")
    counters = [
        name for name, tensor in algorithm.init(params)[0].items() if not tensor.is_floating_point()
    ]
    if counters:
        raise InputError(
            f"deploy: secure cannot mask {counters}, which hold whole numbers; keep that layer local"
        )


def _require_equal_weights(study: Settings, algorithm: Algorithm, params: Params) -> None:
    if study.plan.weighting != "equal":
        raise InputError(
            "deploy: privacy needs every device to count the same; set plan.weighting = 'equal' in study.toml"
        )
    _require_averaging(algorithm, params, "privacy")


def _require_averaging(algorithm: Algorithm, params: Params, setting: str) -> None:
    if not algorithm.is_mean:
        raise InputError(
            f"deploy: {setting} needs a server that takes the mean of what devices send (is_mean), "
            f"and {algorithm.name} does not say so; choose another algorithm, or leave it out"
        )
    if not algorithm.init(params)[0]:
        nothing = f"{algorithm.name} sends nothing"
        raise InputError(f"deploy: {setting} guards what is sent, and {nothing}; leave it out")
