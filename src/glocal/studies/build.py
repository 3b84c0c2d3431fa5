"""From settings to the things they name: data, model, split, optimiser, algorithm."""

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from glocal import algorithms, datasets
from glocal.algorithms.contract import Algorithm, unweighted
from glocal.core.data import Holdings, gathered
from glocal.core.errors import InputError, nearest
from glocal.core.files import Json
from glocal.core.modules import params_of
from glocal.core.optimizers import Adam, Apart, Optimiser, Sgd, Shrink, adam, sgd
from glocal.core.sampling import Integers, stream
from glocal.core.split import Split
from glocal.core.training import Objective, augmented, cross_entropy
from glocal.core.trees import Params
from glocal.datasets import Dataset, Partition, Texts
from glocal.datasets.federated import Federation, held_out
from glocal.datasets.mood import CLASSES as MOODS
from glocal.datasets.vqa import Questions
from glocal.evaluate import Credit, agreeing, matching
from glocal.federate.fitting import Pretraining
from glocal.personalize.representations import Auxiliary, alone
from glocal.studies.learning import WITH_LABELS, LearnsSettings, build_extra, build_learning, with_own_rule
from glocal.studies.models import coded_cnn, coded_mlp, lenet5, mlp, softmax_mlp
from glocal.studies.own import called, named_function
from glocal.studies.questions import answering, controlled, refuse_for_others, refuse_for_questions, require_questions, seen_by
from glocal.studies.recurrent import mood_lstm
from glocal.studies.settings import CaseSettings, DataSettings, Knob, ModelSettings, OptimiserSettings, Settings
from glocal.studies.tries import tries_of
from glocal.wire import pack

Made = TypeVar("Made")
Loaded = Dataset | Federation | Holdings | Texts
OWN_TEST_SHARE = 0.2  # of data that come device by device


@dataclass(frozen=True)
class Parts:
    """What all cases of a study have in common; one federation and one set of initial parameters per seed.

    `about` is what else must be the same for a run to go on.
    """

    model: nn.Module
    objective: Objective
    seeds: tuple[int, ...]
    federations: tuple[Federation, ...]
    params: tuple[Params, ...]
    credit: Credit = matching
    about: Json = field(default_factory=dict)

    def leaving_out(self, seeds: Collection[int]) -> "Parts":
        """The same with the other seeds only."""
        kept = [place for place, seed in enumerate(self.seeds) if seed not in seeds]
        if not kept:
            raise InputError(f"settings: without is {sorted(seeds)}, and no other seed is left; leave out fewer")
        return replace(
            self,
            seeds=tuple(self.seeds[place] for place in kept),
            federations=tuple(self.federations[place] for place in kept),
            params=tuple(self.params[place] for place in kept),
        )


def build_parts(settings: Settings, report: datasets.Report) -> Parts:
    """Load the data, deal it out, and build the model, once per seed."""
    runs = tries_of(settings.plan)
    seeds = tuple(run.seed for run in runs)
    loaded = build_data(settings.data, report)
    if isinstance(loaded, Dataset) and loaded.questions:
        refuse_for_questions(settings)
        require_questions(loaded)
        asked = controlled(loaded, settings.data.pictures)
        loaded = seen_by(settings.model, asked, settings.run.computing_device, report=report)
    elif settings.model.name != "vqa":  # which says so itself
        refuse_for_others(settings)
    deals = sorted({run.deal for run in runs})
    dealt = dict(zip(deals, deal_all(loaded, settings.data, deals), strict=True))
    federations = tuple(dealt[run.deal] for run in runs)
    classes = _classes(loaded, federations[0])
    questions = loaded.questions if isinstance(loaded, Dataset) else None
    example = federations[0].train.examples.x[0]
    models = [build_model(settings.model, example, classes, seed=seed, questions=questions) for seed in seeds]
    objective = _augmented(cross_entropy(models[0]), settings.data, federations[0])
    params = tuple(params_of(model) for model in models)
    if questions is None:
        return Parts(models[0], objective, seeds, federations, params)
    about = {"pictures": questions.pictures.mark}
    if settings.model.weights is not None:
        about |= {"weights": hashlib.sha256(pack(params[0])).hexdigest()[:16]}
    return Parts(models[0], objective, seeds, federations, params, agreeing, about)


def _classes(loaded: Loaded, federation: Federation) -> int:
    if isinstance(loaded, Texts):
        return MOODS
    return loaded.classes if isinstance(loaded, Dataset) else int(federation.train.examples.y.max()) + 1


def build_data(settings: DataSettings, report: datasets.Report) -> Loaded:
    """A known data set, or what the user's function returns: a Dataset, a Federation, or one (x, y) pair per device."""
    if ":" not in settings.source or settings.source.endswith(".csv"):
        return datasets.load_any(settings.source, report=report)
    made = called(named_function(settings.source, "data.source"), settings.source)
    if isinstance(made, Dataset | Federation):
        return made
    if isinstance(made, list | tuple):
        return gathered(made)
    raise InputError(
        f"data: {settings.source} returned {type(made).__name__}; a Dataset, a Federation or a list of (x, y) was expected"
    )


def deal_all(loaded: Loaded, settings: DataSettings, seeds: Sequence[int]) -> tuple[Federation, ...]:
    """The data set dealt to devices once per seed, all of one store."""
    if not isinstance(loaded, Texts):
        return tuple(deal_out(loaded, settings, seed) for seed in seeds)
    if settings.partition != "natural":
        raise InputError(f"data: texts are dealt out person by person; let data.partition be 'natural', not '{settings.partition}'")
    dealt = datasets.deal_texts(loaded, seeds=seeds, people=settings.keep_devices, validation=settings.validation)
    return tuple(_labelled(federation, settings, seed) for federation, seed in zip(dealt, seeds, strict=True))


def deal_out(loaded: Loaded, settings: DataSettings, seed: int) -> Federation:
    """The data set dealt to devices; data that come device by device are taken as they are."""
    if isinstance(loaded, Texts):
        return deal_all(loaded, settings, [seed])[0]
    return _labelled(_first_devices(_dealt(loaded, settings, seed), settings.keep_devices), settings, seed)


def _labelled(dealt: Federation, settings: DataSettings, seed: int) -> Federation:
    return dealt if settings.labelled is None else dealt.labelled(settings.labelled, seed=seed)


def _dealt(loaded: Dataset | Federation | Holdings, settings: DataSettings, seed: int) -> Federation:
    if isinstance(loaded, Federation):
        return loaded
    if isinstance(loaded, Dataset):
        return datasets.deal(loaded, build_partition(settings, loaded.questions), validation=settings.validation, seed=seed)
    return held_out(loaded, test=OWN_TEST_SHARE, validation=settings.validation, seed=seed)


def _first_devices(federation: Federation, count: int | None) -> Federation:
    if count is None:
        return federation
    if not 1 <= count <= federation.devices:
        raise InputError(f"settings: data.keep_devices is {count}; it must be from 1 to {federation.devices}")
    return federation.each(lambda part: replace(part, rows=part.rows[:count]))


def build_partition(settings: DataSettings, questions: Questions | None = None) -> Partition:
    """Who gets what, by name."""
    known: dict[str, Callable[[], Partition]] = {
        "iid": lambda: datasets.iid(settings.devices),
        "shards": lambda: datasets.shards(settings.devices, settings.classes_per_device),
        "random_shards": lambda: datasets.random_shards(settings.devices, settings.classes_per_device),
        "dirichlet": lambda: datasets.dirichlet(settings.devices, settings.alpha),
        "kinds": lambda: datasets.kind_shards(settings.devices, *_kinds_of(questions)),
    }
    if settings.partition == "natural":
        raise InputError(
            "data: partition 'natural' needs to know whose each example is; "
            "let data.source be a function of yours that returns one (x, y) pair per device"
        )
    return _known(settings.partition, known, "data.partition")()


def _kinds_of(questions: Questions | None) -> tuple[Integers, Integers]:
    if questions is None:
        raise InputError("data: partition 'kinds' is for questions, which are dealt by how they begin; use 'shards' or another one")
    return questions.kinds


def build_model(
    settings: ModelSettings, example: Tensor, classes: int, *, seed: int, questions: Questions | None = None
) -> nn.Module:
    """The network for such examples, its weights drawn from the seed; the caller's random state is left as it was."""
    known: dict[str, Callable[[], nn.Module]] = {
        "mlp": lambda: mlp(example.numel(), settings.hidden, classes),
        "softmax_mlp": lambda: softmax_mlp(example.numel(), settings.hidden, classes),
        "coded_mlp": lambda: coded_mlp(example.numel(), settings.hidden, classes, **_code(settings)),
        "lenet5": lambda: lenet5(example.shape[0], classes),
        "coded_cnn": lambda: coded_cnn(example.shape, classes, code=settings.code),
        "mood_lstm": lambda: mood_lstm(classes, dropout=settings.dropout),
        "vqa": lambda: answering(settings, questions, classes),
    }
    own = ":" in settings.name
    make = named_function(settings.name, "model.name") if own else _known(settings.name, known, "model.name")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(stream(seed, "weights").integers(2**62)))
        model = called(make, settings.name)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {settings.name} returned {type(model).__name__}; an nn.Module was expected")
    return model


def _code(settings: ModelSettings) -> dict[str, Any]:
    return {"code": settings.code, "blur": settings.blur, "dropout": settings.dropout}


def plain_model(name: str) -> nn.Module:
    """A model by name alone, with the paper's sizes."""
    known: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "softmax_mlp": softmax_mlp, "lenet5": lenet5, "mood_lstm": mood_lstm}
    model = called(named_function(name, "model") if ":" in name else _known(name, known, "model"), name)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {name} returned {type(model).__name__}; an nn.Module was expected")
    return model


def build_split(settings: Settings, case: CaseSettings, model: nn.Module) -> Split:
    """The split as named, by the case or else by the study."""
    named = settings.split if case.local is None and case.shared is None else case
    return Split.of(model, local=named.local, shared=named.shared)


def build_pretraining(settings: Settings, case: CaseSettings, parts: Parts) -> Pretraining | None:
    """What a case's devices do before the first round, if its settings say so."""
    if case.learns is None or not case.learns.pretrain:
        return None
    algorithm = build_algorithm(settings, case, parts, before=True)
    return Pretraining(algorithm, case.learns.pretrain, labels=case.learns.kind in WITH_LABELS)


def build_algorithm(settings: Settings, case: CaseSettings, parts: Parts, *, before: bool = False) -> Algorithm:
    """An exported algorithm (or your own "module:function"), given what its signature asks for; or what comes before it."""
    exported = {name: getattr(algorithms, name) for name in algorithms.__all__}
    own = ":" in case.algorithm
    make = named_function(case.algorithm, "algorithm") if own else _known(case.algorithm, exported, "algorithm")
    offered: dict[str, Callable[[], object]] = {
        "split": lambda: build_split(settings, case, parts.model),
        "devices": lambda: parts.federations[0].devices,
    }
    wanted = list(inspect.signature(make).parameters.values())[2:]
    if (case.local or case.shared) and "split" not in [parameter.name for parameter in wanted]:
        raise InputError(
            f"settings: {case.algorithm} has no split, so that its cases take neither 'local' nor 'shared'; leave them out"
        )
    given: dict[str, Any] = {parameter.name: offered[parameter.name]() for parameter in wanted if parameter.name in offered}
    knobs = _knobs(case, {parameter.name: parameter for parameter in wanted if parameter.name not in offered})
    objective, rule = parts.objective, build_optimiser(settings.optimiser, case.rate)
    optimiser: Optimiser = rule
    if case.local_rate is not None:
        optimiser = _apart(rule, build_optimiser(settings.optimiser, case.local_rate), case, given.get("split"))
    if case.learns is not None:
        objective, auxiliary = build_auxiliary(settings, case.learns, parts, parts.seeds[0])
        optimiser = with_own_rule(optimiser, case.learns, auxiliary.name)
        given |= {"split": auxiliary.local(given["split"])} if isinstance(given.get("split"), Split) else {}
        if before and case.learns.kind != "adversary":
            local = given["split"].local if "split" in given else parts.objective.trains
            objective = alone(parts.objective, auxiliary, local=local)
    made = called(partial(make, objective, optimiser, **given, **knobs), case.algorithm)
    if not isinstance(made, Algorithm):
        raise InputError(f"algorithm: {case.algorithm} returned {type(made).__name__}; a glocal Algorithm was expected")
    known: dict[str, Callable[[Algorithm], Algorithm]] = {"examples": lambda algorithm: algorithm, "equal": unweighted}
    return _known(settings.plan.weights, known, "plan.weights")(made)


def build_auxiliary(settings: Settings, learns: LearnsSettings, parts: Parts, seed: int) -> tuple[Objective, Auxiliary]:
    """What a case's local models learn from besides labels, and the auxiliary model of a seed."""
    if learns.kind == "adversary" and settings.data.augment != "none":
        raise InputError("settings: an adversary learns from the data as they are; leave datasets.augment out")
    train = parts.federations[0].train
    return build_learning(learns, parts.objective, parts.model, train.examples.take(train.pooled()[:2]), seed=seed)


def build_critic(learns: LearnsSettings | None, parts: Parts) -> nn.Module | None:
    """The adversary's network, if a case has one."""
    if learns is None or learns.kind != "adversary":
        return None
    train = parts.federations[0].train
    return build_extra(learns, parts.model, train.examples.take(train.pooled()[:2]), seed=parts.seeds[0])


def _knobs(case: CaseSettings, wanted: Mapping[str, inspect.Parameter]) -> dict[str, Knob]:
    """The case's knobs, held against the algorithm's signature."""
    for name, value in case.knobs.items():
        if name not in wanted:
            known = {*wanted, "rounds", "cohort", "local", "shared", "after", "after_round", "after_model", "rate", "local_rate"}
            raise InputError(f"settings: {case.algorithm} has no knob '{name}'; {nearest(name, known)}")
        if wanted[name].annotation in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"settings: {case.algorithm}.{name} is {value!r}; a number was expected")
    for name, parameter in wanted.items():
        if parameter.default is inspect.Parameter.empty and name not in case.knobs:
            raise InputError(f"settings: {case.algorithm} needs the knob '{name}'; add it to the case")
    return case.knobs


def build_optimiser(settings: OptimiserSettings, rate: float | None = None) -> Sgd | Adam:
    """The optimiser, by name; a case may have a rate of its own."""
    pace = settings.rate if rate is None else rate
    decays: dict[str, Any] = {"weight_decay": settings.weight_decay, "decay": settings.decay}
    known: dict[str, Callable[[], Sgd | Adam]] = {
        "sgd": lambda: sgd(pace, momentum=settings.momentum, **decays, shrink=_shrink(settings)),
        "adam": lambda: adam(pace, **decays, shrink=_shrink(settings)),
    }
    return _known(settings.name, known, "optimiser.name")()


def _apart(main: Sgd | Adam, other: Sgd | Adam, case: CaseSettings, split: Split | None) -> Optimiser:
    """The local part by a rule of its own."""
    if split is None:
        raise InputError(f"settings: {case.algorithm} has no split, so that its cases take no 'local_rate'; leave it out")
    if case.learns is not None:
        raise InputError("settings: a case has `local_rate` and `learns`; use one of the two")
    return Apart(main, other, split.local)


def _shrink(settings: OptimiserSettings) -> Shrink | None:
    if settings.shrink is None and settings.shrink_every is None:
        return None
    if settings.shrink is None or settings.shrink_every is None:
        raise InputError("settings: optimiser.shrink and shrink_every belong together, such as 0.5 and 10 rounds; give both")
    return Shrink(by=settings.shrink, every=settings.shrink_every)


def _augmented(objective: Objective, settings: DataSettings, federation: Federation) -> Objective:
    images = federation.train.examples.x

    def cropped() -> Objective:
        if images.dim() != 4:
            raise InputError(
                f"data: crop_and_flip needs images (channels, height, width); the inputs are {tuple(images.shape[1:])}"
            )
        # after normalisation a black pixel is each channel's smallest value
        return augmented(objective, datasets.crop_and_flip(fill=tuple(images.amin((0, 2, 3)).tolist())))

    known: dict[str, Callable[[], Objective]] = {"none": lambda: objective, "crop_and_flip": cropped}
    return _known(settings.augment, known, "data.augment")()


def _known(name: str, known: Mapping[str, Made], where: str) -> Made:
    if name not in known:
        raise InputError(f"settings: {where} is '{name}'; {nearest(name, known)}")
    return known[name]
