"""Studies of questions about pictures: their network from settings, pictures seen once by a frozen encoder, and controls."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from glocal.core.data import Examples
from glocal.core.errors import InputError, suggest_name
from glocal.core.sampling import make_rng
from glocal.datasets import Dataset
from glocal.datasets.features import extract_features
from glocal.datasets.fetch import ProgressCallback, no_progress
from glocal.datasets.image_table import ImageTable
from glocal.datasets.vqa import VQAMetadata
from glocal.studies.settings import ModelSettings, Settings
from glocal.studies.user_functions import (
    ModelRequest,
    call_model_function,
    call_user_function,
    import_function,
    takes_request,
)

_CONTROLS = ("own", "shuffled", "none")


def with_frozen_features(
    settings: ModelSettings,
    dataset: Dataset,
    device: Callable[[], torch.device],
    *,
    report: ProgressCallback = no_progress,
) -> Dataset:
    """The same with features in place of pictures, where an encoder is named; it is one for all seeds.

    Pretrained encoders are one for all seeds, too.
    """
    address = settings.encoder
    if address is not None and ":" not in address:
        raise InputError(
            f"settings: model.encoder is '{address}'; name a function that makes it, module:function"
        )
    questions = dataset.questions
    if address is None or questions is None or len(questions.pictures.shape) == 1:
        return dataset
    _require_no_resnet_settings(settings, address)
    request = ModelRequest(settings, dataset.train.x[0], dataset.classes, questions)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(make_rng(0, "frozen encoder").integers(2**62)))
        network = call_model_function(address, "model.encoder", request)
    where = device()

    def features() -> ImageTable:
        return extract_features(questions.pictures, network, where, report=report)

    table = call_user_function(features, address)
    return dataset._replace(questions=replace(questions, pictures=table))


def _require_no_resnet_settings(settings: ModelSettings, address: str) -> None:
    """Refuse settings that an encoder of the user's own does not get to see."""
    if takes_request(import_function(address, "model.encoder")):
        return
    for name, value in (("widths", settings.widths), ("weights", settings.weights)):
        if value is not None:
            raise InputError(
                f"settings: model.{name} is {value!r}, of a ResNet, and the encoder is {address}; "
                "leave one of them out"
            )


def refuse_vqa_settings(settings: Settings) -> None:
    """Refuse settings of questions about images where there are none: nothing would read them."""
    model = settings.model
    unread: dict[str, object] = {
        "data.pictures": settings.data.pictures,
        "model.encoder": model.encoder,
    }
    if not _model_sees_settings(model):
        unread |= {"model.widths": model.widths, "model.weights": model.weights}
    for name, value in unread.items():
        if value is not None:
            raise InputError(
                f"settings: {name} is {value!r}, and {settings.data.source} has no questions about "
                "pictures; leave it out, or let data.source be vqav2, easy_vqa or questions of "
                "your own"
            )


def _model_sees_settings(model: ModelSettings) -> bool:
    """Whether the model is made by a function that gets the settings; it may refuse them itself."""
    return ":" in model.name and takes_request(import_function(model.name, "model.name"))


def require_questions(dataset: Dataset) -> None:
    """Refuse examples that refer to what is not there, or that nobody has answered: own data, for those read here are right."""
    questions = dataset.questions
    if questions is None:
        return
    if not isinstance(questions, VQAMetadata):
        raise InputError(
            f"data: the questions are a {type(questions).__name__}; glocal.datasets.vqa.Questions was expected"
        )
    if not isinstance(questions.pictures, ImageTable):
        given = type(questions.pictures).__name__
        raise InputError(
            f"data: the questions' pictures are a {given}; glocal.datasets.image_table.Pictures was expected"
        )
    _require_kinds(questions.question_types)
    ranges = {
        "picture": range(-1, len(questions.pictures)),
        "word": range(len(questions.words)),
    }  # -1: no picture
    for part, examples in (("training", dataset.train), ("test", dataset.test)):
        for name, tensor in zip(examples._fields, examples, strict=True):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise InputError(
                    f"data: {name} of {part} questions is a {type(tensor).__name__}; a torch.Tensor was expected"
                )
        x, people = examples.x, examples.group
        if x.dim() != 2 or x.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"data: {part} questions are {x.dtype} {tuple(x.shape)}; whole numbers (rows, 1 + words) of int64 were expected"
            )
        if people is None or people.dim() != 2 or len(people) != len(x) or not people.shape[1]:
            shape = "none" if people is None else tuple(people.shape)
            raise InputError(
                f"data: of {len(x)} {part} questions people's answers are {shape}; give them as group (rows, people)"
            )
        for (what, known), numbers in zip(ranges.items(), (x[:, :1], x[:, 1:]), strict=True):
            wrong = numbers[(numbers < known.start) | (numbers >= known.stop)]
            if len(wrong):
                bounds = f"{known.start} to {known.stop - 1}"
                raise InputError(
                    f"data: a {part} question has {what} {int(wrong[0])}; numbers from {bounds} were expected"
                )


def _require_kinds(question_types: object) -> None:
    """Refuse what are no two arrays of whole numbers from 0 on: how questions begin, by which they are dealt out."""
    both = (
        question_types
        if isinstance(question_types, tuple | list) and len(question_types) == 2
        else ()
    )
    if both and all(
        isinstance(each, np.ndarray) and each.dtype.kind in "iu" and each.min(initial=0) >= 0
        for each in both
    ):
        return
    raise InputError(
        f"data: the questions' kinds are {question_types!r:.60}; two NumPy arrays of whole numbers from 0 on were expected"
    )


def refuse_non_vqa_settings(settings: Settings) -> None:
    """Settings that take people's answers or the numbers of pictures for something else."""
    answers = "what stands beside questions are people's answers, nothing to hide"
    for name, experiment in settings.experiments.items():
        if experiment.pretext is not None and experiment.pretext.kind == "adversary":
            raise InputError(
                f"settings: experiments.{name}.pretext is an adversary, and {answers}; leave it out"
            )
    if settings.audit is not None:
        raise InputError(f"settings: audit is given, and {answers}; leave it out")
    if settings.ordinal is not None:
        raise InputError("settings: ordinal is given, and answers have no order; leave it out")
    if settings.plan.max_tokens is not None:
        first = "a question's first number is no word but its picture"
        raise InputError(
            f"settings: plan.max_tokens is {settings.plan.max_tokens}, and {first}; set plan.batch_size instead"
        )


def with_image_control(dataset: Dataset, pictures: str | None) -> Dataset:
    """Questions with their own pictures, or with other questions', so that these say nothing, or with none and so no ResNet."""
    wanted = "own" if pictures is None else pictures
    if wanted not in _CONTROLS:
        raise InputError(
            f"settings: data.pictures is '{wanted}'; {suggest_name(wanted, _CONTROLS)}"
        )
    if wanted == "own" or dataset.questions is None:
        return dataset
    questions = dataset.questions
    if wanted == "none":
        questions = replace(questions, pictures=ImageTable(np.zeros((1, 1), dtype=np.float32)))
    parts = [
        _with_control(examples, wanted, part)
        for part, examples in enumerate((dataset.train, dataset.test))
    ]
    return dataset._replace(train=parts[0], test=parts[1], questions=questions)


def _with_control(examples: Examples, wanted: str, part: int) -> Examples:
    x = examples.x.clone()
    order = torch.from_numpy(make_rng(0, "shuffled pictures", part).permutation(len(x)))
    x[:, 0] = x[order, 0] if wanted == "shuffled" else -1
    return examples._replace(x=x)
