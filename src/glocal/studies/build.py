"""From settings to what they name: data, model, split, optimiser, algorithm."""

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from glocal import datasets
from glocal.algorithms.contract import Algorithm
from glocal.algorithms.registry import find_algorithm
from glocal.core.data import ClientData, concatenate
from glocal.core.errors import InputError, suggest_name
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, Adam, AdamW, Optimizer, PartitionedOptimizer, StepLR
from glocal.core.sampling import IntArray, make_rng
from glocal.core.split import Split
from glocal.core.task import Task, classification, multilabel, regression, tokens
from glocal.core.training import Augment
from glocal.core.trees import Params
from glocal.core.values import map_tensors
from glocal.datasets import Dataset, Partitioner, Texts
from glocal.datasets.federated import FederatedData, train_val_test_split
from glocal.datasets.texts import CLASSES as MOODS
from glocal.datasets.vqa import VQAMetadata
from glocal.evaluate import VQA_ACCURACY
from glocal.federate.experiment import Pretraining
from glocal.federate.preparation import has_ignored_targets, prepare_all
from glocal.personalize.representations import Auxiliary, AuxiliaryOnly
from glocal.studies.models import bottleneck_cnn, bottleneck_mlp, lenet5, mlp, softmax_mlp
from glocal.studies.pretext import (
    SUPERVISED_KINDS,
    PretextSettings,
    build_pretext,
    with_auxiliary_optimizer,
)
from glocal.studies.restarts import restarts_of
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    Hyperparameter,
    ModelSettings,
    OptimizerSettings,
    Settings,
    SplitSettings,
    TaskSettings,
)
from glocal.studies.user_functions import (
    ModelRequest,
    call_model_function,
    call_user_function,
    import_function,
)
from glocal.studies.vqa_settings import (
    refuse_non_vqa_settings,
    refuse_vqa_settings,
    require_questions,
    with_frozen_features,
    with_image_control,
)
from glocal.wire import pack, parse_aggregation

T = TypeVar("T")
Loaded = Dataset | FederatedData | ClientData | Texts
OWN_TEST_FRACTION = 0.2  # of data that come client by client
_NOT_HYPERPARAMETERS = ("aggregation", "local", "shared")
_EXPERIMENT_SETTINGS = (
    "rounds",
    "clients_per_round",
    "local",
    "shared",
    "start_from",
    "start_round",
    "start_model",
    "lr",
    "local_lr",
)
_TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "multilabel": multilabel,
    "regression": regression,
    "tokens": tokens,
}


@dataclass(frozen=True)
class Components:
    """What all experiments of a study share: one partition and one set of initial weights per seed.

    `about` is what else must not change when a run is resumed.
    """

    task: Task
    seeds: tuple[int, ...]
    federations: tuple[FederatedData, ...]
    params: tuple[Params, ...]
    about: Json = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The task's model."""
        return self.task.model

    def without_seeds(self, seeds: Collection[int]) -> "Components":
        """The same for the other seeds only."""
        places = [place for place, seed in enumerate(self.seeds) if seed not in seeds]
        if not places:
            raise InputError(
                f"settings: skip_seeds is {sorted(seeds)}, and no other seed is left; skip fewer"
            )
        return replace(
            self,
            seeds=tuple(self.seeds[place] for place in places),
            federations=tuple(self.federations[place] for place in places),
            params=tuple(self.params[place] for place in places),
        )


def build_components(settings: Settings, report: datasets.ProgressCallback) -> Components:
    """Load and partition the data, and build the model, once per seed."""
    runs = restarts_of(settings.plan)
    seeds = tuple(run.seed for run in runs)
    loaded = _load(settings, report)
    questions = loaded.questions if isinstance(loaded, Dataset) else None
    data_seeds = sorted({run.data_seed for run in runs})
    partitions = partition_seeds(loaded, settings.data, data_seeds)
    outputs = _num_outputs(loaded, partitions[0], settings.task)
    example = map_tensors(lambda tensor: tensor[0], partitions[0].train.examples.x)
    models = [
        build_model(settings.model, example, outputs, seed=seed, questions=questions)
        for seed in seeds
    ]
    params = tuple(params_of(model) for model in models)
    task = build_task(settings, models[0], partitions[0], questions)
    prepared = prepare_all(partitions, task)
    if any(has_ignored_targets(task, each) for each in prepared):
        task = replace(task, has_ignored=True)
    by_data_seed = dict(zip(data_seeds, prepared, strict=True))
    federations = tuple(by_data_seed[run.data_seed] for run in runs)
    about = {} if questions is None else _about_questions(settings, questions, params[0])
    return Components(task, seeds, federations, params, about)


def _load(settings: Settings, report: datasets.ProgressCallback) -> Loaded:
    """The data; with questions about images, the images as the settings want them."""
    loaded = build_data(settings.data, report)
    if not isinstance(loaded, Dataset) or not loaded.questions:
        refuse_vqa_settings(settings)
        return loaded
    refuse_non_vqa_settings(settings)
    require_questions(loaded)
    with_images = with_image_control(loaded, settings.data.pictures)
    return with_frozen_features(
        settings.model, with_images, settings.run.options().torch_device, report=report
    )


def _about_questions(settings: Settings, questions: VQAMetadata, params: Params) -> Json:
    """The images, and the model's pretrained weights."""
    about = {"pictures": questions.pictures.content_hash}
    if settings.model.weights is not None:
        about |= {"weights": hashlib.sha256(pack(params)).hexdigest()[:16]}
    return about


def build_task(
    settings: Settings,
    model: nn.Module,
    federation: FederatedData,
    questions: VQAMetadata | None = None,
) -> Task:
    """What clients learn, by the settings' [task]."""
    own, more = settings.task, dict[str, Any]()
    if own.metrics is not None:
        more["metrics"] = own.metrics
    elif questions is not None and ":" not in own.kind:
        more["metrics"] = VQA_ACCURACY
    if ":" in own.kind:
        task = _user_task(own.kind, model)
    else:
        task = _pick(own.kind, _TASKS, "task.kind")(model, **more)
    changes: dict[str, Any] = more if ":" in own.kind else {}
    augment = _augmentation(settings.data, federation)
    if augment is not None:
        changes["augment"] = augment
    for name in ("ensemble", "head", "frozen"):
        if getattr(own, name) is not None:
            changes[name] = getattr(own, name)
    task = replace(task, **changes) if changes else task
    return settings.run.evaluation().with_criterion(task)


def _user_task(address: str, model: nn.Module) -> Task:
    """The task that a function of the user's makes of the model."""
    function = import_function(address, "task.kind")
    task = call_user_function(partial(function, model), address)
    if not isinstance(task, Task):
        raise InputError(
            f"task: {address} returned {type(task).__name__}; a glocal.Task was expected"
        )
    return task


def _num_outputs(loaded: Loaded, federation: FederatedData, task: TaskSettings) -> int:
    """How many outputs a known model needs."""
    if isinstance(loaded, Texts):
        return MOODS
    if isinstance(loaded, Dataset):
        return loaded.classes
    y = federation.train.examples.y
    if not isinstance(y, Tensor) or not federation.train.examples.has_targets:
        return 1
    if y.is_floating_point() or task.kind in ("regression", "multilabel"):
        return 1 if y.dim() == 1 else int(y.shape[1])
    return int(y.max()) + 1


def build_data(settings: DataSettings, report: datasets.ProgressCallback) -> Loaded:
    """A known data set, or what the user's function returns.

    That is a Dataset, a FederatedData, or one (x, y) pair per client.
    """
    if ":" not in settings.source or settings.source.endswith(".csv"):
        return datasets.load_any(settings.source, report=report)
    data = call_user_function(import_function(settings.source, "data.source"), settings.source)
    if isinstance(data, Dataset | FederatedData):
        return data
    if isinstance(data, list | tuple):
        return concatenate(data)
    raise InputError(
        f"data: {settings.source} returned {type(data).__name__}; "
        "a Dataset, a FederatedData or a list of (x, y) was expected"
    )


def partition_seeds(
    loaded: Loaded, settings: DataSettings, seeds: Sequence[int]
) -> tuple[FederatedData, ...]:
    """The data set partitioned among clients once per seed, all with the same store."""
    if not isinstance(loaded, Texts):
        return tuple(partition_data(loaded, settings, seed) for seed in seeds)
    if settings.partition != "natural":
        raise InputError(
            "data: texts have one client per person; "
            f"set data.partition to 'natural', not '{settings.partition}'"
        )
    partitions = datasets.partition_texts(
        loaded, seeds=seeds, people=settings.keep_clients, validation=settings.validation
    )
    return tuple(
        _with_labeled_fraction(federation, settings, seed)
        for federation, seed in zip(partitions, seeds, strict=True)
    )


def partition_data(loaded: Loaded, settings: DataSettings, seed: int) -> FederatedData:
    """The data set partitioned among clients; data that come client by client stay as they are."""
    if isinstance(loaded, Texts):
        return partition_seeds(loaded, settings, [seed])[0]
    return _with_labeled_fraction(
        _first_clients(_partition(loaded, settings, seed), settings.keep_clients), settings, seed
    )


def _with_labeled_fraction(
    federation: FederatedData, settings: DataSettings, seed: int
) -> FederatedData:
    return (
        federation
        if settings.labeled_fraction is None
        else federation.subsample_labels(settings.labeled_fraction, seed=seed)
    )


def _partition(
    loaded: Dataset | FederatedData | ClientData, settings: DataSettings, seed: int
) -> FederatedData:
    if isinstance(loaded, FederatedData):
        return loaded
    if isinstance(loaded, Dataset):
        return FederatedData.partition(
            loaded,
            build_partition(settings, loaded.questions),
            validation=settings.validation,
            seed=seed,
        )
    return train_val_test_split(
        loaded, test=OWN_TEST_FRACTION, validation=settings.validation, seed=seed
    )


def _first_clients(federation: FederatedData, count: int | None) -> FederatedData:
    if count is None:
        return federation
    if not 1 <= count <= federation.num_clients:
        raise InputError(
            f"settings: data.keep_clients is {count}; it must be from 1 to {federation.num_clients}"
        )
    return federation.map_subsets(lambda part: replace(part, rows=part.rows[:count]))


def build_partition(settings: DataSettings, questions: VQAMetadata | None = None) -> Partitioner:
    """Who gets what, by name."""
    known: dict[str, Callable[[], Partitioner]] = {
        "iid": lambda: datasets.iid(settings.clients),
        "shards": lambda: datasets.shards(settings.clients, settings.classes_per_client),
        "random_shards": lambda: datasets.random_shards(
            settings.clients, settings.classes_per_client
        ),
        "dirichlet": lambda: datasets.dirichlet(settings.clients, settings.alpha),
        "question_types": lambda: datasets.question_type_shards(
            settings.clients, *_question_types(questions)
        ),
    }
    if settings.partition == "natural":
        raise InputError(
            "data: partition 'natural' needs the client of every example; "
            "set data.source to a function of yours that returns one (x, y) pair per client"
        )
    return _pick(settings.partition, known, "data.partition")()


def _question_types(questions: VQAMetadata | None) -> tuple[IntArray, IntArray]:
    if questions is None:
        raise InputError(
            "data: partition 'question_types' is for questions, by how they begin; "
            "use 'shards' or another one"
        )
    return questions.question_types


def build_model(
    settings: ModelSettings,
    example: Any,
    classes: int,
    *,
    seed: int,
    questions: VQAMetadata | None = None,
) -> nn.Module:
    """The network for such examples, with weights drawn from the seed.

    The caller's random state does not change.
    """
    known: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: mlp(example.numel(), settings.hidden, classes),
        "softmax_mlp": lambda: softmax_mlp(example.numel(), settings.hidden, classes),
        "bottleneck_mlp": lambda: bottleneck_mlp(
            example.numel(), settings.hidden, classes, **_bottleneck_options(settings)
        ),
        "lenet5": lambda: lenet5(example.shape[0], classes),
        "bottleneck_cnn": lambda: bottleneck_cnn(
            example.shape, classes, bottleneck=settings.bottleneck
        ),
    }
    request = ModelRequest(settings, example, classes, questions)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(make_rng(seed, "weights").integers(2**62)))
        if ":" in settings.name:
            return call_model_function(settings.name, "model.name", request)
        return _pick(settings.name, known, "model.name")()


def _bottleneck_options(settings: ModelSettings) -> dict[str, Any]:
    return {
        "bottleneck": settings.bottleneck,
        "noise_std": settings.noise_std,
        "dropout": settings.dropout,
    }


def default_model(name: str) -> nn.Module:
    """A model by name, with the paper's sizes."""
    known: dict[str, Callable[[], nn.Module]] = {
        "mlp": mlp,
        "softmax_mlp": softmax_mlp,
        "lenet5": lenet5,
    }
    model = call_user_function(
        import_function(name, "model") if ":" in name else _pick(name, known, "model"), name
    )
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: {name} returned {type(model).__name__}; an nn.Module was expected"
        )
    return model


def build_split(sides: SplitSettings, model: nn.Module) -> Split:
    """The split with these sides."""
    return Split.of(model, local=sides.local, shared=sides.shared)


def named_split(settings: Settings, experiment: ExperimentSettings) -> SplitSettings:
    """The sides that the experiment names, or else the study."""
    if experiment.local is None and experiment.shared is None:
        return settings.split
    return SplitSettings(experiment.local, experiment.shared)


def build_pretraining(
    settings: Settings, experiment: ExperimentSettings, parts: Components
) -> Pretraining | None:
    """What an experiment's clients do before the first round, if its settings ask for it."""
    pretext = experiment.pretext
    if pretext is None or not pretext.pretrain_epochs:
        return None
    algorithm = build_algorithm(settings, experiment, parts)
    auxiliary = algorithm.task.pretext
    if pretext.kind != "adversary" and isinstance(auxiliary, Auxiliary):
        alone = replace(algorithm.task, pretext=AuxiliaryOnly(auxiliary))
        algorithm = replace(algorithm, task=alone)
    labels = pretext.kind in SUPERVISED_KINDS
    return Pretraining(pretext.pretrain_epochs, labels=labels, algorithm=algorithm)


def build_algorithm(
    settings: Settings, experiment: ExperimentSettings, parts: Components
) -> Algorithm:
    """An exported algorithm, or your own "module:name", with the experiment's settings."""
    make = _algorithm_maker(experiment.algorithm)
    task, names = parts.task, _settings_of(make)
    split = _split_settings(settings, experiment, names)
    sides = None if split is None else build_split(split, task.model)
    optimizer = _experiment_optimizer(settings, experiment, sides)
    if experiment.pretext is not None:
        auxiliary = build_auxiliary(experiment.pretext, parts, parts.seeds[0])
        optimizer = with_auxiliary_optimizer(optimizer, experiment.pretext, auxiliary)
        task = replace(task, pretext=auxiliary)
    arguments: dict[str, Any] = {"optimizer": optimizer}
    if split is not None:
        named = {"local": split.local, "shared": split.shared}
        arguments |= {name: side for name, side in named.items() if side is not None}
    if settings.plan.aggregation is not None:
        _require_aggregation(experiment, names)
        arguments["aggregation"] = parse_aggregation(settings.plan.aggregation, "plan.aggregation")
    hyperparameters = _hyperparameters(experiment, names)
    algorithm = call_user_function(
        partial(make, task, **arguments, **hyperparameters), experiment.algorithm
    )
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"algorithm: {experiment.algorithm} returned {type(algorithm).__name__}; "
            "a glocal.Algorithm was expected"
        )
    return algorithm


def _require_aggregation(experiment: ExperimentSettings, names: Collection[str]) -> None:
    """Refuse plan.aggregation for a function of the user's that nobody could pass it to."""
    if "aggregation" not in names:
        raise InputError(
            f"settings: plan.aggregation is given, and {experiment.algorithm} has no parameter "
            "'aggregation'; add one, or leave plan.aggregation out"
        )


def _algorithm_maker(name: str) -> Callable[..., object]:
    """What makes an algorithm of a task and settings: its class, or a function of the user's."""
    return import_function(name, "algorithm") if ":" in name else find_algorithm(name)


def _settings_of(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The named parameters of a maker, without the task and the optimizer."""
    parameters = list(inspect.signature(make).parameters.values())[1:]
    named = [
        each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    return {each.name: each for each in named if each.name != "optimizer"}


def _split_settings(
    settings: Settings, experiment: ExperimentSettings, names: Collection[str]
) -> SplitSettings | None:
    """The split that the experiment names; else the study's, where the algorithm is about one."""
    if experiment.local is not None or experiment.shared is not None:
        if "local" not in names or ("shared" not in names and experiment.shared is not None):
            raise InputError(
                f"settings: {experiment.algorithm} has no split, "
                "so its experiments take neither 'local' nor 'shared'; leave them out"
            )
        return SplitSettings(experiment.local, experiment.shared)
    return settings.split if "shared" in names else None


def _experiment_optimizer(
    settings: Settings, experiment: ExperimentSettings, split: Split | None
) -> Optimizer:
    """The optimiser of an experiment, with `local_lr` for the local part."""
    main = build_optimizer(settings.optimizer, experiment.lr)
    if experiment.local_lr is None:
        return main
    if split is None:
        raise InputError(
            f"settings: {experiment.algorithm} has no split, "
            "so its experiments take no 'local_lr'; leave it out"
        )
    if experiment.pretext is not None:
        raise InputError("settings: an experiment has `local_lr` and `pretext`; use one of the two")
    local = build_optimizer(settings.optimizer, experiment.local_lr)
    return PartitionedOptimizer(main, local, split.local)


def build_auxiliary(pretext: PretextSettings, parts: Components, seed: int) -> Auxiliary:
    """An experiment's pretext task, with a network whose weights are drawn from the seed."""
    train = parts.federations[0].train
    some = train.examples.take(train.all_rows()[:2])
    return build_pretext(pretext, parts.task, some, seed=seed)


def build_adversary(pretext: PretextSettings | None, parts: Components) -> nn.Module | None:
    """The adversary's network, if an experiment has one."""
    if pretext is None or pretext.kind != "adversary":
        return None
    return build_auxiliary(pretext, parts, parts.seeds[0]).network


def _hyperparameters(
    experiment: ExperimentSettings, names: Mapping[str, inspect.Parameter]
) -> dict[str, Hyperparameter]:
    """The experiment's hyper-parameters, checked against the algorithm's signature."""
    own = {name: each for name, each in names.items() if name not in _NOT_HYPERPARAMETERS}
    for name, value in experiment.hyperparameters.items():
        if name not in own:
            known = {*own, *_EXPERIMENT_SETTINGS}
            raise InputError(
                f"settings: {experiment.algorithm} has no hyper-parameter '{name}'; "
                f"{suggest_name(name, known)}"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if own[name].annotation in (int, float) and not is_number:
            raise InputError(
                f"settings: {experiment.algorithm}.{name} is {value!r}; a number was expected"
            )
    for name, parameter in own.items():
        if parameter.default is inspect.Parameter.empty and name not in experiment.hyperparameters:
            raise InputError(
                f"settings: {experiment.algorithm} needs the hyper-parameter '{name}'; "
                "add it to the experiment"
            )
    return experiment.hyperparameters


def build_optimizer(settings: OptimizerSettings, lr: float | None = None) -> SGD | Adam:
    """The optimiser by name; an experiment may have a learning rate of its own."""
    own_lr = settings.lr if lr is None else lr
    decays: dict[str, Any] = {"weight_decay": settings.weight_decay, "lr_decay": settings.lr_decay}
    known: dict[str, Callable[[], SGD | Adam]] = {
        "sgd": lambda: SGD(
            own_lr, momentum=settings.momentum, **decays, lr_schedule=_lr_steps(settings)
        ),
        "adam": lambda: Adam(own_lr, **decays, lr_schedule=_lr_steps(settings)),
        "adamw": lambda: AdamW(own_lr, **decays, lr_schedule=_lr_steps(settings)),
    }
    return _pick(settings.name, known, "optimizer.name")()


def _lr_steps(settings: OptimizerSettings) -> StepLR | None:
    if settings.lr_gamma is None and settings.lr_step_size is None:
        return None
    if settings.lr_gamma is None or settings.lr_step_size is None:
        raise InputError(
            "settings: optimizer.lr_gamma and optimizer.lr_step_size belong together, "
            "such as 0.5 and 10 rounds; give both"
        )
    return StepLR(gamma=settings.lr_gamma, step_size=settings.lr_step_size)


def _augmentation(settings: DataSettings, federation: FederatedData) -> Augment | None:
    images = federation.train.examples.x

    def cropped() -> Augment:
        if images.dim() != 4:
            raise InputError(
                "data: crop_and_flip needs images (channels, height, width); "
                f"the inputs are {tuple(images.shape[1:])}"
            )
        # after normalisation a black pixel is each channel's smallest value
        return datasets.crop_and_flip(fill=tuple(images.amin((0, 2, 3)).tolist()))

    known: dict[str, Callable[[], Augment | None]] = {
        "none": lambda: None,
        "crop_and_flip": cropped,
    }
    return _pick(settings.augment, known, "data.augment")()


def _pick(name: str, known: Mapping[str, T], where: str) -> T:
    if name not in known:
        raise InputError(f"settings: {where} is '{name}'; {suggest_name(name, known)}")
    return known[name]
