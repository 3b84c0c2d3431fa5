"""Nothing is chosen on test data, every seed deals anew, and nobody's randomness is another's."""

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.core.data import Examples
from glocal.core.modules import params_of
from glocal.datasets import Dataset
from glocal.datasets.federated import from_tensors
from glocal.studies import run_study
from glocal.studies.settings import from_dict
from tests.support import world

DEVICES = 5


def test_the_last_round_is_held_against_the_best_on_validation_data_too():
    """Two tests that differ in their labels only: all right by the last model, and all wrong."""
    model = world.seeded(world.plain)
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.sgd(0.5, momentum=0.9))
    own, inputs = world.clients((60, 60, 60)), [x for x, _ in world.clients((30, 30, 30), seed=5)]

    def chosen(labels, select):
        test = list(zip(inputs, labels, strict=True))
        federation = from_tensors(own, test=test, validation=0.3)
        options = glocal.Options(validate_every=4, select=select)  # not after the 6th, the last
        return glocal.fit(algorithm, model, federation, glocal.Plan(6, 2), options=options)

    unknown = [torch.zeros(len(x), dtype=torch.int64) for x in inputs]
    last = chosen(unknown, "last")
    told = [last.model(device)(x).argmax(1) for device, x in enumerate(inputs)]
    right = chosen(told, "best")
    wrong = chosen([(labels + 1) % world.CLASSES for labels in told], "best")
    assert chosen(told, "last").local_test == 1, "the test needs labels that suit the last round"
    assert right.selected_round == wrong.selected_round
    assert right.validation == wrong.validation
    assert world.same_bits(right.state, wrong.state, 3)


def rows(holdings):
    return [own.tolist() for own in holdings.rows]


def parts(federation):
    """Everybody's rows of each part."""
    held = {"train": federation.train, "validation": federation.val, "test": federation.test}
    return {name: rows(part) for name, part in held.items()}


def test_another_seed_holds_out_other_examples():
    own = world.clients((40,) * DEVICES)
    federations = [from_tensors(own, validation=0.3, seed=seed) for seed in (0, 0, 1)]
    first, again, other = map(parts, federations)
    assert first == again
    for part in ("train", "validation", "test"):
        assert all(left != right for left, right in zip(first[part], other[part], strict=True))


def test_every_device_holds_out_examples_by_a_draw_of_its_own():
    held = parts(from_tensors(world.clients((40,) * DEVICES), validation=0.3))
    for part in ("validation", "test"):
        places = [tuple(row - 40 * device for row in own) for device, own in enumerate(held[part])]
        assert len(set(places)) == DEVICES


def dataset():
    generator = torch.Generator().manual_seed(0)
    labels = [torch.randint(4, (size,), generator=generator) for size in (400, 200)]
    train, test = (Examples(torch.randn(len(y), 3, generator=generator), y) for y in labels)
    return Dataset(train, test, 4)


PARTITIONS = {
    "iid": lambda: glocal.iid(DEVICES),
    "shards": lambda: glocal.shards(DEVICES, 2),
    "random_shards": lambda: glocal.random_shards(DEVICES, 2),
    "dirichlet": lambda: glocal.dirichlet(DEVICES, 0.5),
}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_another_seed_deals_examples_otherwise(partition):
    partitioner = PARTITIONS[partition]()
    federations = [glocal.partition(dataset(), partitioner, seed=seed) for seed in (0, 0, 1)]
    first, again, other = map(parts, federations)
    assert first == again
    assert all(first[part] != other[part] for part in first)


def test_another_seed_holds_out_others_where_who_has_what_is_given():
    everyone = np.arange(400) % DEVICES
    by_person = glocal.natural(everyone, everyone[:200])
    first, other = (parts(glocal.partition(dataset(), by_person, seed=seed)) for seed in (0, 1))
    assert first["test"] == other["test"]
    assert all(a != b for a, b in zip(first["validation"], other["validation"], strict=True))


def drop_first():
    """Its slopes are zero exactly where inputs were dropped."""
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(64, world.CLASSES))


class DrawFirst(nn.Module):
    """The same by torch's own generator."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, world.CLASSES)

    def forward(self, x):
        return self.head(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize(("make", "engine"), [
    (drop_first, "vmapped"),
    (drop_first, "looped"),
    (drop_first, "auto"),
    (DrawFirst, "looped"),
])  # fmt: skip
def test_no_two_devices_and_no_two_rounds_drop_the_same_units(make, engine):
    """All hold one example and always begin with one model: only chance tells them apart."""
    model, sent = world.seeded(make), []
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.sgd(0.1))

    def spy(shared, uploads, weights):
        sent.extend(uploads["1.weight" if make is drop_first else "head.weight"].clone())
        return shared

    same = [(torch.ones(1, 64), torch.zeros(1, dtype=torch.int64))] * DEVICES
    train = from_tensors(same, test=same, validation=0.0).train
    plan = glocal.Plan(rounds=4, clients_per_round=DEVICES)
    spied = algorithm._replace(aggregate=spy)
    list(glocal.simulate(spied, params_of(model), train, plan, engine=engine))
    assert len(sent) == 4 * DEVICES
    assert len({tuple(upload.flatten().tolist()) for upload in sent}) == 4 * DEVICES


def test_every_seed_of_a_study_has_a_deal_of_its_own(tmp_path):
    table = {
        "data": {"partition": "dirichlet", "clients": DEVICES},
        "plan": {"rounds": 1, "clients_per_round": 2, "seeds": 2},
        "experiments": {"FedAvg": {"algorithm": "fedavg"}},
    }
    *_, last = run_study(from_dict(table), tmp_path / "run")
    sizes = [[device["train"] for device in result["clients"]] for result in last.results]
    assert len(sizes) == 2
    assert sizes[0] != sizes[1]
