"""Visual question answering: questions about pictures, each with ten people's answers.

The format is VQA v2 (Goyal et al. 2017): the official JSON of questions and annotations, and a
folder or zip of pictures. An example is a row of whole numbers: the number of its picture, and the
words of its question. Its label is the most frequent answer. Its `group` holds all ten people's
answers, because an answer counts by the number of people who agree with it.

- Words are those of the training questions, in small letters. 0 is no word, and 1 is a word that no
  training question has.
- Answers are the most frequent labels of training questions, usually 1,000. If a question's label
  is none of them, the most frequent of its ten answers that is one becomes the label. A training
  question without any is left out. A test question without any stays, and counts as wrong.
- A question without its picture is left out. `VQAMetadata.dropped_without_image` is their number.
"""

import json
import logging
import lzma
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.sampling import IntArray
from glocal.datasets.cache import Array
from glocal.datasets.image_table import ImageTable, decode_images, find_images, row_by_id
from glocal.datasets.vqa_questions import (
    ANSWERS_PER_QUESTION,
    AnnotatedQuestion,
    read_questions,
    tokenize,
)

QuestionFiles = tuple[str | Path, str | Path]
Questions = Sequence[AnnotatedQuestion]
_ALLOWED_SIZES = range(1, 2049)  # pixels
_MAX_WORDS = 64  # one endless question would make all others as long
_PADDING, _UNKNOWN_WORD = 0, 1
_NO_ANSWER = -1
_IMAGE_SIZE = 128  # pixels


@dataclass(frozen=True)
class VQAMetadata:
    """What the numbers in examples stand for: pictures, words and answers, each by its place.

    `question_types` are those of the training and of the test questions (rows,), numbered alike. A
    question's type is its first two words.
    """

    pictures: ImageTable
    words: tuple[str, ...]
    answers: tuple[str, ...]
    question_types: tuple[IntArray, IntArray]
    dropped_without_image: int = 0
    dropped_without_answer: int = 0


class _Encoding(NamedTuple):
    """The numbers of pictures, words and answers, and the length of the longest question."""

    pictures: Mapping[int, int]
    words: Mapping[str, int]
    answers: Mapping[str, int]
    length: int


def read_vqa(
    train: Sequence[QuestionFiles],
    test: Sequence[QuestionFiles],
    pictures: str | Path,
    *,
    answers: int = 1000,
    size: int = _IMAGE_SIZE,
) -> tuple[Examples, Examples, VQAMetadata]:
    """Training and test examples, and what their numbers stand for.

    `train` and `test` are pairs of question and annotation files. `pictures` is a folder or a zip;
    each picture is resized to size x size pixels.
    """
    _require_options(answers, size)
    _require_pairs(train)
    _require_pairs(test)
    folder = Path(pictures)
    names = find_images(folder)
    all_train, all_test = _read_parts(train, test)
    train_questions = _with_picture(all_train, names, folder, "training")
    test_questions = _with_picture(all_test, names, folder, "test")
    names = _used_pictures([*train_questions, *test_questions], names)
    table = decode_images(folder, [*names.values()], size=size)
    rows = row_by_id(names)
    examples = _encode(train_questions, test_questions, table, rows, max_answers=answers)
    present = len(train_questions) + len(test_questions)
    return _count_dropped(examples, len(all_train) + len(all_test) - present)


def read_easy_vqa(files: Mapping[str, Path]) -> tuple[Examples, Examples, VQAMetadata]:
    """easy-VQA: one coloured shape per picture, 13 answers; one answer stands for ten people's."""
    train_pixels, test_pixels = _easy_vqa_pixels(files, "train"), _easy_vqa_pixels(files, "test")
    train = _easy_vqa_questions(files, "train", first_picture=0)
    test = _easy_vqa_questions(files, "test", first_picture=len(train_pixels))
    table = ImageTable(np.ascontiguousarray(np.concatenate([train_pixels, test_pixels])))
    rows = {row: row for row in range(len(table))}
    answers = {question.answer for question in train}
    return _encode(train, test, table, rows, max_answers=len(answers))


def _require_options(answers: int, size: int) -> None:
    if not _is_whole(answers) or answers < 1:
        raise InputError(f"data: answers is {answers!r}; a whole number from 1 on was expected")
    if not _is_whole(size) or size not in _ALLOWED_SIZES:
        raise InputError(
            f"data: size is {size!r}; a whole number from 1 to {_ALLOWED_SIZES[-1]} was expected"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_pairs(pairs: Sequence[QuestionFiles]) -> None:
    """Refuse anything but a list of pairs of paths."""
    is_list = isinstance(pairs, list | tuple) and len(pairs) > 0
    if is_list and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return
    raise InputError(
        f"data: the files are {pairs!r:.80}; a list of pairs was expected, "
        "each of a questions and an annotations file"
    )


def _read_parts(
    train: Sequence[QuestionFiles], test: Sequence[QuestionFiles]
) -> tuple[list[AnnotatedQuestion], list[AnnotatedQuestion]]:
    """All training and all test questions, each of them once."""
    train_questions, test_questions = _read_all(train), _read_all(test)
    _require_distinct([*train_questions, *test_questions])
    return train_questions, test_questions


def _read_all(pairs: Sequence[QuestionFiles]) -> list[AnnotatedQuestion]:
    questions: list[AnnotatedQuestion] = []
    for question_file, annotation_file in pairs:
        questions += read_questions(Path(question_file), Path(annotation_file))
    return questions


def _require_distinct(questions: Iterable[AnnotatedQuestion]) -> None:
    """Refuse a question that is in several files: it would count twice, or be in training and test.

    Ids alone do not tell: a user's own files may each number their questions from 0 on.
    """
    known: set[tuple[int, int, tuple[str, ...]]] = set()
    for question in questions:
        key = (question.question_id, question.image_id, question.words)
        if key in known:
            raise InputError(
                f"data: question {question.question_id} is in two pairs of files; "
                "let each question be in one, of training or of test"
            )
        known.add(key)


def _with_picture(
    questions: Questions, names: Mapping[int, str], source: Path, part: str
) -> list[AnnotatedQuestion]:
    """The questions whose picture is there."""
    present = [question for question in questions if question.image_id in names]
    if not present:
        first = questions[0]
        raise InputError(
            f"data: {source} has the picture of no {part} question (question {first.question_id} "
            f"is about {first.image_id}); name pictures by their id, such as 000000000009.jpg"
        )
    return present


def _used_pictures(
    questions: Iterable[AnnotatedQuestion], names: Mapping[int, str]
) -> dict[int, str]:
    """The names of the pictures that questions are about, in ascending order of ids."""
    used = {question.image_id for question in questions}
    return {image_id: names[image_id] for image_id in sorted(used)}


def _count_dropped(
    examples: tuple[Examples, Examples, VQAMetadata], without_image: int
) -> tuple[Examples, Examples, VQAMetadata]:
    """Enter the number of questions without a picture, and log all that were left out."""
    train, test, metadata = examples
    without_answer = metadata.dropped_without_answer
    if without_image or without_answer:
        logging.getLogger("glocal").info(
            "questions left out: %s without their picture, %s for training without a known answer",
            f"{without_image:,}",
            f"{without_answer:,}",
        )
    return train, test, replace(metadata, dropped_without_image=without_image)


def _easy_vqa_pixels(files: Mapping[str, Path], part: str) -> Array:
    """The pictures of one part (pictures, 3, height, width)."""
    raw = lzma.decompress(files[f"{part}_images.npy.xz"].read_bytes())
    pixels: Array = np.load(BytesIO(raw), allow_pickle=False)
    return pixels.transpose(0, 3, 1, 2)


def _easy_vqa_questions(
    files: Mapping[str, Path], part: str, *, first_picture: int
) -> list[AnnotatedQuestion]:
    questions: list[AnnotatedQuestion] = []
    for question_id, (text, answer, picture) in enumerate(_easy_vqa_rows(files, part)):
        image_id, answers = first_picture + picture, (answer,) * ANSWERS_PER_QUESTION
        words = tokenize(text)
        questions.append(AnnotatedQuestion(question_id, image_id, words, answer, answers))
    return questions


def _easy_vqa_rows(files: Mapping[str, Path], part: str) -> list[tuple[str, str, int]]:
    """Question, answer and number of the picture, counted within the part."""
    packed = files[f"{part}_questions.json.xz"].read_bytes()
    rows: list[tuple[str, str, int]] = json.loads(lzma.decompress(packed))
    return rows


def _encode(
    train: Questions,
    test: Questions,
    table: ImageTable,
    pictures: Mapping[int, int],
    *,
    max_answers: int,
) -> tuple[Examples, Examples, VQAMetadata]:
    """Rows of numbers, by the words and the answers of the training questions."""
    answers = _frequent_answers(train, max_answers)
    answer_numbers = _numbers(answers)
    answered = [question for question in train if _label(question, answer_numbers) is not None]
    words, length = _vocabulary(answered), _longest(answered)
    encoding = _Encoding(pictures, _numbers(words), answer_numbers, length)
    question_types = _question_types(answered, test)
    metadata = VQAMetadata(
        table,
        words,
        answers,
        question_types,
        dropped_without_answer=len(train) - len(answered),
    )
    return _examples(answered, encoding), _examples(test, encoding), metadata


def _frequent_answers(questions: Questions, number: int) -> tuple[str, ...]:
    """The most frequent labels; ties in order of appearance."""
    return tuple(_by_frequency(question.answer for question in questions)[:number])


def _by_frequency(answers: Iterable[str]) -> list[str]:
    """Distinct answers, the most frequent first; ties in order of appearance."""
    return [answer for answer, _ in Counter(answers).most_common()]


def _longest(questions: Questions) -> int:
    """The length of the longest question, at most 64 words."""
    return min(_MAX_WORDS, max(len(question.words) for question in questions))


def _vocabulary(questions: Questions) -> tuple[str, ...]:
    """The words of some questions in alphabetical order, after padding and the unknown word."""
    words: set[str] = set()
    for question in questions:
        words.update(question.words)
    return "", "?", *sorted(words)


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _label(question: AnnotatedQuestion, answers: Mapping[str, int]) -> int | None:
    """The number of a question's label, else of its most frequent answer that has one."""
    if question.answer in answers:
        return answers[question.answer]
    for answer in _by_frequency(question.answers):
        if answer in answers:
            return answers[answer]
    return None


def _examples(questions: Questions, encoding: _Encoding) -> Examples:
    """The rows of some questions.

    x (rows, 1 + length) is picture and words, y (rows,) the label, and group (rows, 10) people's
    answers or -1. Longer questions are cut. A test question without a known answer may have any
    label, because its group makes every answer wrong.
    """
    x: list[list[int]] = []
    y: list[int] = []
    group: list[list[int]] = []
    for question in questions:
        x.append(_inputs(question, encoding))
        y.append(_label(question, encoding.answers) or 0)
        group.append(_people_answers(question, encoding.answers))
    return Examples(_int_tensor(x), _int_tensor(y), _int_tensor(group))


def _inputs(question: AnnotatedQuestion, encoding: _Encoding) -> list[int]:
    """The number of the picture and those of the words, padded."""
    words = question.words[: encoding.length]
    numbers = [encoding.words.get(word, _UNKNOWN_WORD) for word in words]
    return [encoding.pictures[question.image_id], *_pad(numbers, encoding.length, _PADDING)]


def _people_answers(question: AnnotatedQuestion, answers: Mapping[str, int]) -> list[int]:
    """The numbers of ten people's answers, -1 for one without."""
    numbers = [answers.get(answer, _NO_ANSWER) for answer in question.answers]
    return _pad(numbers, ANSWERS_PER_QUESTION, _NO_ANSWER)


def _pad(values: list[int], length: int, padding: int) -> list[int]:
    return values + [padding] * (length - len(values))


def _int_tensor(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _question_types(train: Questions, test: Questions) -> tuple[IntArray, IntArray]:
    """The number of every question's first two words, in alphabetical order of all questions'."""
    names = [" ".join(question.words[:2]) for question in (*train, *test)]
    _, numbers = np.unique(np.array(names), return_inverse=True)
    return numbers[: len(train)].astype(np.int64), numbers[len(train) :].astype(np.int64)
