"""Texts with their writers' own ratings: the SemEval-2026 mood essays, or a CSV like MAPS.

Liang et al. 2020 predict mood from what adolescents typed (MAPS, private). The public stand-in is
SemEval-2026 Task 2: people write how they feel and rate their valence from -2 to 2. No text is ever
printed, logged or stored: errors name the file and the row only.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from glocal.core.data import ClientData, Examples, Rows, hold_out
from glocal.core.errors import InputError
from glocal.datasets.federated import FederatedData

CLASSES = 5
VOCABULARY_SIZE = 2000  # with 0, no word, and 1, an unknown word
MAX_WORDS = 80  # words of a text that are read
TEST_SHARE = 0.1
UNKNOWN_WORD = 1
_WORD = re.compile(r"[\w']+|[^\w\s]")
_WRONG_COLUMNS = "it has another number of columns than the first row; quote texts that hold commas"
Words = tuple[str, ...]


class Texts(NamedTuple):
    """The words, the writer and the class of every text; class 0 is the lowest mood."""

    words: tuple[Words, ...]
    person: tuple[str, ...]
    y: npt.NDArray[np.int64]

    def __repr__(self) -> str:
        """The numbers of texts and people, and never a word."""
        return f"Texts({len(self.words)} texts of {len({*self.person})} people)"


class CsvFormat(NamedTuple):
    """The columns of a CSV file, and the function from a rating (and its place) to a class."""

    person: str
    text: str
    rating: str
    classify: Callable[[str, str], int]

    def columns(self) -> tuple[str, str, str]:
        """The columns to read."""
        return self.person, self.text, self.rating


class _SplitRows(NamedTuple):
    """Every client's rows for training, validation and test."""

    train: list[Rows]
    val: list[Rows]
    test: list[Rows]


def read_texts(paths: Iterable[Path]) -> Texts:
    """The texts of several files in one form, one file after the other.

    Valence goes from -2 to 2, mood from 1 to 100 in five equal bins. A text without a word stays,
    as one unknown word: an empty text may also mean something.
    """
    files = [*paths]
    rows = [*chain.from_iterable(map(_read_rows, files))]
    if not rows:
        raise InputError(
            f"data: {', '.join(map(str, files))}: there is no text below the columns; "
            "give every text a row"
        )
    words, person, y = zip(*rows, strict=True)
    return Texts(words, person, np.array(y, dtype=np.int64))


def tokenize(text: str) -> Words:
    """The words of a text in small letters, and its punctuation marks.

    >>> tokenize("Can't sleep, AGAIN!")
    ("can't", 'sleep', ',', 'again', '!')
    """
    return tuple(_WORD.findall(text.lower()))


def partition_texts(
    texts: Texts, *, seeds: Sequence[int], people: int | None = None, validation: float = 0.1
) -> tuple[FederatedData, ...]:
    """One client per person, those with most texts first, for several seeds.

    For each seed a random tenth of every person's texts is the test set. The vocabulary is that of
    the seed's training texts, so each seed numbers the words in its own way. All seeds' texts lie
    in one store, one seed after the other, so that seeds can be trained side by side.
    """
    rows = _rows_by_person(texts)
    _require_people(people, len(rows))
    parts = [_split_rows(rows[:people], validation=validation, seed=seed) for seed in seeds]
    store = _store(texts, parts)
    federated: list[FederatedData] = []
    for place, part in enumerate(parts):
        federated.append(_federated_data(store, part, place * len(texts.y)))
    return tuple(federated)


def build_vocabulary(texts: Texts, rows: Rows) -> dict[str, int]:
    """The most frequent words of some texts, numbered from 2 on; ties in alphabetical order."""
    counts: Counter[str] = Counter()
    for row in rows.tolist():
        counts.update(texts.words[row])
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    first = UNKNOWN_WORD + 1
    return {word: number for number, word in enumerate(ranked[: VOCABULARY_SIZE - first], first)}


def _require_people(people: int | None, available: int) -> None:
    if people is not None and not 1 <= people <= available:
        raise InputError(
            f"settings: data.keep_clients is {people}; it must be from 1 to {available}"
        )


def _store(texts: Texts, parts: Sequence[_SplitRows]) -> Examples:
    """All texts once per seed, in the numbers of that seed's vocabulary."""
    vocabularies = [build_vocabulary(texts, np.concatenate(part.train)) for part in parts]
    x = np.concatenate([_encode(texts, vocabulary) for vocabulary in vocabularies])
    return Examples(torch.from_numpy(x), torch.from_numpy(np.tile(texts.y, len(parts))))


def _rows_by_person(texts: Texts) -> list[Rows]:
    """Every person's rows, most texts first; ties in alphabetical order."""
    names, owner = np.unique(np.array(texts.person), return_inverse=True)
    rows = [np.flatnonzero(owner == person) for person in range(len(names))]
    return sorted(rows, key=len, reverse=True)


def _split_rows(people: Sequence[Rows], *, validation: float, seed: int) -> _SplitRows:
    """Hold out test and validation rows; a person with few texts may have none of them."""
    parts = _SplitRows([], [], [])
    for client, rows in enumerate(people):
        rest, test = hold_out(rows, TEST_SHARE, seed, "test", client)
        share = validation / (1 - TEST_SHARE)
        train, val = hold_out(rest, share, seed, "validation", client)
        parts.train.append(train)
        parts.val.append(val)
        parts.test.append(test)
    return parts


def _encode(texts: Texts, vocabulary: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Every text in numbers (texts, MAX_WORDS), 0 after its last word."""
    x = np.zeros((len(texts.words), MAX_WORDS), dtype=np.int64)
    for row, words in zip(x, texts.words, strict=True):
        numbers = _encode_words(words[:MAX_WORDS], vocabulary)
        row[: len(numbers)] = numbers
    return x


def _encode_words(words: Words, vocabulary: Mapping[str, int]) -> list[int]:
    """The numbers of the words; one unknown word if there are none."""
    numbers = [vocabulary.get(word, UNKNOWN_WORD) for word in words]
    return numbers or [UNKNOWN_WORD]


def _federated_data(store: Examples, parts: _SplitRows, start: int) -> FederatedData:
    """One seed's part of the store, whose rows begin at `start`."""
    train, val, test = (_shift(store, rows, start) for rows in parts)
    return FederatedData(train, val, test)


def _shift(store: Examples, clients: Sequence[Rows], start: int) -> ClientData:
    return ClientData(store, tuple(rows + start for rows in clients))


def _read_rows(path: Path) -> Iterator[tuple[Words, str, int]]:
    """Words, person and class of every row of a file.

    `strict` matters: without it a quote that is never closed takes all rows below into its text.
    """
    reader = csv.DictReader(io.StringIO(_read_file(path), newline=""), strict=True)
    try:
        csv_format = _detect_format(path, reader.fieldnames or ())
        for row in reader:
            yield _parse_row(row, csv_format, f"data: {path}, row {reader.line_num}")
    except csv.Error as error:
        raise InputError(
            f"data: {path}, from row {reader.line_num + 1} on: it cannot be read ({error}); "
            "close its quotes, double those within, and shorten texts above "
            f"{csv.field_size_limit():,} letters"
        ) from None


def _parse_row(
    row: Mapping[str | None, str | None], csv_format: CsvFormat, where: str
) -> tuple[Words, str, int]:
    """Words, person and class of a row; DictReader puts what a row has too much under None."""
    person, text, rating = (row[column] for column in csv_format.columns())
    if None in row or person is None or text is None or rating is None:
        raise InputError(
            f"{where}: it has another number of columns than the first row; "
            "quote texts that hold commas"
        )
    _require_person(person, csv_format.person, where)
    label = csv_format.classify(rating, f"{where}: {csv_format.rating}")
    return tokenize(text), person.strip(), label


def _require_person(person: str, column: str, where: str) -> None:
    if not person.strip():
        raise InputError(f"{where}: {column} is empty; every text needs a person")


def _read_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"data: {path} could not be read ({error.strerror}); "
            f"give a CSV with {', '.join(_MAPS.columns())}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        # Without `from None` the traceback would show the text.
        raise InputError(
            f"data: {path}, row {line}: it is not UTF-8; save the file with that encoding"
        ) from None


def _detect_format(path: Path, columns: Sequence[str]) -> CsvFormat:
    """The format whose columns are all there."""
    for csv_format in (_ESSAYS, _MAPS):
        if {*csv_format.columns()} <= {*columns}:
            _require_distinct_columns(path, columns, csv_format)
            return csv_format
    maps, essays = ", ".join(_MAPS.columns()), ", ".join(_ESSAYS.columns())
    raise InputError(f"data: {path}, row 1: columns {maps} or {essays} were expected")


def _require_distinct_columns(path: Path, columns: Sequence[str], csv_format: CsvFormat) -> None:
    names = csv_format.columns()
    if any(columns.count(name) > 1 for name in names):
        raise InputError(
            f"data: {path}, row 1: a column of {', '.join(names)} is there twice; keep one of each"
        )


def _valence_class(text: str, where: str) -> int:
    """-2 to 2, as in the questionnaire."""
    value = _parse_float(text, where, "a whole number from -2 to 2")
    if value not in range(-2, 3):
        raise InputError(f"{where} is {value:g}; a whole number from -2 to 2 was expected")
    return int(value) + 2


def _mood_class(text: str, where: str) -> int:
    """1 to 100 in five equal bins: up to 20, 40, 60, 80, 100."""
    value = _parse_float(text, where, "a number from 1 to 100")
    if not 1 <= value <= 100:
        raise InputError(f"{where} is {value:g}; a number from 1 to 100 was expected")
    return min(CLASSES - 1, int(np.ceil(value / 20)) - 1)


def _parse_float(text: str, where: str, expected: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Neither the message nor the traceback shows the value: it may be a text in a wrong column.
        raise InputError(f"{where} is no number; {expected} was expected") from None


_ESSAYS = CsvFormat("user_id", "text", "valence", _valence_class)
_MAPS = CsvFormat("person", "text", "mood", _mood_class)
