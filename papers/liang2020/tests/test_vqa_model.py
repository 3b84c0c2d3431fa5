"""The network for visual question answering: its counts, its LSTM, its weights, its batch norm."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from glocal.algorithms import FedAvg, LGFedAvg
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan, client_batches
from glocal.core.split import Split
from glocal.core.store import PerClient
from glocal.core.task import classification
from glocal.datasets.features import extract_features
from glocal.datasets.federated import FederatedData
from glocal.datasets.image_table import ImageTable
from glocal.engines.protocol import ClientTask, run_one
from glocal.evaluate import VQA_ACCURACY, Evaluator, local_test
from glocal.wire import Ledger
from liang2020.vqa_model import (
    SHARED,
    Block,
    ResNet,
    Sizes,
    Trunk,
    last_states,
    load_weights,
    vqa_net,
)
from tests.support import world

PAPER_WORDS = 64_437
TINY = {"sizes": Sizes(6, 5, 8, 7), "words": 9, "answers": 4}


def random_pictures(number=6, size=32):
    return ImageTable(
        np.random.default_rng(0).integers(0, 255, (number, 3, size, size), dtype=np.uint8)
    )


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return vqa_net(random_pictures(), resnet=ResNet((4, 4, 6, 6)), **{**TINY, **changes})


@pytest.fixture(scope="module")
def full():
    """Parameters, buffers and split of the paper's network, as shapes without numbers."""
    with torch.device("meta"):
        model = vqa_net(ImageTable(np.zeros((1, 3, 128, 128), np.uint8)), words=PAPER_WORDS)
    params = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return params, Split.of(model, shared=SHARED)


def test_the_network_has_as_many_parameters_as_the_paper_says(full):
    """5149200 / 54042572 = 9.53 %, appendix C.3; layer by layer."""
    params, split = full
    assert trees.numel(params) == 54_042_572
    shared = split.take_shared(params)
    layers = {}
    for name, tensor in shared.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0) + tensor.numel()
    assert layers == {
        "image.fc": 1_025_024,
        "question.fc": 2_098_176,
        "answer.fc1": 1_025_000,
        "answer.fc2": 1_001_000,
    }
    assert trees.numel(shared) == 5_149_200
    resnet = {name: tensor for name, tensor in params.items() if name.startswith("image.resnet.")}
    # torchvision's ResNet-18, and its batch norms' buffers
    assert trees.numel(resnet) == 11_689_512 + 9_620


def test_the_ledger_counts_the_papers_rounds_as_the_paper_does(full):
    """Table 2: 13.97e10 for 47 rounds of FedAvg, 9.99e10 for 32 and 17 of LG-FedAvg.

    There are 50 clients, 5 of them in a round.
    """
    params, split = full
    shared = split.take_shared(params)

    def after(ledger, tree, rounds):
        uploads = {name: tensor.expand(5, *tensor.shape) for name, tensor in tree.items()}
        for _ in range(rounds):
            ledger = ledger.add_round(
                tree,
                uploads,
                scalars=trees.numel(tree),
                num_sampled=5,
                num_replied=5,
                num_clients=50,
            )
        return ledger

    alone = after(Ledger(), params, 47)
    both = after(after(Ledger(), params, 32), shared, 17)
    assert f"{alone.paper.parameters / 1e10:.2f}" == "13.97"
    assert f"{both.paper.parameters / 1e10:.2f}" == "9.99"
    assert f"{both.paper.parameters / alone.paper.parameters:.3f}" == "0.715"
    parameters = 32 * 54_042_572 + 17 * 5_149_200
    extra = 32 * 20 * 4  # 20 counters have 8 bytes, not 4
    assert both.total.bytes == 10 * (4 * parameters + extra)


def test_the_lstm_is_torchs_own_where_all_words_are_there():
    lstm, words = nn.LSTM(5, 4, 2, batch_first=True), torch.randn(3, 6, 5)
    _, (hidden, cell) = lstm(words)
    expected = torch.cat([*hidden, *cell], 1)
    states = last_states(lstm, words, torch.ones(3, 6, dtype=torch.bool))
    assert torch.allclose(states, expected, atol=1e-6)


def test_padding_after_a_question_changes_nothing():
    model = tiny().eval()
    rows = torch.tensor([[2, 5, 3, 8]])
    padded = torch.cat([rows, torch.zeros(1, 3, dtype=torch.int64)], 1)
    assert torch.equal(model(rows), model(padded))


def test_pictures_are_no_part_of_a_model_and_shared_by_its_copies():
    model = tiny()
    assert not any("pictures" in name for name in params_of(model))
    assert copy.deepcopy(model).image.pictures is model.image.pictures


def rows_and_answers(clients=4, count=12):
    generator = np.random.default_rng(1)
    data = []
    for _ in range(clients):
        numbers = generator.integers(0, 6, (count, 1))
        words = generator.integers(1, 9, (count, 4))
        y = numbers[:, 0] % 4
        people = np.tile(y[:, None], 10)
        data.append((np.concatenate([numbers, words], 1), y, people))
    return FederatedData.from_tensors(data)


def after_rounds(algorithm, fed, engine="looped", rounds=2):
    """The state of the only group, and the last report."""
    plan = Plan(rounds, 2, batch_size=5)
    state, report = world.last(world.simulate(algorithm, fed.train, plan, engine=engine))
    return state.group(), report


def with_frozen_encoder(model):
    encoder = Trunk(model.image.resnet)
    features = extract_features(model.image.pictures, encoder, torch.device("cpu"))
    return vqa_net(features, **TINY)


@pytest.mark.parametrize("encoder", ["trained", "frozen"])
def test_all_clients_in_one_batch_train_as_one_after_the_other(encoder):
    model, fed = tiny(dropout=0.2), rows_and_answers()
    if encoder == "frozen":
        model = with_frozen_encoder(model)
    task = classification(model, metrics=VQA_ACCURACY)
    algorithm = LGFedAvg(task, optimizer=SGD(lr=0.05, momentum=0.9), shared=SHARED)
    (one, _), (other, _) = (
        after_rounds(algorithm, fed, engine) for engine in ("looped", "vmapped")
    )
    for name, tensor in one.shared.items():
        assert torch.allclose(tensor, other.shared[name], atol=2e-5), name
    for client, row in one.private.stored.items():
        for name, tensor in row.items():
            assert torch.allclose(tensor, other.private.stored[client][name], atol=2e-4), name
    looped, vmapped = (Evaluator(algorithm, engine=engine) for engine in ("looped", "vmapped"))
    assert np.allclose(local_test(looped, one, fed.test), local_test(vmapped, one, fed.test))


def norms(tree):
    return {name for name in tree if "running_" in name or "num_batches" in name}


def test_statistics_of_batch_norm_go_where_the_split_says():
    """FedAvg averages them, and with LG-FedAvg they stay local with the encoder.

    With a split that names only the norms, only they stay local (FedBN, Li et al. 2021).
    """
    model, fed = tiny(), rows_and_answers()
    task, optimizer = classification(model), SGD(lr=0.05)
    everywhere, _ = after_rounds(FedAvg(task, optimizer=optimizer), fed)
    assert norms(everywhere.shared) == norms(params_of(model)) != set()
    with_encoders = LGFedAvg(task, optimizer=optimizer, shared=SHARED)
    state, report = after_rounds(with_encoders, fed)
    assert not norms(state.shared)
    trained = [state.private.stored[client] for client in report.clients]
    one, other = (tree["image.resnet.bn1.running_mean"] for tree in trained[:2])
    assert not torch.equal(one, other)
    norms_alone = ["*.bn[12]*", "image.resnet.bn1", "image.resnet.layer*.downsample.1"]
    bn_only, _ = after_rounds(LGFedAvg(task, optimizer=optimizer, local=norms_alone), fed)
    assert norms(bn_only.private.initial) == norms(params_of(model))
    assert not norms(bn_only.shared)
    assert "image.resnet.conv1.weight" in bn_only.shared


def test_statistics_are_averaged_by_examples_and_do_not_leak_from_client_to_client():
    model, fed = tiny(), rows_and_answers()
    algorithm = FedAvg(classification(model), optimizer=SGD(lr=0.0001))
    state, report = after_rounds(algorithm, fed, rounds=1)
    name, means, before = "image.resnet.bn1.running_mean", [], params_of(model)
    for client in report.clients.tolist():
        order = client_batches(Plan(1, 2, batch_size=5), fed.train.rows[client], 0, client)
        task = ClientTask(before, {}, order)
        upload = run_one(algorithm.client_update, task, fed.train.examples, 0).upload
        means.append(before[name] + upload[name])
    sizes = torch.from_numpy(fed.train.sizes[report.clients]).float()
    expected = (torch.stack(means) * (sizes / sizes.sum())[:, None]).sum(0)
    assert torch.allclose(state.shared[name], expected, atol=1e-6)


def test_encoders_without_room_on_the_gpu_wait_on_the_host_and_untrained_clients_cost_nothing():
    model = tiny()
    local = Split.of(model, shared=SHARED).take_local(params_of(model))
    rows = PerClient(local, {}, max_gpu_rows=2)
    ones = {name: torch.ones_like(tensor) for name, tensor in local.items()}
    for client in range(6):
        rows = rows.put([client], [trees.add(local, ones)])
    assert len(rows.stored) == 6
    assert all(trees.same_bits(rows.of(client), rows.stored[client]) for client in range(6))
    assert rows.of(10_000) is local


def test_pretrained_weights_are_read_from_a_file_with_torchvisions_names(tmp_path):
    source = ResNet((4, 4, 6, 6))
    state = source.state_dict()
    dense = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(dense, tmp_path / "all.safetensors")
    trunk = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
    torch.save(trunk, tmp_path / "trunk.pth")
    torch.save({"state_dict": state, "epoch": 7}, tmp_path / "checkpoint.pth")
    for name in ("all.safetensors", "trunk.pth", "checkpoint.pth"):
        other = ResNet((4, 4, 6, 6))
        load_weights(other, str(tmp_path / name))
        assert torch.equal(other.conv1.weight, source.conv1.weight)
        assert torch.equal(
            other.get_submodule("layer2.0.downsample.1").running_var,
            state["layer2.0.downsample.1.running_var"],
        )


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = str(tmp_path / "w.safetensors")
    state = ResNet((4, 4, 6, 6)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    message = r"'conv1.weight' is \(4, 3, 7, 7\) in .*, and \(5, 3, 7, 7\) here"
    with pytest.raises(InputError, match=message):
        load_weights(ResNet((5, 4, 6, 6)), path)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"have no 'conv1.weight'"):
        load_weights(ResNet((4, 4, 6, 6)), str(tmp_path / "other.safetensors"))
    with pytest.raises(InputError, match="cannot be read"):
        load_weights(ResNet((4, 4, 6, 6)), str(tmp_path / "missing.pth"))


ODD = [
    lambda w: w * torch.nan,
    lambda w: w.to_sparse(),
    lambda w: w + 0j,
    lambda w: w.to("meta"),
    lambda w: w.double() + 1e300,
    lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["conv1.weight", "fc.weight"])
# torch's own warnings about such tensors
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_weights_that_are_no_plain_numbers_are_refused(tmp_path, odd, name):
    state = ResNet((4, 4, 6, 6)).state_dict()
    torch.save({**state, name: odd(state[name])}, tmp_path / "w.pth")
    with pytest.raises(InputError, match=rf"'{name}' in .*w.pth is not of plain, finite numbers"):
        load_weights(ResNet((4, 4, 6, 6)), str(tmp_path / "w.pth"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: nested tensors are a prototype
def test_nested_weights_are_refused(tmp_path):
    state = ResNet((4, 4, 6, 6)).state_dict()
    nested = torch.nested.nested_tensor([*state["conv1.weight"]])
    torch.save({**state, "conv1.weight": nested}, tmp_path / "w.pth")
    message = r"'conv1.weight' in .*w.pth is not of plain, finite numbers"
    with pytest.raises(InputError, match=message):
        load_weights(ResNet((4, 4, 6, 6)), str(tmp_path / "w.pth"))


def test_a_count_of_batches_that_is_none_is_refused(tmp_path):
    state = ResNet((4, 4, 6, 6)).state_dict()
    count = torch.zeros(3, dtype=torch.int64)
    torch.save({**state, "bn1.num_batches_tracked": count}, tmp_path / "w.pth")
    message = r"'bn1.num_batches_tracked' is \(3,\) in .*, and \(\) here"
    with pytest.raises(InputError, match=message):
        load_weights(ResNet((4, 4, 6, 6)), str(tmp_path / "w.pth"))


def test_a_last_layer_of_another_kind_is_left_as_it_was(tmp_path):
    source, other = ResNet((4, 4, 6, 6)), ResNet((4, 4, 6, 6))
    state, own = source.state_dict(), other.fc.weight.clone()
    trunk = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
    last = {"fc.0.weight": torch.zeros(3, 6), "fc.weight": torch.zeros(10, 6)}
    torch.save({**trunk, **last, "epoch": 7}, tmp_path / "w.pth")
    load_weights(other, str(tmp_path / "w.pth"))
    assert torch.equal(other.conv1.weight, source.conv1.weight)
    assert torch.equal(other.fc.weight, own)


def test_weights_of_a_deeper_network_are_refused(tmp_path):
    deeper = ResNet((4, 4, 6, 6))
    deeper.get_submodule("layer1").append(Block(4, 4, 1))
    torch.save(deeper.state_dict(), tmp_path / "resnet34.pth")
    message = "have 'layer1.2.bn1.bias', which ResNet-18 has not; give weights of ResNet-18"
    with pytest.raises(InputError, match=message):
        load_weights(ResNet((4, 4, 6, 6)), str(tmp_path / "resnet34.pth"))


def test_widths_must_be_four():
    with pytest.raises(InputError, match="four were expected"):
        ResNet((64, 128))
