"""No selection on test data; each seed has its own partition, each client its own randomness."""

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.core.data import Examples
from glocal.datasets import Dataset
from glocal.datasets.federated import FederatedData
from glocal.studies import run_study
from glocal.studies.settings import from_dict
from tests.support import world

NUM_CLIENTS = 5


def test_the_last_round_is_compared_with_the_best_on_validation_data_too():
    """Two sets of test labels: the last model is right on all of one, wrong on the other."""
    task = glocal.classification(world.seeded(world.plain))
    algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.5, momentum=0.9))
    own, inputs = world.clients((60, 60, 60)), [x for x, _ in world.clients((30, 30, 30), seed=5)]

    def selected(labels, select):
        test = list(zip(inputs, labels, strict=True))
        federation = FederatedData.from_tensors(own, test=test, validation=0.3)
        result = glocal.fit(
            algorithm,
            federation,
            rounds=6,
            clients_per_round=2,
            evaluation=glocal.Evaluation(every=4, select=select),  # not after the 6th, the last
            progress=False,
        )
        return result.group()

    unknown = [torch.zeros(len(x), dtype=torch.int64) for x in inputs]
    last = selected(unknown, "last")
    predicted = [last.model(client)(x).argmax(1) for client, x in enumerate(inputs)]
    right = selected(predicted, "best")
    wrong = selected([(labels + 1) % world.CLASSES for labels in predicted], "best")
    assert selected(predicted, "last").local_test == 1, (
        "the test needs labels that the last round predicts"
    )
    assert right.selected_round == wrong.selected_round
    validated = [each.validation["accuracy"].by_client.tolist() for each in (right, wrong)]
    assert validated[0] == validated[1]
    assert world.same_bits(right.state.alone(), wrong.state.alone(), 3)


def rows(client_data):
    return [own.tolist() for own in client_data.rows]


def parts(federation):
    """The rows of all clients in each part."""
    held = {"train": federation.train, "validation": federation.val, "test": federation.test}
    return {name: rows(part) for name, part in held.items()}


def test_another_seed_holds_out_other_examples():
    own = world.clients((40,) * NUM_CLIENTS)
    federations = [FederatedData.from_tensors(own, validation=0.3, seed=seed) for seed in (0, 0, 1)]
    first, again, other = map(parts, federations)
    assert first == again
    for part in ("train", "validation", "test"):
        assert all(left != right for left, right in zip(first[part], other[part], strict=True))


def test_every_client_holds_out_examples_by_its_own_draw():
    held = parts(FederatedData.from_tensors(world.clients((40,) * NUM_CLIENTS), validation=0.3))
    for part in ("validation", "test"):
        places = [tuple(row - 40 * client for row in own) for client, own in enumerate(held[part])]
        assert len(set(places)) == NUM_CLIENTS


def dataset():
    generator = torch.Generator().manual_seed(0)
    labels = [torch.randint(4, (size,), generator=generator) for size in (400, 200)]
    train, test = (Examples(torch.randn(len(y), 3, generator=generator), y) for y in labels)
    return Dataset(train, test, 4)


PARTITIONS = {
    "iid": lambda: glocal.iid(NUM_CLIENTS),
    "shards": lambda: glocal.shards(NUM_CLIENTS, 2),
    "random_shards": lambda: glocal.random_shards(NUM_CLIENTS, 2),
    "dirichlet": lambda: glocal.dirichlet(NUM_CLIENTS, 0.5),
}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_another_seed_gives_another_partition(partition):
    partitioner = PARTITIONS[partition]()
    federations = [
        glocal.FederatedData.partition(dataset(), partitioner, seed=seed) for seed in (0, 0, 1)
    ]
    first, again, other = map(parts, federations)
    assert first == again
    assert all(first[part] != other[part] for part in first)


def test_another_seed_holds_out_other_examples_of_a_natural_partition():
    everyone = np.arange(400) % NUM_CLIENTS
    by_person = glocal.natural(everyone, everyone[:200])
    first, other = (
        parts(glocal.FederatedData.partition(dataset(), by_person, seed=seed)) for seed in (0, 1)
    )
    assert first["test"] == other["test"]
    assert all(a != b for a, b in zip(first["validation"], other["validation"], strict=True))


def drop_first():
    """Its gradients are zero exactly where inputs were dropped."""
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(64, world.CLASSES))


class DrawFirst(nn.Module):
    """The same with torch's own generator."""

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
def test_no_two_clients_and_no_two_rounds_drop_the_same_units(make, engine):
    """All clients have one example and start from one model: only randomness differs."""
    sent = []

    class Spied(glocal.FedAvg):
        def server_update(self, shared, server, uploads):
            name = "1.weight" if make is drop_first else "head.weight"
            sent.extend(uploads.messages[name].clone())
            return shared, server

    same = [(torch.ones(1, 64), torch.zeros(1, dtype=torch.int64))] * NUM_CLIENTS
    train = FederatedData.from_tensors(same, test=same, validation=0.0).train
    plan = glocal.Plan(rounds=4, clients_per_round=NUM_CLIENTS)
    task = glocal.classification(world.seeded(make))
    list(world.simulate(Spied(task, optimizer=glocal.SGD(lr=0.1)), train, plan, engine=engine))
    assert len(sent) == 4 * NUM_CLIENTS
    assert len({tuple(upload.flatten().tolist()) for upload in sent}) == 4 * NUM_CLIENTS


def test_every_seed_of_a_study_has_its_own_partition(tmp_path):
    table = {
        "data": {"partition": "dirichlet", "clients": NUM_CLIENTS},
        "plan": {"rounds": 1, "clients_per_round": 2, "seeds": 2},
        "experiments": {"FedAvg": {"algorithm": "fedavg"}},
    }
    *_, last = run_study(from_dict(table), tmp_path / "run")
    sizes = [[client["train"] for client in result["clients"]] for result in last.results]
    assert len(sizes) == 2
    assert sizes[0] != sizes[1]
