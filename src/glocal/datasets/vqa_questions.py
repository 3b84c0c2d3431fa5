"""Questions and annotations in the official JSON of VQA v2, plain or gzipped."""

import gzip
import json
import re
import unicodedata
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from glocal.core.errors import InputError, describe_error

ANSWERS_PER_QUESTION = 10
_VERSION = "2.0"
JsonRow = Mapping[str, Any]


class AnnotatedQuestion(NamedTuple):
    """A question as published: its words, its most frequent answer, and ten people's answers."""

    question_id: int
    image_id: int
    words: tuple[str, ...]
    answer: str
    answers: tuple[str, ...]


def read_questions(questions: Path, annotations: Path) -> list[AnnotatedQuestion]:
    """The questions of one pair of files with their answers, matched by id."""
    question_rows = _rows_by_id(questions, "questions")
    annotation_rows = _rows_by_id(annotations, "annotations")
    for question_id in annotation_rows:
        if question_id not in question_rows:
            raise InputError(
                f"data: {annotations} answers question {question_id}, which {questions} does not "
                "ask; give files of one part"
            )
    for question_id in question_rows:
        if question_id not in annotation_rows:
            raise InputError(
                f"data: {questions} asks question {question_id}, which {annotations} does not "
                "answer; give both files"
            )
    parsed: list[AnnotatedQuestion] = []
    for question_id, annotation in annotation_rows.items():
        question = question_rows[question_id]
        parsed.append(_parse_question(question, annotation, questions, annotations))
    return parsed


def tokenize(text: str) -> tuple[str, ...]:
    """The words of a question, in small letters.

    >>> tokenize("Où est l’éléphant? It isn't here.")
    ('où', 'est', "l'éléphant", 'it', "isn't", 'here')
    """
    return tuple(_word_pattern().findall(_normalize_unicode(text).replace("’", "'").lower()))


def _rows_by_id(path: Path, kind: str) -> dict[int, JsonRow]:
    rows: dict[int, JsonRow] = {}
    for row in _read_rows(path, kind):
        question_id = _int_field(row, "question_id", path)
        if question_id in rows:
            raise InputError(
                f"data: {path} has question {question_id} twice; take one of them away"
            )
        rows[question_id] = row
    return rows


def _parse_question(
    question: JsonRow, annotation: JsonRow, questions: Path, annotations: Path
) -> AnnotatedQuestion:
    """One question with its answers."""
    question_id = question["question_id"]
    words = _parse_words(question, question_id, questions)
    label, answers = _parse_answers(annotation, question_id, annotations)
    image_id = _int_field(question, "image_id", questions)
    annotated_id = annotation.get("image_id", image_id)
    if annotated_id != image_id:
        raise InputError(
            f"data: question {question_id} is about picture {annotated_id!r:.40} in "
            f"{annotations} and about {image_id} in {questions}; give files of one part"
        )
    return AnnotatedQuestion(question_id, image_id, words, label, answers)


def _parse_words(question: JsonRow, question_id: int, path: Path) -> tuple[str, ...]:
    text = _field(question, "question", path)
    words = tokenize(text) if isinstance(text, str) else ()
    if not words:
        raise InputError(
            f"data: {path}: question {question_id} is {text!r:.80} and has no words; "
            "write it out, or take it away"
        )
    return words


def _parse_answers(
    annotation: JsonRow, question_id: int, path: Path
) -> tuple[str, tuple[str, ...]]:
    """The most frequent answer and all people's answers."""
    rows = _field(annotation, "answers", path)
    label = _field(annotation, "multiple_choice_answer", path)
    try:
        answers = tuple(_normalize_answer(row["answer"]) for row in rows)
        normalized_label = _normalize_answer(label)
    except (TypeError, KeyError) as error:
        raise InputError(
            f"data: {path}: the answers to question {question_id} are {rows!r:.60}, "
            f"in short {label!r:.20}; ten words were expected"
        ) from error
    _require_answer_count(len(answers), question_id, path)
    return normalized_label, answers


def _require_answer_count(count: int, question_id: int, path: Path) -> None:
    if not 1 <= count <= ANSWERS_PER_QUESTION:
        raise InputError(
            f"data: {path}: question {question_id} has {count} answers; "
            f"1 to {ANSWERS_PER_QUESTION} were expected"
        )


@cache
def _word_pattern() -> re.Pattern[str]:
    """Letters and digits of any script, with their combining marks.

    Python's own class of words lacks such marks, for example the vowel signs of Hindi.
    """
    codes = map(chr, range(0x300, 0x1F000))
    marks = "".join(sign for sign in codes if unicodedata.category(sign)[0] == "M")
    part = rf"[^\W_](?:[^\W_]|[{marks}])*"
    return re.compile(rf"{part}(?:'{part})?")


def _normalize_unicode(text: str) -> str:
    """A letter and its accent as one sign, however it was typed."""
    return unicodedata.normalize("NFC", text)


def _normalize_answer(answer: object) -> str:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(f"{answer!r} is no answer")
    return _normalize_unicode(str(answer)).strip().lower()


def _read_rows(path: Path, kind: str) -> list[JsonRow]:
    """The rows of an official file of version 2; a file may name no version."""
    table = _read_json(path)
    rows = table.get(kind) if isinstance(table, dict) else None
    if not isinstance(rows, list) or not rows:
        raise InputError(
            f"data: {path} holds no list of {kind}; the official file of VQA v2 was expected"
        )
    _require_version(table, path)
    return rows


def _require_version(table: Mapping[str, Any], path: Path) -> None:
    version, info = table.get("version", _VERSION), table.get("info")
    if isinstance(info, dict):
        version = info.get("version", version)
    if str(version) not in (_VERSION, "2"):
        raise InputError(
            f"data: {path} is of version {version!s:.40} of VQA; "
            f"version {_VERSION} was expected, from visualqa.org"
        )


def _read_json(path: Path) -> Any:
    raw = _read_bytes(path)
    try:
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        raise InputError(
            f"data: {path} is no JSON of VQA ({describe_error(error)}); "
            "fetch it again from visualqa.org"
        ) from error


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


def _field(row: JsonRow, name: str, path: Path) -> Any:
    if not isinstance(row, Mapping) or name not in row:
        raise InputError(
            f"data: {path}: a row has no '{name}' ({row!r:.80}); "
            "the official format of VQA v2 was expected"
        )
    return row[name]


def _int_field(row: JsonRow, name: str, path: Path) -> int:
    value = _field(row, name, path)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(
            f"data: {path}: '{name}' is {value!r:.40} in a row ({row!r:.80}); "
            "a whole number was expected"
        )
    return value
