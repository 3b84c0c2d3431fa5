"""UCI Adult as in Liang et al. 2020: income above 50,000 dollars, from 93 columns.

Prepared as in the tutorial that the paper follows. Only adult.data is read, and only its rows of
race White or Black. "?" is a category like the others. The column fnlwgt is left out. Categories
become dummies without their first level. Half of the rows are the test set. Each column is scaled
to mean 0 and standard deviation 1 on the training half. Race and sex are groups, and no inputs.
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
Inputs = npt.NDArray[np.float64]


def read_adult(path: Path) -> tuple[Examples, Examples]:
    """The training and the test half.

    x is (rows, 93), y is 1 above 50,000 dollars, and group is (rows, 2): race 1 for White, sex 1
    for Male.
    """
    table = _read_columns(path)
    y = (table["income"] == ">50K").astype(np.int64)
    train, test = _stratified_halves(y)
    x = _standardize(_inputs(table), train)
    examples = Examples(*map(torch.from_numpy, (x, y, _groups(table))))
    return examples.take(train), examples.take(test)


def _read_columns(path: Path) -> Columns:
    """The rows of people of race White or Black, by column."""
    lines = _complete_lines(path)
    rows = np.array([line.strip().split(", ") for line in lines])
    included = np.isin(rows[:, _COLUMNS.index("race")], ["White", "Black"])
    return dict(zip(_COLUMNS, rows[included].T, strict=True))


def _complete_lines(path: Path) -> list[str]:
    """The lines with a value in every column; the file ends with an empty one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    complete = [line for line in lines if line.count(",") == len(_COLUMNS) - 1]
    if not complete:
        raise InputError(
            f"data: {path} holds no rows of Adult; delete it and run `glocal data fetch adult`"
        )
    return complete


def _inputs(table: Columns) -> Inputs:
    """All input columns before scaling (rows, width)."""
    names = [name for name in _COLUMNS if name not in _EXCLUDED]
    return np.concatenate([_encode(name, table[name]) for name in names], axis=1)


def _groups(table: Columns) -> npt.NDArray[np.int64]:
    """Race and sex (rows, 2)."""
    columns = (table["race"] == "White", table["sex"] == "Male")
    return np.stack(columns, axis=1).astype(np.int64)


def _encode(name: str, column: npt.NDArray[np.str_]) -> Inputs:
    """A numeric column as it is, a category as dummies without its first level (rows, width)."""
    if name in _NUMERIC:
        return column.astype(np.float64)[:, None]
    levels = np.unique(column)[1:]
    dummies: Inputs = (column[:, None] == levels).astype(np.float64)
    return dummies


def _standardize(inputs: Inputs, train: Rows) -> npt.NDArray[np.float32]:
    """Mean 0 and standard deviation 1 of each column, over the training rows."""
    mean, std = inputs[train].mean(0), inputs[train].std(0)
    scaled: Inputs = (inputs - mean) / np.where(std > 0, std, 1.0)
    return scaled.astype(np.float32)


def _stratified_halves(y: npt.NDArray[np.int64]) -> tuple[Rows, Rows]:
    """The rows of the two halves, with the same share of both classes."""
    first: list[Rows] = []
    second: list[Rows] = []
    for label in (0, 1):
        rows = _shuffled_rows(y, label)
        first.append(rows[: len(rows) // 2])
        second.append(rows[len(rows) // 2 :])
    return np.sort(np.concatenate(first)), np.sort(np.concatenate(second))


def _shuffled_rows(y: npt.NDArray[np.int64], label: int) -> Rows:
    """The rows of one class, in random order."""
    return make_rng(0, "adult", label).permutation(np.flatnonzero(y == label))
