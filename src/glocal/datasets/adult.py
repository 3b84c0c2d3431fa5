"""UCI Adult as Liang et al. 2020 have it: who earns more than 50,000 dollars, from 93 columns without race and sex.

Prepared as in the tutorial that the paper follows: adult.data only, race White or Black only, "?" kept as a category, without
fnlwgt, categories as dummies without their first level, half of the rows for the test, each column of mean 0 and deviation 1 on
the training half. Race and sex are no inputs; they stand beside them as groups.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from glocal.core.data import Examples, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import make_rng

ATTRIBUTES = {"race": ("Black", "White"), "sex": ("Female", "Male")}
_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
_NUMERIC = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_EXCLUDED = ("fnlwgt", "race", "sex", "income")
Columns = dict[str, npt.NDArray[np.str_]]


def read_adult(path: Path) -> tuple[Examples, Examples]:
    """Training and test half: x (rows, 93), y 1 above 50,000, group (rows, 2): race 1 for White, sex 1 for Male."""
    table = _read_columns(path)
    inputs = np.concatenate(
        [_encode(name, table[name]) for name in _COLUMNS if name not in _EXCLUDED], axis=1
    )
    y = (table["income"] == ">50K").astype(np.int64)
    group = np.stack([table["race"] == "White", table["sex"] == "Male"], axis=1).astype(np.int64)
    train, test = _stratified_halves(y)
    mean, deviation = inputs[train].mean(0), inputs[train].std(0)
    scaled = ((inputs - mean) / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)
    whole = Examples(torch.from_numpy(scaled), torch.from_numpy(y), torch.from_numpy(group))
    return whole.take(train), whole.take(test)


def _read_columns(path: Path) -> Columns:
    """The rows of people who are White or Black, column by column."""
    lines = [
        line.strip().split(", ")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.count(",") == len(_COLUMNS) - 1
    ]
    if not lines:
        raise InputError(
            f"data: {path} holds no rows of Adult; delete it and run `glocal data fetch adult`"
        )
    table = dict(zip(_COLUMNS, np.array(lines).T, strict=True))
    kept = np.isin(table["race"], ["White", "Black"])
    return {name: column[kept] for name, column in table.items()}


def _encode(name: str, column: npt.NDArray[np.str_]) -> npt.NDArray[np.float64]:
    """A column of numbers as it is, one of words as dummies without the first level (rows, width)."""
    if name in _NUMERIC:
        return column.astype(np.float64)[:, None]
    dummies: npt.NDArray[np.float64] = (column[:, None] == np.unique(column)[None, 1:]).astype(
        np.float64
    )
    return dummies


def _stratified_halves(y: npt.NDArray[np.int64]) -> tuple[Rows, Rows]:
    """Rows of the two halves, with the same share of both classes."""
    halves: tuple[list[Rows], list[Rows]] = ([], [])
    for label in (0, 1):
        rows = make_rng(0, "adult", label).permutation(np.flatnonzero(y == label))
        halves[0].append(rows[: len(rows) // 2])
        halves[1].append(rows[len(rows) // 2 :])
    return np.sort(np.concatenate(halves[0])), np.sort(np.concatenate(halves[1]))
