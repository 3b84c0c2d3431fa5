"""Clients' data as people have them: by name, from torch's data sets, a table, or a folder."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import glocal
from glocal import FederatedData
from glocal.core.errors import InputError
from glocal.federate.group_result import save_models


def arrays(rows=10, width=3, seed=0):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(rows, width)).astype(np.float32), np.arange(rows) % 2


BY_NAME = {"ulm": arrays(), "bonn": arrays(20, seed=1)}
WHOLE = {"test": 0.0, "validation": 0.0}


def fit(data):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    task = glocal.classification(model)
    algorithm = glocal.LGFedAvg(task, optimizer=glocal.SGD(0.1), local="0")
    size = {"clients_per_round": data.num_clients, "batch_size": 4}
    return glocal.fit(algorithm, data, rounds=2, **size, progress=False).group()


def test_clients_given_by_name_keep_their_names_in_results_and_files(tmp_path):
    data = FederatedData.from_tensors(BY_NAME)
    assert data.names == data.test.names == ("ulm", "bonn")
    result = fit(data)
    by_name, by_number = result.state_dict("bonn"), result.state_dict(1)
    assert all(torch.equal(by_name[name], by_number[name]) for name in by_number)
    assert not torch.equal(result.model("ulm")[0].weight, result.model("bonn")[0].weight)
    assert [row["name"] for row in result.as_dict()["clients"]] == ["ulm", "bonn"]
    save_models(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "client-ulm.safetensors",
        "client-bonn.safetensors",
    }


def test_the_same_clients_without_names_give_the_same_numbers():
    named = FederatedData.from_tensors(BY_NAME, seed=3)
    numbered = FederatedData.from_tensors([*BY_NAME.values()], seed=3)
    assert numbered.names == ()
    for left, right in zip(named.subsets(), numbered.subsets(), strict=True):
        assert torch.equal(left.examples.x, right.examples.x)
        assert all(map(np.array_equal, left.rows, right.rows))


def test_a_name_that_is_no_file_name_is_written_safely(tmp_path):
    result = fit(FederatedData.from_tensors({"../ulm": arrays(), "a b/c": arrays(seed=1)}))
    save_models(result, tmp_path / "models")
    assert {path.name for path in (tmp_path / "models").iterdir()} == {
        "client-..%2Fulm.safetensors",
        "client-a%20b%2Fc.safetensors",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ("bon", r"there is no client 'bon'; did you mean 'bonn'\? known: bonn, ulm"),
        (2, r"there is no client 2; clients are 0\.\.1"),
        (-1, r"there is no client -1; clients are 0\.\.1"),
        (True, "True was given; a client's number or name"),
        (None, "None was given; a client's number or name"),
        (1.0, "1.0 was given; a client's number or name"),
    ],
)
def test_an_unknown_client_is_refused_in_one_line(client, message):
    result = fit(FederatedData.from_tensors(BY_NAME))
    with pytest.raises(InputError, match=message):
        result.model(client)


def test_a_hint_lists_some_of_many_names():
    many = {f"client {number:03d}": arrays(4) for number in range(300)}
    result = fit(FederatedData.from_tensors(many, **WHOLE))
    with pytest.raises(InputError, match="client 019 and 280 more"):
        result.model("zzz")


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({}, "no clients given"),
        ({3: arrays()}, "3 is a client's name; a text that is not empty was expected"),
        ({"": arrays()}, "'' is a client's name"),
        (
            {"a": arrays(), "b": arrays(width=4)},
            "client 'b' has inputs .4,. .* client 'a' has inputs .3,.",
        ),
        ({"a": (arrays()[0], arrays(9)[1])}, "client 'a' has arrays of lengths 10, 9"),
        ({"a": None}, "client 'a''s inputs cannot be read"),
        ("ab", "clients is 'ab'; a list of .x, y. pairs"),
        ((pair for pair in [arrays()]), "clients is a generator; a list"),
    ],
)
def test_clients_that_cannot_be_read_are_named(clients, message):
    with pytest.raises(InputError, match=message):
        FederatedData.from_tensors(clients)


def test_validation_and_test_sets_may_be_given():
    given = {name: arrays(6, seed=9) for name in BY_NAME}
    data = FederatedData.from_tensors(BY_NAME, test=given, validation=given)
    assert [part.sizes.tolist() for part in data.subsets()] == [[10, 20], [6, 6], [6, 6]]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"ulm": arrays()}, "2 clients but 1 test sets"),
        ({"bonn": arrays(), "ulm": arrays()}, "the test sets are of bonn, ulm, the training sets"),
        ([arrays()] * 2, "the test sets are of clients without names"),
        (None, "test is None; a share from 0 to below 1"),
        (True, "test is True"),
        (1.0, "at least 0 and below 1"),
    ],
)
def test_test_sets_of_other_clients_are_refused(part, message):
    with pytest.raises(InputError, match=message):
        FederatedData.from_tensors(BY_NAME, test=part)


def test_labels_out_of_range_and_divergence_name_the_client():
    x, y = arrays()
    with pytest.raises(InputError, match="client 'bonn' has the train label 8"):
        fit(FederatedData.from_tensors({"ulm": (x, y), "bonn": (x, y + 7 * (y == 1))}, **WHOLE))
    with pytest.raises(InputError, match="the loss or the upload of client ulm is not finite"):
        fit(FederatedData.from_tensors({"ulm": (x * 1e38, y)}, **WHOLE))


def torch_datasets():
    return {name: TensorDataset(*map(torch.as_tensor, pair)) for name, pair in BY_NAME.items()}


@pytest.mark.parametrize("kind", ["dict", "list", "subsets", "ids"])
def test_torchs_data_sets_are_the_same_as_tensors(kind):
    given = torch_datasets()
    whole = torch.utils.data.ConcatDataset(given.values())
    if kind == "dict":
        data = FederatedData.from_datasets(given, **WHOLE)
    elif kind == "list":
        data = FederatedData.from_datasets([*given.values()], **WHOLE)
    elif kind == "subsets":
        parts = [Subset(whole, range(10)), Subset(whole, range(10, 30))]
        data = FederatedData.from_datasets(parts, **WHOLE)
    else:
        ids = ["ulm"] * 10 + ["bonn"] * 20
        data = FederatedData.from_datasets(whole, clients=ids, **WHOLE)
        assert data.names == ("bonn", "ulm")
    order = ["bonn", "ulm"] if kind == "ids" else ["ulm", "bonn"]
    for number, name in enumerate(order):
        x, y, _ = data.train.of(number)
        assert torch.equal(x, torch.as_tensor(BY_NAME[name][0]))
        assert torch.equal(y, torch.as_tensor(BY_NAME[name][1]))


class Items(Dataset):
    """Items that a function makes."""

    def __init__(self, make, length=6):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


class Stream(IterableDataset):
    def __iter__(self):
        yield from [(torch.zeros(3), 0)]


def broken(index):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([Items(lambda index: (torch.rand(3), 0))], "example 0 of client 0 differs between two"),
        (
            [Items(lambda index: (torch.zeros(3 + index), 0))],
            r"the first example has the shape \(3,\), and example 1 of client 0 \(4,\)",
        ),
        ([Items(lambda index: torch.zeros(3))], "example 0 of client 0 is a Tensor of shape"),
        ([Items(lambda index: (object(), 0))], "holds a value of type object"),
        ([Items(broken)], r"example 0 of client 0 cannot be read \(OSError: the disk is gone\)"),
        ([Items(None, 0)], "client 0 has no examples"),
        ([Stream()], "client 0 is a Stream; a data set with a length"),
        ([DataLoader(Items(broken))], "client 0 is a DataLoader; give its data set"),
        (Items(broken), "a Items was given without clients="),
        ([], "no clients given"),
        ([None], "client 0 is a NoneType"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused_in_one_line(datasets, message):
    with pytest.raises(InputError, match=message):
        FederatedData.from_datasets(datasets)


def test_items_of_unequal_shape_are_collated():
    ragged = Items(lambda index: (torch.ones(1 + index % 3), index % 2))

    def collate(items):
        x = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return x, torch.tensor([y for _, y in items])

    data = FederatedData.from_datasets([ragged], collate=collate, **WHOLE)
    assert data.train.of(0).x.sum(1).tolist() == [1, 2, 3, 1, 2, 3]


def test_ids_of_the_wrong_length_are_refused():
    whole = Items(lambda index: (torch.zeros(3), 0))
    with pytest.raises(InputError, match=r"clients= has the shape \(2,\); one client for each"):
        FederatedData.from_datasets(whole, clients=["a", "b"])


def table():
    return pd.DataFrame(
        {
            "hospital": ["ulm", "bonn", "ulm", "bonn", "ulm", "ulm"],
            "age": [30, 40, 50, 60, 70, 80],
            "dose": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
            "sick": [0, 1, 0, 1, 1, 0],
        }
    )


def test_a_table_has_one_client_per_value_of_a_column():
    data = FederatedData.from_dataframe(table(), client="hospital", target="sick", **WHOLE)
    assert data.names == ("bonn", "ulm")
    assert data.train.of(0).x.tolist() == [[40, 1.5], [60, 3.5]]
    assert data.train.of(1).y.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"client": "city"}, "client='city' is no column of the table; it has hospital, age"),
        ({"target": "ill"}, "target='ill' is no column"),
        ({"frame": [1, 2]}, "a list of length 2 is no pandas table"),
        ({"frame": table().assign(city="x")}, "the column 'city' of the table holds 'x'"),
        ({"frame": table().assign(age=[1, 2, None, 4, 5, 6])}, "'age' .* in row 2; fill"),
        ({"frame": table()[["hospital", "sick"]]}, "no input columns beside the target"),
    ],
)
def test_a_table_that_cannot_be_read_names_the_column(change, message):
    arguments = {"frame": table(), "client": "hospital", "target": "sick", **change}
    with pytest.raises(InputError, match=message):
        FederatedData.from_dataframe(arguments.pop("frame"), **arguments)


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_a_folder_has_one_file_per_client(kind, tmp_path):
    for name, rows in table().groupby("hospital"):
        own = rows.drop(columns="hospital")
        path = tmp_path / f"{name}.{kind}"
        if kind == "csv":
            own.to_csv(path, index=False)
        elif kind == "parquet":
            pytest.importorskip("pyarrow")
            own.to_parquet(path)
        else:
            np.savez(path, x=own[["age", "dose"]].to_numpy(), y=own["sick"].to_numpy())
    data = FederatedData.from_folder(tmp_path, target="sick", **WHOLE)
    assert data.names == ("bonn", "ulm")
    assert data.train.of(0).x.tolist() == [[40, 1.5], [60, 3.5]]
    assert data.train.of(0).y.tolist() == [1, 1]
    assert data.train.examples.y.dtype == torch.int64


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no file that ends in .csv, .parquet, .npz"),
        ({"a.csv": "x,y\n1,0\n", "a.npz": ""}, "has two files of the client 'a'"),
        ({"a.csv": "x,z\n1,0\n"}, "has no column 'y'; it has x, z: name one of them with target="),
        ({"a.csv": "x,y\n1,0\n2\n"}, "line 3: 1 values, but the header has 2"),
        ({"a.csv": "x,y\nred,0\n"}, "the column 'x' of .*a.csv holds 'red'"),
        ({"a.csv": ""}, "no CSV file with a header"),
        ({"a.csv": "y\n0\n"}, "no input columns beside the target"),
        ({"a.npz": "nonsense"}, "a.npz cannot be read"),
        ({"a.parquet": "nonsense"}, "a.parquet (cannot be read|needs pyarrow)"),
    ],
)
def test_a_folder_that_cannot_be_read_names_the_file(files, message, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        FederatedData.from_folder(tmp_path)


def test_arrays_with_code_in_a_file_are_not_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([object()]), y=np.zeros(1))
    with pytest.raises(InputError, match="cannot be read"):
        FederatedData.from_folder(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        FederatedData.from_folder(tmp_path / "nowhere")


def test_natural_clients_are_named_by_their_ids():
    dataset = glocal.load_dataset("digits")
    people = np.arange(len(dataset.train.y)) % 3
    scheme = glocal.natural(people, np.arange(len(dataset.test.y)) % 3)
    assert FederatedData.partition(dataset, scheme).names == ("0", "1", "2")
    assert FederatedData.partition(dataset, glocal.shards(3, 4)).names == ()
