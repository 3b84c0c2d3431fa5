"""Frozen tensors exist once: no upload, ledger, checkpoint or client's file has them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal import FederatedData, Options
from glocal.core.errors import InputError
from glocal.core.files import read_tensors
from glocal.core.model_tensors import base_fingerprint, client_tensors, frozen_tensors
from glocal.core.modules import params_of, predictor, training_forward
from glocal.core.trees import nbytes, same_bits
from glocal.datasets.fetch import no_progress
from glocal.federate.fit import build_experiment
from glocal.federate.group_result import load_model, save_models
from glocal.studies.build import build_components
from glocal.studies.settings import from_dict
from glocal.wire import pack
from tests.support import world

PLAN = glocal.Plan(rounds=3, clients_per_round=3, batch_size=5)


def base_and_head(seed=0, width=64):
    """A frozen base with batch norm, then an own layer and a head."""
    layers = [nn.Linear(world.FEATURES, width), nn.BatchNorm1d(width), nn.ReLU()]
    base = nn.Sequential(*layers, nn.Linear(width, 6), nn.Dropout(0.2))
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("base", base.requires_grad_(False))
    model.add_module("encoder", nn.Linear(6, 4))
    model.add_module("head", nn.Linear(4, world.CLASSES))
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.BatchNorm1d):
            layer.reset_parameters()
    with torch.no_grad():
        base[1].running_mean.normal_()
        base[1].running_var.uniform_(0.5, 2)
    return model


def lg_fedavg(model):
    task = glocal.classification(model)
    return glocal.LGFedAvg(task, optimizer=glocal.SGD(lr=0.1), local="encoder")


def fit(model, algorithm=None, folder=None, *, plan=PLAN, engine="looped"):
    """The result of the first seed; a checkpoint is saved after every round."""
    experiment = build_experiment(algorithm or lg_fedavg(model), world.federation(), plan=plan)
    options = Options(engine=engine, device="cpu", checkpoint_every=1)
    return glocal.Run(experiment, folder=folder, options=options).to_end().group()


def test_what_is_frozen():
    model = base_and_head()
    assert {name.split(".")[0] for name in frozen_tensors(model)} == {"base"}
    assert {*client_tensors(model)} == {
        f"{layer}.{part}" for layer in ("encoder", "head") for part in ("weight", "bias")
    }
    assert "base.1.running_mean" in frozen_tensors(model)
    model.base[1].weight.requires_grad_(True)
    assert "base.1.running_mean" not in frozen_tensors(model), "its statistics train with it"


def test_a_buffer_without_parameters_around_it_belongs_to_the_module_above():
    frozen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)).requires_grad_(False)
    model = nn.Sequential(frozen, nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
    buffers = {name for name in frozen_tensors(model) if "running" in name}
    assert buffers == {"0.1.running_mean", "0.1.running_var"}


def test_bytes_are_those_of_the_trainable_shared_part():
    model = base_and_head()
    result = fit(model)
    shared = {name: tensor for name, tensor in model.named_parameters() if name.startswith("head")}
    assert {*result.state.shared} == {*shared}
    sent = PLAN.rounds * PLAN.clients_per_round
    assert result.ledger.upload.bytes == result.ledger.download.bytes == sent * nbytes(shared)
    assert len(pack(result.state.shared)) == nbytes(shared)


@pytest.mark.parametrize("name", world.NAMES)
@pytest.mark.parametrize("engine", ["looped", "vmapped", "workers"])
def test_frozen_tensors_are_in_no_state_and_stay_as_they_are(name, engine):
    model = base_and_head()
    before = {key: tensor.clone() for key, tensor in frozen_tensors(model).items()}
    local = ["encoder.weight", "encoder.bias"] if name == "lg_fedavg" else None
    algorithm = world.algorithm(name, model, local=local)
    state = fit(model, algorithm, engine=engine).state
    trees = (state.shared, state.private.initial, *state.private.stored.values())
    names = {key for tree in trees for key in tree}
    assert not {key for key in names if "base" in key}
    assert all(torch.equal(before[key], value) for key, value in frozen_tensors(model).items())


def test_training_equals_torchs_with_the_base_in_evaluation_mode():
    model = base_and_head().double()
    model.base[4].p = 0.0
    x, y = world.clients((12,))[0]
    data = FederatedData.from_tensors([(x.double(), y)], test=0.0, validation=0.0)
    plan = {"rounds": 2, "clients_per_round": 1, "batch_size": 12}
    algorithm = glocal.FedAvg(glocal.classification(model), optimizer=glocal.SGD(lr=0.1))
    result = glocal.fit(algorithm, data, **plan, device="cpu", progress=False)

    expected = base_and_head().double()
    expected.base[4].p = 0.0
    expected.train().base[1].eval()
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(expected(x.double()), y).backward()
        optimizer.step()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(result.state_dict(0)[name], tensor, atol=1e-12, rtol=0)


def test_a_stopped_run_goes_on_and_its_checkpoint_has_no_frozen_tensor(tmp_path):
    model = base_and_head()
    whole = fit(model, folder=tmp_path / "whole")
    tensors, _ = read_tensors(tmp_path / "whole/checkpoint.safetensors")
    assert not [name for name in tensors if "base" in name]
    fit(model, folder=tmp_path / "stopped", plan=replace(PLAN, rounds=1))
    again = fit(model, folder=tmp_path / "stopped")
    assert world.same_bits(whole.state.alone(), again.state.alone())


def test_a_run_on_another_base_is_refused(tmp_path):
    fit(base_and_head(), folder=tmp_path)
    with pytest.raises(InputError, match=r"made with another .*base\.0\.weight"):
        fit(base_and_head(seed=1), folder=tmp_path)


def test_a_clients_file_has_no_frozen_tensor_and_loads_onto_its_base_only(tmp_path):
    model = base_and_head()
    result = fit(model)
    save_models(result, tmp_path)
    path = tmp_path / "client-0001.safetensors"
    tensors, header = read_tensors(path)
    assert {*tensors} == {*client_tensors(model)}
    assert header["base"] == base_fingerprint(model)
    x = torch.randn(7, world.FEATURES)
    torch.testing.assert_close(load_model(path, base_and_head())(x), result.model(1)(x))
    with pytest.raises(
        InputError,
        match=r"the one given has the frozen tensors \w+; give",
    ):
        load_model(path, base_and_head(seed=1))
    with pytest.raises(InputError, match="the one given has no frozen tensors"):
        load_model(path, base_and_head().requires_grad_(True))


def test_a_file_that_does_not_fit_the_model_is_refused(tmp_path):
    model = world.seeded(world.plain)
    save_models(fit(model, world.algorithm("local_only", model)), tmp_path)
    path = tmp_path / "client-0000.safetensors"
    assert load_model(path, model) is not model
    wider = nn.Sequential(nn.Linear(world.FEATURES, 99), nn.ReLU(), nn.Linear(99, world.CLASSES))
    with pytest.raises(InputError, match="does not fit the model given"):
        load_model(path, wider)
    with pytest.raises(InputError, match=r"lacks 9\.weight|lacks 9\.bias"):
        load_model(path, nn.Sequential(*model, *[nn.ReLU()] * (9 - len(model)), nn.Linear(3, 3)))


def test_the_split_shows_three_roles():
    model = base_and_head()
    split = glocal.Split.of(model, local="encoder")
    lines = split.describe(model).splitlines()
    roles = {line.split()[0]: line.split()[1] for line in lines[1:-1]}
    assert roles["base.0.weight"] == roles["base.1.running_var"] == "frozen"
    assert roles["encoder.weight"] == "local"
    assert roles["head.bias"] == "shared"
    total = sum(tensor.numel() for tensor in model.state_dict().values())
    assert f"of {total:,} parameters" in lines[-1]


@pytest.mark.parametrize("side", ["local", "shared"])
def test_a_term_that_matches_frozen_tensors_only_is_refused(side):
    with pytest.raises(InputError, match="'base' matches frozen tensors only"):
        glocal.Split.of(base_and_head(), **{side: "base"})


def test_predictions_use_the_base():
    model = base_and_head().eval()
    x = torch.randn(5, world.FEATURES)
    mask = torch.ones(5, dtype=torch.bool)
    torch.testing.assert_close(predictor(model)(params_of(model), x, mask), model(x))
    output, buffers = training_forward(model)(params_of(model), x, mask, torch.tensor(3))
    assert output.shape == (5, world.CLASSES)
    assert not buffers, "the statistics of a frozen batch norm stay"


MEMORY = """
import json, resource, sys
import torch
from torch import nn
import glocal

clients, engine, new_test = int(sys.argv[1]), sys.argv[2], sys.argv[3]
base = nn.Sequential(nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(),
                     nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 32))
model = nn.Sequential(base.requires_grad_(False), nn.Linear(32, 4), nn.Linear(4, 3))
data = glocal.FederatedData.from_tensors(
    [(torch.randn(10, 64), torch.arange(10) % 3) for _ in range(clients)]
)
task = glocal.classification(model)
algorithm = glocal.LGFedAvg(task, optimizer=glocal.SGD(lr=0.1), local="1")
evaluation = glocal.Evaluation(every=1, new_test=new_test == "new test")
glocal.fit(algorithm, data, rounds=3, clients_per_round=min(clients, 5), evaluation=evaluation,
           engine=engine, device="cpu", progress=False)
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                  trainable / sum(p.numel() for p in model.parameters())]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "new_test"), [("looped", "new test"), ("vmapped", "no new test")]
)
def test_two_hundred_clients_on_a_frozen_base_need_little_more_memory_than_one(engine, new_test):
    """Batched, the New Test also holds the activations of many models on the same rows."""

    def run(clients):
        command = [sys.executable, "-c", MEMORY, str(clients), engine, new_test]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(ended.stdout)

    (one, share), (many, _) = run(1), run(200)
    assert share < 0.01, "99 % of the weights are frozen"
    assert many < 1.3 * one


def test_parameters_that_the_task_freezes_are_those_that_need_no_gradient():
    """The user's own model stays as it is, and no value is copied."""
    asked_for, by_hand = base_and_head(), base_and_head()
    asked_for.requires_grad_(True)
    task = glocal.classification(asked_for)
    named = replace(task, frozen=["base", "head.bias"])
    by_hand.head.bias.requires_grad_(False)
    assert frozen_tensors(named.model).keys() == frozen_tensors(by_hand).keys()
    assert all(parameter.requires_grad for parameter in asked_for.parameters())
    for name, tensor in frozen_tensors(named.model).items():
        if not name.startswith("base.1."):  # a buffer is copied
            assert tensor.data_ptr() == asked_for.get_parameter(name).data_ptr(), name
    algorithm = glocal.LGFedAvg(named, optimizer=glocal.SGD(lr=0.1), local="encoder")
    ours, expected = fit(named.model, algorithm), fit(by_hand)
    assert same_bits(ours.state.shared, expected.state.shared)
    assert ours.ledger == expected.ledger


def test_freezing_nothing_or_everything_is_refused():
    with pytest.raises(InputError, match=r"'bass' matches no parameter .* did you mean 'base'"):
        replace(glocal.classification(base_and_head()), frozen="bass")
    with pytest.raises(InputError, match="every parameter is frozen; there is nothing to train"):
        replace(glocal.classification(base_and_head()), frozen="*")


def test_a_study_freezes_what_its_task_names(tmp_path):
    """In a study as on the command line, with its bytes."""
    command = [sys.executable, "-m", "glocal", "split", "mlp", "--local", "layer2"]
    ran = subprocess.run([*command, "--frozen", "layer1"], capture_output=True, text=True)
    assert "layer1.weight  frozen" in ran.stdout, ran.stderr
    study = from_dict(
        {
            "task": {"frozen": ["layer1"]},
            "plan": {"rounds": 1},
            "experiments": {"A": {"algorithm": "fedavg"}},
        }
    )
    parts = build_components(study, no_progress)
    assert {*frozen_tensors(parts.task.model)} == {"layer1.weight", "layer1.bias"}
