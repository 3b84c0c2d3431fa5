"""Clients' data as people have them: torch's data sets, a pandas table, a folder of files."""

import csv
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from glocal.core.data import Arrays, ClientData, Rows, concatenate
from glocal.core.errors import InputError, describe_error, describe_value
from glocal.core.paths import cache_folder
from glocal.core.values import Values

Column = npt.NDArray[np.generic]
Item = Any  # what a data set of torch's gives for one example
Collate = Callable[[list[Item]], tuple[Values, Values]]
_NUM_READ_TWICE = 4  # items that are compared between two reads
_SUFFIXES = (".csv", ".parquet", ".npz")
_INDEX = "__index_level_"  # how the columns begin in which pandas saves the index of a table


class TorchDataset(Protocol):
    """A data set of torch's whose items have numbers: `Dataset` with a length, or `Subset`."""

    def __len__(self) -> int:
        """The number of examples."""

    def __getitem__(self, index: int) -> Item:
        """One example."""


class ReadOptions(NamedTuple):
    """How items become arrays: by a function of all, or stacked within so many bytes of memory."""

    collate: Collate | None
    memory: int


def read_datasets(
    datasets: Sequence[TorchDataset] | Mapping[str, TorchDataset] | TorchDataset,
    clients: npt.ArrayLike | None,
    options: ReadOptions,
) -> ClientData:
    """All items as tensors: a data set per client, or one and the client of each example."""
    if clients is not None:
        labelled = {"the data set": datasets}
        names: tuple[str, ...] = ()
    elif isinstance(datasets, Mapping):
        labelled = {f"client '{name}'": each for name, each in datasets.items()}
        names = tuple(datasets)
    elif isinstance(datasets, list | tuple):
        labelled = {f"client {number}": each for number, each in enumerate(datasets)}
        names = ()
    else:
        raise InputError(
            f"data: a {type(datasets).__name__} was given without clients=; give one data set per "
            "client in a list or dict, or clients= with the client of each example"
        )
    if not labelled:
        raise InputError("data: no clients given; give one data set per client")
    data = _read_all(labelled, options)
    return replace(data, names=names) if clients is None else _group_by_client(data, clients)


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


def _read_all(labelled: Mapping[str, object], options: ReadOptions) -> ClientData:
    """The items of all data sets in one store, data set by data set."""
    datasets = {label: _require_dataset(each, label) for label, each in labelled.items()}
    for label, dataset in datasets.items():
        if not len(dataset):
            raise InputError(f"data: {label} has no examples; drop it")
    if options.collate is not None:
        parts = [_collate(each, label, options.collate) for label, each in datasets.items()]
        return concatenate(parts)
    counts = [len(dataset) for dataset in datasets.values()]
    (label, first), *_ = datasets.items()
    columns = _Columns(_read_item(first, 0, label), sum(counts), label, options.memory)
    start = 0
    for label, dataset in datasets.items():
        columns.label, columns.start = label, start
        for index in range(len(dataset)):
            columns.put(index, _read_item(dataset, index, label))
        twice = range(min(len(dataset), _NUM_READ_TWICE))
        columns.require_same([_read_item(dataset, index, label) for index in twice])
        start += len(dataset)
    whole = concatenate([columns.values()])
    rows = np.split(whole.rows[0], np.cumsum(counts)[:-1])
    return ClientData(whole.examples, tuple(rows))


def _collate(dataset: TorchDataset, label: str, collate: Collate) -> tuple[Values, Values]:
    """x and y of all items, by a function of the user's."""
    items = [_read_item(dataset, index, label) for index in range(len(dataset))]
    arrays = collate(items)
    _require_same_again(dataset, items[:_NUM_READ_TWICE], label)
    return arrays


class _Columns:
    """Arrays for all items of a data set, of which each has the form of the first one.

    Larger ones than `memory` bytes together are in a file in the cache, of which the system keeps
    in memory what is used. The file has no name: it is gone when the arrays are.
    """

    def __init__(self, first: Item, count: int, label: str, memory: int) -> None:
        self.label, self.start = label, 0  # of the data set that is being read
        leaves, self.form = tree_flatten(self._pair(first, 0))
        examples = [self._array(leaf, 0) for leaf in leaves]
        size = count * sum(array.nbytes for array in examples)
        make = _mapped_array if size > memory else np.empty
        self.columns = [make((count, *array.shape), array.dtype) for array in examples]

    def put(self, index: int, item: Item) -> None:
        """Write an item to its place."""
        for column, array in zip(self.columns, self._arrays(item, index), strict=True):
            if array.shape != column.shape[1:]:
                raise InputError(
                    f"data: the first example has the shape {column.shape[1:]}, and example "
                    f"{index} of {self.label} {array.shape}; make them equal, or give collate="
                )
            column[self.start + index] = array

    def require_same(self, items: Sequence[Item]) -> None:
        """Refuse a data set with random transforms: its items are read once, and then stay."""
        for index, item in enumerate(items):
            for column, array in zip(self.columns, self._arrays(item, index), strict=True):
                if not np.array_equal(column[self.start + index], array):
                    raise _differs(index, self.label)

    def values(self) -> tuple[Values, Values]:
        """x and y of all items."""
        tensors = [torch.from_numpy(column) for column in self.columns]
        x, y = tree_unflatten(tensors, self.form)
        return x, y

    def _arrays(self, item: Item, index: int) -> list[Column]:
        leaves, form = tree_flatten(self._pair(item, index))
        if form != self.form:
            raise InputError(
                f"data: example {index} of {self.label} has another structure than the first one; "
                "make them equal, or give collate="
            )
        return [self._array(leaf, index) for leaf in leaves]

    def _pair(self, item: Item, index: int) -> tuple[Any, Any]:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(
                f"data: example {index} of {self.label} is {describe_value(item)}; "
                "(x, y) was expected, or give collate="
            )
        return item[0], item[1]

    def _array(self, part: Any, index: int) -> Column:
        array = np.asarray(part)
        if array.dtype.kind not in "biuf":
            raise InputError(
                f"data: example {index} of {self.label} holds a value of type "
                f"{type(part).__name__}; numbers or arrays of numbers were expected, or give "
                "collate="
            )
        return array


def _mapped_array(shape: tuple[int, ...], dtype: Any) -> Column:
    """An array in a file without a name, in the cache folder."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
    except OSError as error:
        raise InputError(
            f"data: {folder} cannot hold the examples ({error.strerror}); free some space, set "
            "GLOCAL_CACHE to another folder, or raise memory="
        ) from error


def _require_same_again(dataset: TorchDataset, items: list[Item], label: str) -> None:
    """The same for items that `collate` takes."""
    for index, item in enumerate(items):
        first, again = tree_leaves(item), tree_leaves(_read_item(dataset, index, label))
        pairs = zip(map(np.asarray, first), map(np.asarray, again), strict=False)
        if len(first) != len(again) or not all(np.array_equal(*pair) for pair in pairs):
            raise _differs(index, label)


def _differs(index: int, label: str) -> InputError:
    return InputError(
        f"data: example {index} of {label} differs between two reads; give the data set without "
        "its random transform, and Task(augment=...)"
    )


def _read_item(dataset: TorchDataset, index: int, label: str) -> Item:
    try:
        return dataset[index]
    except Exception as error:  # a user's data set may raise anything
        raise InputError(
            f"data: example {index} of {label} cannot be read ({describe_error(error)})"
        ) from error


def _group_by_client(data: ClientData, clients: npt.ArrayLike) -> ClientData:
    """One store, with the rows of each client; clients come in the order of their names."""
    ids, count = np.asarray(clients), data.examples.num_rows
    if ids.shape != (count,):
        raise InputError(
            f"data: clients= has the shape {ids.shape}; "
            f"one client for each of the {count} examples was expected"
        )
    names, owners = np.unique(ids, return_inverse=True)
    order = np.argsort(owners, kind="stable").astype(np.int64)
    starts = np.cumsum(np.bincount(owners, minlength=len(names)))[:-1]
    rows: list[Rows] = np.split(order, starts)
    return ClientData(data.examples, tuple(rows), tuple(map(str, names)))


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
    return _group_by_client(concatenate([(x, y)]), owners.astype(str))


def _columns_of(frame: Any) -> dict[str, Column]:
    """The columns of a pandas table; anything else is refused."""
    _require_frame(frame)
    return {str(name): frame[name].to_numpy() for name in frame.columns}


def _require_frame(frame: object) -> None:
    if isinstance(frame, type) or not hasattr(frame, "columns") or not hasattr(frame, "isna"):
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
    _require_inputs(columns, where)
    inputs = [_numbers(values, name, where) for name, values in columns.items()]
    return np.stack(inputs, 1).astype(np.float32)


def _require_inputs(columns: Mapping[str, Column], where: str) -> None:
    if not columns:
        raise InputError(
            f"data: {where} has no input columns beside the target; add at least one column"
        )


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
