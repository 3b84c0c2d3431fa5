"""Studies of questions about pictures: checks of settings and data, frozen encoders, controls."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

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
_PARTS = ("training", "test")
_NO_PICTURE = -1


def with_frozen_features(
    settings: ModelSettings,
    dataset: Dataset,
    device: Callable[[], torch.device],
    *,
    report: ProgressCallback = no_progress,
) -> Dataset:
    """The data set with features in place of pictures, if the settings name a frozen encoder.

    All seeds have the same encoder, whether it is random or pretrained.
    """
    address = settings.encoder
    if address is not None and ":" not in address:
        raise InputError(
            f"settings: model.encoder is '{address}'; "
            "name a function that makes it, module:function"
        )
    questions = dataset.questions
    if address is None or questions is None or len(questions.pictures.shape) == 1:
        return dataset
    _require_no_resnet_settings(settings, address)
    example = _rows_of(dataset.train, "training")[0]
    request = ModelRequest(settings, example, dataset.classes, questions)
    network = _build_encoder(address, request)
    torch_device = device()

    def features() -> ImageTable:
        return extract_features(questions.pictures, network, torch_device, report=report)

    table = call_user_function(features, address)
    return dataset._replace(questions=replace(questions, pictures=table))


def _build_encoder(address: str, request: ModelRequest) -> nn.Module:
    """The encoder with the same random weights every time; torch's own generator is not moved."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(make_rng(0, "frozen encoder").integers(2**62)))
        return call_model_function(address, "model.encoder", request)


def _require_no_resnet_settings(settings: ModelSettings, address: str) -> None:
    """Refuse settings of a ResNet if the encoder's function does not get the settings."""
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
    if not _model_gets_settings(model):
        unread |= {"model.widths": model.widths, "model.weights": model.weights}
    for name, value in unread.items():
        if value is not None:
            raise InputError(
                f"settings: {name} is {value!r}, and {settings.data.source} has no questions about "
                "pictures; leave it out, or let data.source be vqav2, easy_vqa or questions of "
                "your own"
            )


def _model_gets_settings(model: ModelSettings) -> bool:
    """Whether the model's function gets the settings; it can refuse them itself."""
    return ":" in model.name and takes_request(import_function(model.name, "model.name"))


def require_questions(dataset: Dataset) -> None:
    """Refuse questions that refer to missing pictures or words, or have no people's answers.

    Questions that this package reads from files are right; a user's own may not be.
    """
    questions = dataset.questions
    if questions is None:
        return
    if not isinstance(questions, VQAMetadata):
        given = type(questions).__name__
        raise InputError(
            f"data: the questions are a {given}; glocal.datasets.vqa.VQAMetadata was expected"
        )
    if not isinstance(questions.pictures, ImageTable):
        given = type(questions.pictures).__name__
        raise InputError(
            f"data: the questions' pictures are a {given}; "
            "glocal.datasets.image_table.ImageTable was expected"
        )
    _require_question_types(questions.question_types)
    pictures = range(_NO_PICTURE, len(questions.pictures))
    words = range(len(questions.words))
    for part, examples in zip(_PARTS, (dataset.train, dataset.test), strict=True):
        rows = _require_examples(examples, part)
        _require_known(rows[:, :1], pictures, f"a {part} question has picture")
        _require_known(rows[:, 1:], words, f"a {part} question has word")


def _require_question_types(question_types: object) -> None:
    """Refuse anything but two arrays of integers from 0 on; clients get questions by type."""
    parts = question_types if isinstance(question_types, tuple | list) else ()
    if len(parts) == 2 and all(_is_numbering(types) for types in parts):
        return
    raise InputError(
        f"data: the questions' types are {question_types!r:.60}; "
        "two NumPy arrays of whole numbers from 0 on were expected"
    )


def _is_numbering(types: object) -> bool:
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu":
        return False
    return bool(types.min(initial=0) >= 0)


def _require_examples(examples: Examples, part: str) -> Tensor:
    """The rows of questions; refuse examples of other types or shapes."""
    for name, value in zip(examples._fields, examples, strict=True):
        if value is not None:
            _require_tensor(value, name, part)
    rows = _rows_of(examples, part)
    _require_people(examples.group, len(rows), part)
    return rows


def _require_tensor(value: object, name: str, part: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    given = type(value).__name__
    raise InputError(f"data: {name} of {part} questions is a {given}; a torch.Tensor was expected")


def _rows_of(examples: Examples, part: str) -> Tensor:
    """The rows of questions (rows, 1 + words); refuse inputs that are something else."""
    x = _require_tensor(examples.x, "x", part)
    if x.dim() != 2 or x.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"data: {part} questions are {x.dtype} {tuple(x.shape)}; "
            "whole numbers (rows, 1 + words) of int64 were expected"
        )
    return x


def _require_people(people: Tensor | None, num_questions: int, part: str) -> None:
    """Refuse questions without people's answers, by which accuracy is measured."""
    shape = "none" if people is None else tuple(people.shape)
    if people is None or people.dim() != 2 or len(people) != num_questions or not people.shape[1]:
        raise InputError(
            f"data: of {num_questions} {part} questions people's answers are {shape}; "
            "give them as group (rows, people)"
        )


def _require_known(numbers: Tensor, known: range, subject: str) -> None:
    wrong = numbers[(numbers < known.start) | (numbers >= known.stop)]
    if len(wrong):
        raise InputError(
            f"data: {subject} {int(wrong[0])}; "
            f"numbers from {known.start} to {known.stop - 1} were expected"
        )


def refuse_non_vqa_settings(settings: Settings) -> None:
    """Refuse settings that would take people's answers or picture numbers for something else."""
    answers = "the group of a question is people's answers, no attribute to hide"
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
        raise InputError(
            f"settings: plan.max_tokens is {settings.plan.max_tokens}, and a question's first "
            "number is no word but its picture; set plan.batch_size instead"
        )


def with_image_control(dataset: Dataset, pictures: str | None) -> Dataset:
    """Questions with their own pictures, with those of other questions, or with none.

    Shuffled pictures carry no information about the question. Without pictures there is no ResNet.
    """
    control = "own" if pictures is None else pictures
    if control not in _CONTROLS:
        raise InputError(
            f"settings: data.pictures is '{control}'; {suggest_name(control, _CONTROLS)}"
        )
    if control == "own" or dataset.questions is None:
        return dataset
    questions = dataset.questions
    if control == "none":
        questions = replace(questions, pictures=ImageTable(np.zeros((1, 1), dtype=np.float32)))
    train = _with_control(dataset.train, control, 0)
    test = _with_control(dataset.test, control, 1)
    return dataset._replace(train=train, test=test, questions=questions)


def _with_control(examples: Examples, control: str, part: int) -> Examples:
    """Examples with the pictures of a control; `part` is 0 for training and 1 for test."""
    x = _rows_of(examples, _PARTS[part]).clone()
    order = torch.from_numpy(make_rng(0, "shuffled pictures", part).permutation(len(x)))
    x[:, 0] = x[order, 0] if control == "shuffled" else _NO_PICTURE
    return examples._replace(x=x)
