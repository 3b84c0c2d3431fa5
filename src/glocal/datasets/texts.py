"""Texts with the writer's own rating, person by person: the SemEval-2026 mood essays, or a CSV in the form of MAPS.

Liang et al. 2020 predict mood from what adolescents typed (MAPS, private). The public stand-in is SemEval-2026 Task 2: people who
wrote how they feel and rated their valence from -2 to 2. No text is ever printed, logged or kept: errors name file and row only.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from glocal.core.data import ClientData, Examples, Rows, hold_out
from glocal.core.errors import InputError
from glocal.datasets.federated import FederatedData

CLASSES = 5
VOCABULARY_SIZE = 2000  # numbers of words, 0 for no word and 1 for an unknown one among them
MAX_WORDS = 80  # words of a text that are read
TEST_SHARE = 0.1
UNKNOWN_WORD = 1
_WORD = re.compile(r"[\w']+|[^\w\s]")
_ESSAYS = ("user_id", "text", "valence")
_MAPS = ("person", "text", "mood")
_CSV_HINT = f"close its quotes, double those within, and shorten texts above {csv.field_size_limit():,} letters"
Words = tuple[str, ...]


class Texts(NamedTuple):
    """Who wrote what and felt how: words of every text, its writer, and its class, the lowest mood 0."""

    words: tuple[Words, ...]
    person: tuple[str, ...]
    y: npt.NDArray[np.int64]

    def __repr__(self) -> str:
        """How many there are: never what they say."""
        return f"Texts({len(self.words)} texts of {len({*self.person})} people)"


def read_texts(paths: Iterable[Path]) -> Texts:
    """The texts of several files of one form, one file after the other: valence -2 to 2, or mood 1 to 100 in five equal bins.

    A text without a word is kept, as one unknown word: that nothing was written may say something too.
    """
    files = [*paths]
    rows = [row for path in files for row in _read_rows(path)]
    if not rows:
        raise InputError(
            f"data: {', '.join(map(str, files))}: there is no text below the columns; give every text a row"
        )
    words, person, y = zip(*rows, strict=True)
    return Texts(tuple(words), tuple(person), np.array(y, dtype=np.int64))


def tokenize(text: str) -> Words:
    """A text as words in small letters and marks.

    >>> tokenize("Can't sleep, AGAIN!")
    ("can't", 'sleep', ',', 'again', '!')
    """
    return tuple(_WORD.findall(text.lower()))


def partition_texts(
    texts: Texts, *, seeds: Sequence[int], people: int | None = None, validation: float = 0.1
) -> tuple[FederatedData, ...]:
    """A device for each person, those with most texts first; for every seed other tests, a tenth of a person's texts, at random.

    The vocabulary is that of a seed's training texts, so that every seed reads the texts in its own numbers; all lie in one store,
    one seed's after the other's, so that seeds can be trained side by side.
    """
    owners = _rows_by_person(texts)
    if people is not None and not 1 <= people <= len(owners):
        raise InputError(
            f"settings: data.keep_clients is {people}; it must be from 1 to {len(owners)}"
        )
    kept = owners[:people]
    parts = [_split_rows(kept, validation=validation, seed=seed) for seed in seeds]
    x = [_encode(texts, build_vocabulary(texts, np.concatenate(train))) for train, _, _ in parts]
    store = Examples(
        torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.tile(texts.y, len(seeds)))
    )
    return tuple(
        _federated_data(store, part, place * len(texts.y)) for place, part in enumerate(parts)
    )


def build_vocabulary(texts: Texts, rows: Rows) -> dict[str, int]:
    """The most frequent words of some texts, numbered from 2 on; of equally frequent ones the first in the alphabet."""
    counts = Counter(word for row in rows.tolist() for word in texts.words[row])
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {
        word: number
        for number, word in enumerate(
            ranked[: VOCABULARY_SIZE - UNKNOWN_WORD - 1], start=UNKNOWN_WORD + 1
        )
    }


def _rows_by_person(texts: Texts) -> list[Rows]:
    """Everybody's rows, those of whoever wrote most first; of equals, the first in the alphabet."""
    names, owner = np.unique(np.array(texts.person), return_inverse=True)
    rows = [np.flatnonzero(owner == place) for place in range(len(names))]
    return sorted(rows, key=len, reverse=True)


def _split_rows(
    owners: Sequence[Rows], *, validation: float, seed: int
) -> tuple[list[Rows], list[Rows], list[Rows]]:
    """Everybody's rows to train on, to choose on and to be tested on; whoever has few may have none of the latter two."""
    apart = [hold_out(rows, TEST_SHARE, seed, "test", client) for client, rows in enumerate(owners)]
    rest = [
        hold_out(kept, validation / (1 - TEST_SHARE), seed, "validation", client)
        for client, (kept, _) in enumerate(apart)
    ]
    return [train for train, _ in rest], [val for _, val in rest], [test for _, test in apart]


def _encode(texts: Texts, known: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Every text in numbers (texts, LENGTH), 0 after its last word."""
    x = np.zeros((len(texts.words), MAX_WORDS), dtype=np.int64)
    for row, words in zip(x, texts.words, strict=True):
        numbers = [known.get(word, UNKNOWN_WORD) for word in words[:MAX_WORDS]] or [UNKNOWN_WORD]
        row[: len(numbers)] = numbers
    return x


def _federated_data(
    store: Examples, parts: tuple[list[Rows], list[Rows], list[Rows]], start: int
) -> FederatedData:
    return FederatedData(
        *(ClientData(store, tuple(rows + start for rows in part)) for part in parts)
    )


def _read_rows(path: Path) -> Iterator[tuple[Words, str, int]]:
    """Words, person and class of every row of a file."""
    # what a row has too much stands under None; without `strict` a quote that nobody closes takes all rows below it into its text
    reader = csv.DictReader(io.StringIO(_read_file(path), newline=""), strict=True)
    try:
        who, text, rating, classed = _detect_format(path, reader.fieldnames or ())
        for row in reader:
            where = f"data: {path}, row {reader.line_num}"
            if None in row or any(row[column] is None for column in (who, text, rating)):
                raise InputError(
                    f"{where}: it has another number of columns than the first row; quote texts that hold commas"
                )
            if not row[who].strip():
                raise InputError(f"{where}: {who} is empty; every text needs to say whose it is")
            yield tokenize(row[text]), row[who].strip(), classed(row[rating], f"{where}: {rating}")
    except csv.Error as error:
        where = f"data: {path}, from row {reader.line_num + 1} on"
        raise InputError(f"{where}: it cannot be read ({error}); {_CSV_HINT}") from None


def _read_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"data: {path} could not be read ({error.strerror}); give a CSV with {', '.join(_MAPS)}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(
            f"data: {path}, row {line}: it is not UTF-8; save the file with that encoding"
        ) from None


CsvFormat = tuple[str, str, str, Callable[[str, str], int]]


def _detect_format(path: Path, columns: Sequence[str]) -> CsvFormat:
    """The columns to read, and how a rating becomes a class."""
    for names, classed in ((_ESSAYS, _valence_class), (_MAPS, _mood_class)):
        if {*names} <= {*columns}:
            if any(columns.count(name) > 1 for name in names):
                raise InputError(
                    f"data: {path}, row 1: a column of {', '.join(names)} is there twice; keep one of each"
                )
            return (*names, classed)
    raise InputError(
        f"data: {path}, row 1: columns {', '.join(_MAPS)} or {', '.join(_ESSAYS)} were expected"
    )


def _valence_class(text: str, where: str) -> int:
    """-2 to 2, as it was asked for."""
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
        raise InputError(
            f"{where} is no number; {expected} was expected"
        ) from None  # it may be a text in the wrong column
