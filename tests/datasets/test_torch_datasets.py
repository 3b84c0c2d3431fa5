"""torch's data sets as clients' data: in memory or in a file, with inputs of any structure."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import glocal
from glocal.core.errors import InputError
from glocal.datasets import readers


def parts():
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    whole = TensorDataset(x, y)
    return x, {"ulm": Subset(whole, range(5)), "bonn": Subset(whole, range(5, 12))}


make = readers._mapped_array


@pytest.mark.parametrize("memory", [10**9, 0])
def test_data_sets_are_the_same_in_memory_and_in_a_file(memory, tmp_path, monkeypatch):
    mapped = []
    monkeypatch.setattr(
        readers, "_mapped_array", lambda *form: mapped.append(make(*form)) or mapped[-1]
    )
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    x, datasets = parts()
    data = glocal.FederatedData.from_datasets(datasets, memory=memory, test=0, validation=0)
    assert data.names == ("ulm", "bonn")
    assert data.train.sizes.tolist() == [5, 7]
    assert torch.equal(data.train.of(1).x, x[5:])
    if not memory:
        assert data.train.examples.x.data_ptr() == mapped[0].ctypes.data, "nothing is copied"
    assert len(mapped) == (0 if memory else 2)
    assert not list(tmp_path.iterdir()), "the file has no name, and is gone with the data"


def test_one_data_set_and_the_client_of_each_example_can_be_in_a_file():
    x, datasets = parts()
    whole = datasets["ulm"].dataset
    clients = ["b", "a"] * 6
    data = glocal.FederatedData.from_datasets(
        whole, clients=clients, memory=0, test=0, validation=0
    )
    assert data.names == ("a", "b")
    assert torch.equal(data.train.of(0).x, x[1::2])


class Named(Dataset):
    """Inputs are a table of arrays."""

    def __init__(self, odd=None):
        self.odd = odd

    def __len__(self):
        return 6

    def __getitem__(self, index):
        age = np.float32(index)
        return {"age": age, "scan": np.full((2, 2), index + (index == self.odd))}, index % 2


def test_inputs_may_be_tables_of_arrays():
    data = glocal.FederatedData.from_datasets([Named(), Named()], test=0, validation=0)
    x = data.train.of(1).x
    assert x["age"].tolist() == [0, 1, 2, 3, 4, 5]
    assert x["scan"].shape == (6, 2, 2)


def test_an_item_of_another_structure_is_refused():
    class Odd(Named):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return ({"age": x["age"]} if index == 3 else x), y

    with pytest.raises(InputError, match="example 3 of client 1 has another structure"):
        glocal.FederatedData.from_datasets([Named(), Odd()])


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("GLOCAL_CACHE", str(blocked))
    with pytest.raises(InputError, match=r"cannot hold the examples .* raise memory="):
        glocal.FederatedData.from_datasets(parts()[1], memory=0)


def test_a_random_transform_is_refused_and_points_to_augment():
    class Random(Named):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {**x, "age": np.float32(np.random.default_rng().random())}, y

    with pytest.raises(InputError, match=r"differs between two reads; .*Task\(augment=...\)"):
        glocal.FederatedData.from_datasets([Random()])
