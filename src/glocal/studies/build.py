"""From settings to what they name: data, model, split, optimiser, algorithm."""

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from glocal import algorithms, datasets
from glocal.algorithms.contract import Algorithm, unweighted
from glocal.core.data import ClientData, concatenate
from glocal.core.errors import InputError, suggest_name
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, Adam, Optimizer, PartitionedOptimizer, StepLR
from glocal.core.sampling import IntArray, make_rng
from glocal.core.split import Split
from glocal.core.task import Task, classification
from glocal.core.training import Augment, Objective
from glocal.core.trees import Params
from glocal.datasets import Dataset, Partitioner, Texts
from glocal.datasets.federated import FederatedData, train_val_test_split
from glocal.datasets.texts import CLASSES as MOODS
from glocal.datasets.vqa import VQAMetadata
from glocal.evaluate import VQA_ACCURACY
from glocal.federate.fitting import Pretraining
from glocal.personalize.representations import Auxiliary, auxiliary_only
from glocal.studies.models import bottleneck_cnn, bottleneck_mlp, lenet5, mlp, softmax_mlp
from glocal.studies.pretext import (
    SUPERVISED_KINDS,
    PretextSettings,
    build_auxiliary_network,
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
from glocal.wire import pack

T = TypeVar("T")
Loaded = Dataset | FederatedData | ClientData | Texts
OWN_TEST_FRACTION = 0.2  # of data that come client by client


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

    @cached_property
    def objective(self) -> Objective:
        """What training minimises: one object for all experiments, whose steps are traced once."""
        return self.task.objective()

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
    loaded = build_data(settings.data, report)
    if isinstance(loaded, Dataset) and loaded.questions:
        refuse_non_vqa_settings(settings)
        require_questions(loaded)
        with_images = with_image_control(loaded, settings.data.pictures)
        loaded = with_frozen_features(
            settings.model, with_images, settings.run.torch_device, report=report
        )
    else:
        refuse_vqa_settings(settings)
    data_seeds = sorted({run.data_seed for run in runs})
    partitions = dict(
        zip(data_seeds, partition_seeds(loaded, settings.data, data_seeds), strict=True)
    )
    federations = tuple(partitions[run.data_seed] for run in runs)
    classes = _classes(loaded, federations[0])
    questions = loaded.questions if isinstance(loaded, Dataset) else None
    example = federations[0].train.examples.x[0]
    models = [
        build_model(settings.model, example, classes, seed=seed, questions=questions)
        for seed in seeds
    ]
    augment = _augmentation(settings.data, federations[0])
    params = tuple(params_of(model) for model in models)
    if questions is None:
        task = classification(models[0], augment=augment)
        return Components(task, seeds, federations, params)
    about = {"pictures": questions.pictures.content_hash}
    if settings.model.weights is not None:
        about |= {"weights": hashlib.sha256(pack(params[0])).hexdigest()[:16]}
    task = classification(models[0], metrics=VQA_ACCURACY, augment=augment)
    return Components(task, seeds, federations, params, about)


def _classes(loaded: Loaded, federation: FederatedData) -> int:
    if isinstance(loaded, Texts):
        return MOODS
    return (
        loaded.classes
        if isinstance(loaded, Dataset)
        else int(federation.train.examples.y.max()) + 1
    )


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
    example: Tensor,
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


def build_split(settings: Settings, experiment: ExperimentSettings, model: nn.Module) -> Split:
    """The split that the experiment names, or else the study."""
    named = settings.split if experiment.local is None and experiment.shared is None else experiment
    return Split.of(model, local=named.local, shared=named.shared)


def build_pretraining(
    settings: Settings, experiment: ExperimentSettings, parts: Components
) -> Pretraining | None:
    """What an experiment's clients do before the first round, if its settings ask for it."""
    if experiment.pretext is None or not experiment.pretext.pretrain_epochs:
        return None
    algorithm = build_algorithm(settings, experiment, parts, before=True)
    return Pretraining(
        algorithm,
        experiment.pretext.pretrain_epochs,
        labels=experiment.pretext.kind in SUPERVISED_KINDS,
    )


def build_algorithm(
    settings: Settings, experiment: ExperimentSettings, parts: Components, *, before: bool = False
) -> Algorithm:
    """An exported algorithm, or your own "module:function", with what its signature asks for.

    With `before`, the algorithm of the pre-training.
    """
    make = _algorithm_function(experiment.algorithm)
    parameters = {
        parameter.name: parameter
        for parameter in list(inspect.signature(make).parameters.values())[2:]
    }
    if (experiment.local or experiment.shared) and "split" not in parameters:
        raise InputError(
            f"settings: {experiment.algorithm} has no split, "
            "so its experiments take neither 'local' nor 'shared'; leave them out"
        )
    arguments: dict[str, Any] = {}
    if "split" in parameters:
        arguments["split"] = build_split(settings, experiment, parts.model)
    if "num_clients" in parameters:
        arguments["num_clients"] = parts.federations[0].num_clients
    others = {name: each for name, each in parameters.items() if name not in arguments}
    hyperparameters = _hyperparameters(experiment, others)
    objective = parts.objective
    optimizer = _experiment_optimizer(settings, experiment, arguments.get("split"))
    if experiment.pretext is not None:
        objective, auxiliary = build_auxiliary(settings, experiment.pretext, parts, parts.seeds[0])
        optimizer = with_auxiliary_optimizer(optimizer, experiment.pretext, auxiliary.name)
        if "split" in arguments:
            arguments["split"] = auxiliary.local(arguments["split"])
        if before and experiment.pretext.kind != "adversary":
            local = arguments["split"].local if "split" in arguments else parts.objective.trainable
            objective = auxiliary_only(parts.objective, auxiliary, local=local)
    algorithm = call_user_function(
        partial(make, objective, optimizer, **arguments, **hyperparameters), experiment.algorithm
    )
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"algorithm: {experiment.algorithm} returned {type(algorithm).__name__}; "
            "a glocal Algorithm was expected"
        )
    weightings: dict[str, Callable[[Algorithm], Algorithm]] = {
        "examples": lambda algorithm: algorithm,
        "equal": unweighted,
    }
    return _pick(settings.plan.weighting, weightings, "plan.weighting")(algorithm)


def _algorithm_function(name: str) -> Callable[..., object]:
    """The function that makes an algorithm: an exported one, or the user's own."""
    if ":" in name:
        return import_function(name, "algorithm")
    exported: dict[str, Callable[..., object]] = {**algorithms.FUNCTIONS}
    return _pick(name, exported, "algorithm")


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


def build_auxiliary(
    settings: Settings, pretext: PretextSettings, parts: Components, seed: int
) -> tuple[Objective, Auxiliary]:
    """The objective with an experiment's pretext task, and a seed's auxiliary model."""
    if pretext.kind == "adversary" and settings.data.augment != "none":
        raise InputError(
            "settings: an adversary is trained on data without augmentation; leave data.augment out"
        )
    train = parts.federations[0].train
    return build_pretext(
        pretext, parts.objective, parts.model, train.examples.take(train.all_rows()[:2]), seed=seed
    )


def build_adversary(pretext: PretextSettings | None, parts: Components) -> nn.Module | None:
    """The adversary's network, if an experiment has one."""
    if pretext is None or pretext.kind != "adversary":
        return None
    train = parts.federations[0].train
    return build_auxiliary_network(
        pretext, parts.model, train.examples.take(train.all_rows()[:2]), seed=parts.seeds[0]
    )


def _hyperparameters(
    experiment: ExperimentSettings, parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Hyperparameter]:
    """The experiment's hyper-parameters, checked against the algorithm's signature."""
    for name, value in experiment.hyperparameters.items():
        if name not in parameters:
            known = {
                *parameters,
                "rounds",
                "clients_per_round",
                "local",
                "shared",
                "start_from",
                "start_round",
                "start_model",
                "lr",
                "local_lr",
            }
            raise InputError(
                f"settings: {experiment.algorithm} has no hyper-parameter '{name}'; "
                f"{suggest_name(name, known)}"
            )
        if parameters[name].annotation in (int, float) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise InputError(
                f"settings: {experiment.algorithm}.{name} is {value!r}; a number was expected"
            )
    for name, parameter in parameters.items():
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
