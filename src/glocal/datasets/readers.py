"""Clients' data as people have them: torch's data sets, a pandas table, a folder of files."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.data import Arrays, ClientData, Examples, Rows, concatenate
from glocal.core.errors import InputError, describe_error, describe_value

Column = npt.NDArray[np.generic]
Item = Any  # what a data set of torch's gives for one example
Collate = Callable[[list[Item]], tuple[Tensor, Tensor]]
_NUM_READ_TWICE = 4  # items that are compared between two reads
_SUFFIXES = (".csv", ".parquet", ".npz")
_INDEX = "__index_level_"  # how the columns begin in which pandas saves the index of a table


class TorchDataset(Protocol):
    """A data set of torch's whose items have numbers: `Dataset` with a length, or `Subset`."""

    def __len__(self) -> int:
        """The number of examples."""

    def __getitem__(self, index: int) -> Item:
        """One example."""


def read_datasets(
    datasets: Sequence[TorchDataset] | Mapping[str, TorchDataset] | TorchDataset,
    clients: npt.ArrayLike | None,
    collate: Collate | None,
) -> ClientData:
    """All items as tensors: a data set per client, or one and the client of each example."""
    if clients is not None:
        x, y = _read_dataset(datasets, "the data set", collate)
        return _group_by_client(x, y, clients)
    if isinstance(datasets, Mapping):
        named: dict[str, Arrays] = {}
        for name, dataset in datasets.items():
            named[name] = _read_dataset(dataset, f"client '{name}'", collate)
        return concatenate(named)
    if isinstance(datasets, list | tuple):
        numbered = enumerate(datasets)
        return concatenate([_read_dataset(each, f"client {n}", collate) for n, each in numbered])
    raise InputError(
        f"data: a {type(datasets).__name__} was given without clients=; give one data set per "
        "client in a list or dict, or clients= with the client of each example"
    )


def _require_dataset(value: object, label: str) -> TorchDataset:
    """Refuse what has no length or no items by number, such as an `IterableDataset`."""
    if isinstance(value, torch.utils.data.DataLoader):
        raise InputError(f"data: {label} is a DataLoader; give its data set, loader.dataset")
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return value
    raise InputError(
        f"data: {label} is a {type(value).__name__}; "
        "a data set with a length and items by number was expected"
    )


def _read_dataset(given: object, label: str, collate: Collate | None) -> tuple[Tensor, Tensor]:
    """x and y of all items."""
    dataset = _require_dataset(given, label)
    count = len(dataset)
    if not count:
        raise InputError(f"data: {label} has no examples; drop it")
    items = [_read_item(dataset, index, label) for index in range(count)]
    arrays = _stack(items, label) if collate is None else collate(items)
    _require_same_again(dataset, items[:_NUM_READ_TWICE], label)
    return arrays


def _require_same_again(dataset: TorchDataset, items: list[Item], label: str) -> None:
    """Refuse a data set with random transforms: its items are read once and stay as they are."""
    for index, item in enumerate(items):
        first, again = _as_arrays(item), _as_arrays(_read_item(dataset, index, label))
        if len(first) != len(again) or not all(map(np.array_equal, first, again)):
            raise InputError(
                f"data: example {index} of {label} differs between two reads; "
                "give the data set without its random transform, and glocal.with_augmentation"
            )


def _read_item(dataset: TorchDataset, index: int, label: str) -> Item:
    try:
        return dataset[index]
    except Exception as error:  # a user's data set may raise anything
        raise InputError(
            f"data: example {index} of {label} cannot be read ({describe_error(error)})"
        ) from error


def _as_arrays(item: Item) -> list[Column]:
    parts = item if isinstance(item, tuple | list) else (item,)
    return [np.asarray(part) for part in parts]


def _stack(items: list[Item], label: str) -> tuple[Tensor, Tensor]:
    """x and y of items that are pairs of equal shapes."""
    inputs, targets = [], []
    for index, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(
                f"data: example {index} of {label} is {describe_value(item)}; "
                "(x, y) was expected, or give collate="
            )
        inputs.append(_as_tensor(item[0], index, label))
        targets.append(_as_tensor(item[1], index, label))
    return _stack_column(inputs, label), _stack_column(targets, label)


def _stack_column(parts: list[Tensor], label: str) -> Tensor:
    first = tuple(parts[0].shape)
    for index, part in enumerate(parts):
        if tuple(part.shape) != first:
            raise InputError(
                f"data: in {label} example 0 has the shape {first} and example {index} "
                f"{tuple(part.shape)}; make them equal, or give collate="
            )
    return torch.stack(parts)


def _as_tensor(part: Any, index: int, label: str) -> Tensor:
    try:
        return torch.as_tensor(np.asarray(part))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"data: example {index} of {label} holds a value of type {type(part).__name__}; "
            "numbers or arrays of numbers were expected, or give collate="
        ) from error


def _group_by_client(x: Tensor, y: Tensor, clients: npt.ArrayLike) -> ClientData:
    """One store, with the rows of each client; clients come in the order of their names."""
    ids = np.asarray(clients)
    if ids.shape != (len(y),):
        raise InputError(
            f"data: clients= has the shape {ids.shape}; "
            f"one client for each of the {len(y)} examples was expected"
        )
    names, owners = np.unique(ids, return_inverse=True)
    order = np.argsort(owners, kind="stable").astype(np.int64)
    starts = np.cumsum(np.bincount(owners, minlength=len(names)))[:-1]
    rows: list[Rows] = np.split(order, starts)
    whole = concatenate([(x, y)])
    store: Examples = whole.examples
    return ClientData(store, tuple(rows), tuple(map(str, names)))


def read_dataframe(frame: Any, client: str, target: str) -> ClientData:
    """The rows of a pandas table by client: all other columns are inputs."""
    columns = _columns_of(frame)
    for what, name in {"client": client, "target": target}.items():
        if name not in columns:
            raise InputError(
                f"data: {what}='{name}' is no column of the table; it has {', '.join(columns)}"
            )
    owners, y = columns.pop(client), _numbers(columns.pop(target), target, "the table")
    if frame[client].isna().any():
        raise InputError(f"data: the column '{client}' has rows without a client; drop them")
    x = _input_matrix(columns, "the table")
    return _group_by_client(torch.from_numpy(x), torch.from_numpy(y), owners.astype(str))


def _columns_of(frame: Any) -> dict[str, Column]:
    """The columns of a pandas table; anything else is refused."""
    _require_frame(frame)
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _require_frame(frame: object) -> None:
    if not hasattr(frame, "columns") or not hasattr(frame, "isna"):
        raise InputError(f"data: {describe_value(frame)} is no pandas table; give a DataFrame")


def read_folder(folder: Path, target: str) -> dict[str, Arrays]:
    """(x, y) of every file in a folder; the files' names without suffix are the clients' names."""
    if not folder.is_dir():
        raise InputError(f"data: {folder} is no folder; give one with a file per client")
    paths = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
    if not paths:
        raise InputError(f"data: {folder} has no file that ends in {', '.join(_SUFFIXES)}")
    clients: dict[str, Arrays] = {}
    for path in paths:
        if path.stem in clients:
            raise InputError(
                f"data: {folder} has two files of the client '{path.stem}'; keep one of them"
            )
        clients[path.stem] = _read_npz(path) if path.suffix == ".npz" else _read_table(path, target)
    return clients


def _read_npz(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if not {"x", "y"} <= {*arrays.files}:
                raise InputError(
                    f"data: {path} has the arrays {', '.join(arrays.files)}; x and y were expected"
                )
            return arrays["x"], arrays["y"]
    except InputError:
        raise
    except Exception as error:  # a damaged archive
        raise InputError(f"data: {path} cannot be read ({describe_error(error)})") from error


def _read_table(path: Path, target: str) -> Arrays:
    columns = dict(_csv_columns(path) if path.suffix == ".csv" else _parquet_columns(path))
    if target not in columns:
        raise InputError(
            f"data: {path} has no column '{target}'; it has {', '.join(columns)}: "
            "name one of them with target="
        )
    y = _numbers(columns.pop(target), target, str(path))
    return _input_matrix(columns, str(path)), y


def _csv_columns(path: Path) -> Iterator[tuple[str, Column]]:
    """The columns of a file with a header."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"data: {path} is no CSV file with a header ({describe_error(error)})"
        ) from error
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise InputError(
                f"data: {path}, line {number}: {len(row)} values, but the header has {len(header)}"
            )
    for place, name in enumerate(header):
        yield name, np.array([row[place] for row in rows])


def _parquet_columns(path: Path) -> Iterator[tuple[str, Column]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            f"data: {path} needs pyarrow; install it with `pip install 'glocal[parquet]'`"
        ) from error
    try:
        table = parquet.read_table(path)
    except Exception as error:  # pyarrow's own
        raise InputError(f"data: {path} cannot be read ({describe_error(error)})") from error
    for name in table.column_names:
        if not name.startswith(_INDEX):
            yield name, table.column(name).to_numpy()


def _input_matrix(columns: Mapping[str, Column], where: str) -> npt.NDArray[np.float32]:
    """Input columns as (rows, columns)."""
    if not columns:
        raise InputError(f"data: {where} has no input columns beside the target")
    inputs = [_numbers(values, name, where) for name, values in columns.items()]
    return np.stack(inputs, 1).astype(np.float32)


def _numbers(values: Column, name: str, where: str) -> Column:
    """A column of whole or real numbers; any other is refused by name."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    try:
        real = values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"data: the column '{name}' of {where} holds {describe_value(values.tolist()[0])}; "
            "only numbers can be read: drop the column, or turn it into numbers"
        ) from error
    _require_finite(real, name, where)
    return real.astype(np.int64) if _are_whole(values) else real


def _require_finite(real: npt.NDArray[np.float64], name: str, where: str) -> None:
    missing = np.flatnonzero(~np.isfinite(real))
    if len(missing):
        raise InputError(
            f"data: the column '{name}' of {where} has no finite number in row {missing[0]}; "
            "fill or drop such rows"
        )


def _are_whole(values: Column) -> bool:
    """Whether a column of texts, as a CSV file has them, holds whole numbers."""
    return values.dtype.kind == "U" and all(map(_is_whole, values.tolist()))


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("+-").isdigit()
