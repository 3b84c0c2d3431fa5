"""Visual question answering: questions about pictures, each with the answers of ten people (Goyal et al. 2017, VQA v2).

Read from the official JSON of questions and annotations, plain or gzipped, and a folder or zip of pictures. An example is a row of
whole numbers, the number of its picture and the words of its question; its label is the commonest answer, and beside it (as
`group`) stand all ten people's, for an answer counts as much as people agree with it.

- Words: those of the training questions, in small letters; 0 is no word, 1 one that no training question has.
- Answers: the 1,000 (or so many) commonest labels of training questions. Where the commonest answer is none of them, the commonest
  of the ten people's that is one is the label. A training question that has none is left out; a test question stays, and counts as
  wrong.
- A question whose picture is not there is left out, and how many are is told by `VQAMetadata.dropped_without_image`.
"""

import gzip
import json
import logging
import lzma
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from glocal.core.data import Examples
from glocal.core.errors import InputError, describe_error
from glocal.core.sampling import IntArray
from glocal.datasets.image_table import ImageTable, decode_images, find_images, row_by_id

QuestionFiles = tuple[str | Path, str | Path]
ANSWERS_PER_QUESTION = 10
_VERSION = "2.0"
_ALLOWED_SIZES = range(1, 2049)  # pixels
_MAX_WORDS = 64  # words: one endless question would make all others as long
_PADDING, _UNKNOWN_WORD = 0, 1
_IMAGE_SIZE = 128  # pixels


class AnnotatedQuestion(NamedTuple):
    """A question as it came: its id, the id of its picture, its words, the label that it came with, and ten people's answers."""

    question_id: int
    image_id: int
    words: tuple[str, ...]
    answer: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class VQAMetadata:
    """What examples refer to: pictures by number, words and answers by place, and how a question begins, which makes its kind.

    `kinds` are those of the training and of the test questions (rows,), numbered alike.
    """

    pictures: ImageTable
    words: tuple[str, ...]
    answers: tuple[str, ...]
    question_types: tuple[IntArray, IntArray]
    dropped_without_image: int = 0
    dropped_without_answer: int = 0


def read_vqa(
    train: Sequence[QuestionFiles],
    test: Sequence[QuestionFiles],
    pictures: str | Path,
    *,
    answers: int = 1000,
    size: int = _IMAGE_SIZE,
) -> tuple[Examples, Examples, VQAMetadata]:
    """From pairs of question and annotation files, and a folder or zip of pictures, each brought to size x size pixels."""
    if isinstance(answers, bool) or not isinstance(answers, int) or answers < 1:
        raise InputError(f"data: answers is {answers!r}; a whole number from 1 on was expected")
    if isinstance(size, bool) or not isinstance(size, int) or size not in _ALLOWED_SIZES:
        raise InputError(
            f"data: size is {size!r}; a whole number from 1 to {_ALLOWED_SIZES[-1]} was expected"
        )
    for part in (train, test):
        _require_pairs(part)
    pictures = Path(pictures)
    there = find_images(pictures)
    parts = [
        [asked for pair in pairs for asked in read_questions(*map(Path, pair))]
        for pairs in (train, test)
    ]
    _require_once(asked for part in parts for asked in part)
    seen = [[asked for asked in part if asked.image_id in there] for part in parts]
    for name, all_asked, kept in zip(("training", "test"), parts, seen, strict=True):
        if not kept:
            lost = all_asked[0]
            raise InputError(
                f"data: {pictures} has the picture of no {name} question (question {lost.question_id} is about {lost.image_id}); "
                "name pictures by their id, such as 000000000009.jpg"
            )
    used = {asked.image_id: there[asked.image_id] for part in seen for asked in part}
    table = decode_images(pictures, [used[image] for image in sorted(used)], size=size)
    missing = sum(map(len, parts)) - sum(map(len, seen))
    prepared = _encode(seen[0], seen[1], row_by_id(used), table, answers=answers, missing=missing)
    if prepared[2].dropped_without_image or prepared[2].dropped_without_answer:
        lines = f"{missing:,} whose picture is not there, {prepared[2].dropped_without_answer:,} for training with none of the answers"
        logging.getLogger("glocal").info("questions left out: %s", lines)
    return prepared


def _require_pairs(pairs: Sequence[QuestionFiles]) -> None:
    """Refuse what is no list of two paths each."""
    if (
        isinstance(pairs, list | tuple)
        and pairs
        and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    ):
        return
    raise InputError(
        f"data: the files are {pairs!r:.80}; a list of pairs was expected, each of a questions and an annotations file"
    )


def _require_once(questions: Iterable[AnnotatedQuestion]) -> None:
    """Refuse a question that several files have: it would count twice, or be trained and tested on."""
    known: set[tuple[int, int, tuple[str, ...]]] = set()
    for asked in questions:
        if asked[:3] in known:  # files of one's own may each number from 0 on
            raise InputError(
                f"data: question {asked.question_id} is in two pairs of files; let each question be in one, of training or of test"
            )
        known.add(asked[:3])


def read_easy_vqa(files: Mapping[str, Path]) -> tuple[Examples, Examples, VQAMetadata]:
    """easy-VQA: one coloured shape on each picture, 13 answers; the one answer stands for ten people's."""
    parts, tables, first = [], [], 0
    for part in ("train", "test"):
        pixels = np.load(
            BytesIO(lzma.decompress(files[f"{part}_images.npy.xz"].read_bytes())),
            allow_pickle=False,
        )
        told = json.loads(lzma.decompress(files[f"{part}_questions.json.xz"].read_bytes()))
        parts.append(
            [_easy_vqa_question(number, *row, first=first) for number, row in enumerate(told)]
        )
        tables.append(pixels.transpose(0, 3, 1, 2))
        first += len(pixels)
    table = ImageTable(np.ascontiguousarray(np.concatenate(tables)))
    places = {image: image for image in range(first)}
    return _encode(
        parts[0],
        parts[1],
        places,
        table,
        answers=len({asked.answer for asked in parts[0]}),
        missing=0,
    )


def read_questions(questions: Path, annotations: Path) -> list[AnnotatedQuestion]:
    """The questions of one pair of files with their answers, matched by id."""
    asked, answered = _by_id(questions, "questions"), _by_id(annotations, "annotations")
    found = []
    for number, row in answered.items():
        if number not in asked:
            raise InputError(
                f"data: {annotations} answers question {number}, which {questions} does not ask; give files of one part"
            )
        found.append(_parse_question(asked.pop(number), row, questions, annotations))
    if asked:
        raise InputError(
            f"data: {questions} asks question {next(iter(asked))}, which {annotations} does not answer; give both files"
        )
    return found


def _by_id(path: Path, kind: str) -> dict[int, Mapping[str, Any]]:
    found: dict[int, Mapping[str, Any]] = {}
    for row in _read_rows(path, kind):
        number = _int_field(row, "question_id", path)
        if number in found:
            raise InputError(f"data: {path} has question {number} twice; take one of them away")
        found[number] = row
    return found


def _parse_question(
    question: Mapping[str, Any], annotation: Mapping[str, Any], questions: Path, annotations: Path
) -> AnnotatedQuestion:
    number, text = question["question_id"], _field(question, "question", questions)
    words = _tokenize(text) if isinstance(text, str) else ()
    if not words:
        raise InputError(
            f"data: {questions}: question {number} is {text!r:.80} and has no words; write it out, or take it away"
        )
    answers, label = (
        _field(annotation, name, annotations) for name in ("answers", "multiple_choice_answer")
    )
    try:
        people, label = (
            tuple(_normalize_answer(each["answer"]) for each in answers),
            _normalize_answer(label),
        )
    except (TypeError, KeyError) as error:
        said = f"{answers!r:.60}, in short {label!r:.20}"
        raise InputError(
            f"data: {annotations}: the answers to question {number} are {said}; ten words were expected"
        ) from error
    if not 1 <= len(people) <= ANSWERS_PER_QUESTION:
        raise InputError(
            f"data: {annotations}: question {number} has {len(people)} answers; 1 to {ANSWERS_PER_QUESTION} were expected"
        )
    picture = _int_field(question, "image_id", questions)
    if annotation.get("image_id", picture) != picture:
        about = f"about picture {annotation['image_id']!r:.40} in {annotations} and about {picture} in {questions}"
        raise InputError(f"data: question {number} is {about}; give files of one part")
    return AnnotatedQuestion(number, picture, words, label, people)


def _easy_vqa_question(
    number: int, text: str, answer: str, image: int, *, first: int
) -> AnnotatedQuestion:
    return AnnotatedQuestion(
        number, first + image, _tokenize(text), answer, (answer,) * ANSWERS_PER_QUESTION
    )


def _tokenize(text: str) -> tuple[str, ...]:
    """The words of a question, in small letters.

    >>> _tokenize("Où est l’éléphant? It isn't here.")
    ('où', 'est', "l'éléphant", 'it', "isn't", 'here')
    """
    return tuple(_word_pattern().findall(_normalize_unicode(text).replace("’", "'").lower()))


@cache
def _word_pattern() -> re.Pattern[str]:
    """Letters and figures of any script with the marks on them, such as vowel signs, which Python's own class of words lacks."""
    marks = "".join(
        chr(code) for code in range(0x300, 0x1F000) if unicodedata.category(chr(code))[0] == "M"
    )
    within = rf"[^\W_](?:[^\W_]|[{marks}])*"
    return re.compile(rf"{within}(?:'{within})?")


def _normalize_unicode(text: str) -> str:
    """A letter and its accent as one sign, however it was typed."""
    return unicodedata.normalize("NFC", text)


def _normalize_answer(answer: object) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"{answer!r} is no answer")
    return _normalize_unicode(str(answer)).strip().lower()


def _read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"data: {path} cannot be read ({error.strerror}); give the official file of VQA v2"
        ) from error
    if raw[:4] == b"PK\x03\x04":
        raise InputError(f"data: {path} is a zip; unpack it, and give the JSON in it")
    return raw


def _read_rows(path: Path, kind: str) -> list[Mapping[str, Any]]:
    """The rows of an official file of version 2; the course's files name none."""
    raw = _read_bytes(path)
    try:
        table = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        raise InputError(
            f"data: {path} is no JSON of VQA ({describe_error(error)}); fetch it again from visualqa.org"
        ) from error
    if not isinstance(table, dict) or not isinstance(table.get(kind), list) or not table[kind]:
        raise InputError(
            f"data: {path} holds no list of {kind}; the official file of VQA v2 was expected"
        )
    info = table.get("info")
    version = str(
        {"version": _VERSION, **table, **(info if isinstance(info, dict) else {})}["version"]
    )
    if version not in (_VERSION, "2"):
        raise InputError(
            f"data: {path} is of version {version:.40} of VQA; version {_VERSION} was expected, from visualqa.org"
        )
    rows: list[Mapping[str, Any]] = table[kind]
    return rows


def _field(row: Mapping[str, Any], name: str, path: Path) -> Any:
    if not isinstance(row, Mapping) or name not in row:
        raise InputError(
            f"data: {path}: a row has no '{name}' ({row!r:.80}); the official format of VQA v2 was expected"
        )
    return row[name]


def _int_field(row: Mapping[str, Any], name: str, path: Path) -> int:
    number = _field(row, name, path)
    if not isinstance(number, int) or isinstance(number, bool):
        raise InputError(
            f"data: {path}: '{name}' is {number!r:.40} in a row ({row!r:.80}); a whole number was expected"
        )
    return number


def _encode(
    train: Sequence[AnnotatedQuestion],
    test: Sequence[AnnotatedQuestion],
    places: Mapping[int, int],
    table: ImageTable,
    *,
    answers: int,
    missing: int,
) -> tuple[Examples, Examples, VQAMetadata]:
    """Rows of numbers, by the words and answers of the training questions."""
    known = tuple(
        answer for answer, _ in Counter(asked.answer for asked in train).most_common(answers)
    )
    place_of = {answer: place for place, answer in enumerate(known)}
    learnt = [asked for asked in train if _label(asked, place_of) is not None]
    words = ("", "?", *sorted({word for asked in learnt for word in asked.words}))
    longest = min(_MAX_WORDS, max(len(asked.words) for asked in learnt))
    number_of = {word: number for number, word in enumerate(words)}
    examples = [_examples(part, places, number_of, place_of, longest) for part in (learnt, test)]
    question_types = _question_types(
        [[" ".join(asked.words[:2]) for asked in part] for part in (learnt, test)]
    )
    return (
        examples[0],
        examples[1],
        VQAMetadata(table, words, known, question_types, missing, len(train) - len(learnt)),
    )


def _label(asked: AnnotatedQuestion, place_of: Mapping[str, int]) -> int | None:
    for answer in (asked.answer, *(answer for answer, _ in Counter(asked.answers).most_common())):
        if answer in place_of:
            return place_of[answer]
    return None


def _examples(
    part: Iterable[AnnotatedQuestion],
    places: Mapping[int, int],
    number_of: Mapping[str, int],
    place_of: Mapping[str, int],
    longest: int,
) -> Examples:
    """x (rows, 1 + longest): picture and words, longer questions cut; y (rows,); group (rows, 10): people's answers or -1."""
    rows, labels, people = [], [], []
    for asked in part:
        spoken = [number_of.get(word, _UNKNOWN_WORD) for word in asked.words[:longest]]
        rows.append([places[asked.image_id], *spoken, *[_PADDING] * (longest - len(spoken))])
        labels.append(
            _label(asked, place_of) or 0
        )  # of a test question that nobody can get right any will do
        said = [place_of.get(answer, -1) for answer in asked.answers]
        people.append([*said, *[-1] * (ANSWERS_PER_QUESTION - len(said))])
    return Examples(*(torch.tensor(column, dtype=torch.int64) for column in (rows, labels, people)))


def _question_types(beginnings: Sequence[Sequence[str]]) -> tuple[IntArray, IntArray]:
    known = {
        name: number
        for number, name in enumerate(sorted({name for part in beginnings for name in part}))
    }
    train, test = (np.array([known[name] for name in part], dtype=np.int64) for part in beginnings)
    return train, test
