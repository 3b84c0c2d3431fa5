"""The traffic, counted by hand and as the paper counts it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glocal.core import trees
from glocal.core.modules import params_of
from glocal.core.split import Split, last_layers
from glocal.studies import lenet5, mlp
from glocal.wire import Ledger, Traffic, pack, schema_of, unpack

pytestmark = pytest.mark.quick


def rounds(ledger, tree, count, *, num_clients, clients_per_round):
    uploads = {
        name: tensor.expand(clients_per_round, *tensor.shape) for name, tensor in tree.items()
    }
    for _ in range(count):
        ledger = ledger.add_round(
            tree,
            uploads,
            scalars=trees.numel(tree),
            num_sampled=clients_per_round,
            num_replied=clients_per_round,
            num_clients=num_clients,
        )
    return ledger


def counted(model, split, fedavg_rounds, lg_rounds, *, num_clients=100, clients_per_round=10):
    """FedAvg, then LG-FedAvg, then every model is sent once for the New Test."""
    params = params_of(model)
    ledger = rounds(
        Ledger(),
        params,
        fedavg_rounds,
        num_clients=num_clients,
        clients_per_round=clients_per_round,
    )
    if lg_rounds:
        ledger = rounds(
            ledger,
            trees.pick(params, split.shared),
            lg_rounds,
            num_clients=num_clients,
            clients_per_round=clients_per_round,
        )
        ledger = ledger.add_ensemble(
            trees.pick(params, split.local),
            params,
            num_trained=num_clients,
            num_clients=num_clients,
        )
    return ledger


MNIST = [
    (800, 0, "5.57"),
    (400, 100, "2.90"),
    (500, 100, "3.60"),
    (600, 100, "4.30"),
    (700, 100, "4.99"),
    (800, 100, "5.69"),
]
CIFAR = [
    (1800, 0, "12.69"),
    (1000, 100, "7.09"),
    (1200, 100, "8.50"),
    (1400, 100, "9.91"),
    (1600, 100, "11.32"),
]
CIFAR += [(1800, 100, "12.73")]


@pytest.mark.parametrize(("fedavg", "lg", "published"), MNIST)
def test_the_papers_mnist_counts_are_reproduced(fedavg, lg, published):
    """Liang et al. 2020, table of MNIST results, parameters communicated (x 10^10)."""
    model = mlp()
    ledger = counted(model, Split.of(model, shared=last_layers(model, 3)), fedavg, lg)
    assert f"{ledger.paper.parameters / 1e10:.2f}" == published


@pytest.mark.parametrize(("fedavg", "lg", "published"), CIFAR)
def test_the_papers_cifar_counts_are_reproduced(fedavg, lg, published):
    """Liang et al. 2020, table of CIFAR-10 results, parameters communicated (x 10^9)."""
    model = lenet5()
    ledger = counted(model, Split.of(model, shared=["conv1", "conv2"]), fedavg, lg)
    assert f"{ledger.paper.parameters / 1e9:.2f}" == published


@pytest.mark.parametrize(("fedavg", "lg", "published"), [(47, 0, "13.97"), (32, 17, "9.99")])
def test_the_papers_vqa_counts_are_reproduced(fedavg, lg, published):
    """Liang et al. 2020, table of VQA results (x 10^10): 50 clients, 5 per round, no ensemble."""
    whole, shared = (
        {"all": torch.empty(54_042_572, device="meta")},
        {"shared": torch.empty(5_149_200, device="meta")},
    )
    ledger = rounds(
        rounds(Ledger(), whole, fedavg, num_clients=50, clients_per_round=5),
        shared,
        lg,
        num_clients=50,
        clients_per_round=5,
    )
    assert f"{ledger.paper.parameters / 1e10:.2f}" == published


def test_the_honest_count_is_of_sampled_clients():
    tree = {"w": torch.zeros(10), "steps": torch.tensor(0)}
    ledger = rounds(Ledger(), tree, 3, num_clients=100, clients_per_round=4)
    assert ledger.download == ledger.upload == Traffic(3 * 4 * 11, 3 * 4 * 48)
    assert ledger.paper == Traffic(3 * 104 * 11, 3 * 104 * 48)
    ledger = ledger.add_evaluation(tree, 7).add_ensemble(
        {"v": torch.zeros(5)}, tree, num_trained=6, num_clients=100
    )
    assert ledger.evaluation == Traffic(77, 7 * 48)
    assert ledger.ensemble == Traffic(30, 120)
    assert ledger.total == Traffic(2 * 3 * 4 * 11 + 77 + 30, 2 * 3 * 4 * 48 + 7 * 48 + 120)


def test_who_left_before_answering_was_sent_something_and_sent_nothing():
    sent, payloads = {"w": torch.zeros(10)}, {"w": torch.zeros(3, 10)}
    counts = {"num_sampled": 5, "num_replied": 3, "num_clients": 8}
    ledger = Ledger().add_round(sent, payloads, scalars=10, **counts)
    assert ledger.download == Traffic(5 * 10, 5 * 40)
    assert ledger.upload == Traffic(3 * 10, 3 * 40)
    assert ledger.paper == Traffic((8 + 3) * 10, (8 + 3) * 40)


def test_bytes_are_those_of_the_payload_and_parameters_those_of_the_message():
    """An upload of 10 numbers that is sent as 10 bytes and a scale."""
    payloads = {"w#int8": torch.zeros(3, 10, dtype=torch.int8), "w#scale": torch.zeros(3)}
    counts = {"num_sampled": 3, "num_replied": 3, "num_clients": 8}
    ledger = Ledger().add_round({"w": torch.zeros(10)}, payloads, scalars=10, **counts)
    assert ledger.upload == Traffic(30, 3 * 14)


def test_numbers_of_examples_and_metrics_are_counted_apart():
    """A number of examples, and a sum and a weight for each metric, from every client."""
    counts = {"num_sampled": 4, "num_replied": 3, "num_clients": 8}
    one = Ledger().add_round({}, {}, scalars=0, **counts)
    two = Ledger().add_round({}, {}, scalars=0, metrics=2, **counts)
    assert one.metrics == Traffic(3 * 3, 3 * 16)
    assert two.metrics == Traffic(3 * 5, 3 * 24)
    assert one.total == one.paper == Traffic()


def test_two_ledgers_add_up():
    tree = {"w": torch.zeros(10)}
    counts = {"num_clients": 5, "clients_per_round": 2}
    one = rounds(Ledger(), tree, 1, **counts).add_evaluation(tree, 5).add_warm_start(tree, 2)
    two = rounds(Ledger(), tree, 2, **counts).add_ensemble(tree, tree, num_trained=3, num_clients=5)
    apart = rounds(Ledger(), tree, 3, **counts).add_evaluation(tree, 5).add_warm_start(tree, 2)
    assert one + two == apart.add_ensemble(tree, tree, num_trained=3, num_clients=5)


def test_a_ledger_survives_json():
    ledger = rounds(
        Ledger(), {"w": torch.zeros(3)}, 2, num_clients=5, clients_per_round=2
    ).add_evaluation({"w": torch.zeros(3)}, 5)
    assert Ledger.from_dict(ledger.as_dict()) == ledger


@given(
    st.lists(
        st.sampled_from(
            [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
        ),
        max_size=5,
    )
)
def test_what_is_packed_is_unpacked_to_the_same_bits(types):
    tree = {
        f"t{place}": torch.arange(place * 2).reshape(2, -1).to(kind)
        for place, kind in enumerate(types)
    }
    tree["scalar"] = torch.tensor(3.5)
    assert len(pack(tree)) == trees.nbytes(tree)
    assert trees.same_bits(unpack(pack(tree), schema_of(tree)), tree)


def test_bytes_of_another_model_are_refused():
    with pytest.raises(ValueError, match="12 bytes arrived, 8 were expected"):
        unpack(pack({"w": torch.zeros(3)}), schema_of({"w": torch.zeros(2)}))
