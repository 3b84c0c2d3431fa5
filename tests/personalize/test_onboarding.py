"""New clients of a trained federation: what they train, what they leave alone, what is refused."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from glocal import fit
from glocal.algorithms import LGFedAvg
from glocal.algorithms.contract import Algorithm
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.errors import DivergedError, InputError
from glocal.core.sampling import client_batches
from glocal.datasets import load_dataset
from glocal.personalize.onboarding import (
    Joining,
    JoinPlan,
    TrainedFederation,
    append_client,
    join,
    join_many,
    new_client_ensemble_classes,
    new_client_ensemble_figure,
    new_client_figure,
    sample_labeled,
    select_ensemble,
    train_alone,
)
from glocal.studies.join_trial import JoinTrialSettings
from glocal.studies.new_client import read_inputs
from tests.support import world
from tests.support.command_line import complaint, run

NEW = world.NUM_CLIENTS


def examples(rows=20, seed=9, classes=world.CLASSES):
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        torch.randn(rows, world.FEATURES, generator=generator), torch.arange(rows) % classes
    )


def fitted(name="lg_fedavg", make=world.plain, **settings):
    """The result of a few rounds, with its data."""
    fed, algorithm = world.federation(), world.algorithm(name, world.seeded(make))
    size = {"rounds": 4, "clients_per_round": 3, "batch_size": 4, "seeds": [5]}
    return fit(algorithm, fed, **size, engine="looped", progress=False, **settings), fed


def trained(name="lg_fedavg", make=world.plain, **settings):
    """A federation after a few rounds, with its data."""
    result, fed = fitted(name, make, **settings)
    return TrainedFederation.from_result(result), fed


def row(state, client):
    return {name: tensor.clone() for name, tensor in state.private.of(client).items()}


@pytest.mark.parametrize("make", world.MODELS.values(), ids=world.MODELS)
def test_adaptation_changes_nothing_but_the_new_client(make):
    trained_federation, _ = trained(make=make)
    shared = dict(trained_federation.state.shared)
    before = [row(trained_federation.state, client) for client in range(NEW)]
    joined = join(trained_federation, examples(), join_plan=JoinPlan(epochs=3), engine="looped")
    assert trees.same_bits(joined.state.shared, shared)
    for client in range(NEW):
        assert trees.same_bits(joined.state.private.of(client), before[client])
    assert NEW not in trained_federation.state.private.stored
    private = joined.state.private.of(NEW)
    assert world.distance(private, trained_federation.state.private.initial) > 0
    params = joined.params(trained_federation.algorithm)
    assert world.distance(params, trees.merge(private, shared)) == 0


class ByHand(LGFedAvg):
    """Adapts by gradient descent in which only the local part is trainable."""

    def adapt(self, message, private, work):
        objective = self.objective._replace(trainable=self.split.local)
        return self.train(objective, message, private, work)


class Unfrozen(LGFedAvg):
    """Adapts by training both parts."""

    adapt = Algorithm.adapt


def test_the_shared_part_is_frozen_while_a_new_client_adapts():
    trained_federation, _ = trained()
    algorithm = trained_federation.algorithm
    settings = {each.name: getattr(algorithm, each.name) for each in fields(algorithm)}

    def adapted_by(kind):
        other = trained_federation._replace(algorithm=kind(**settings))
        joined = join(other, examples(), join_plan=JoinPlan(epochs=2), engine="looped")
        return joined.state.private.of(NEW)

    adapted = adapted_by(LGFedAvg)
    assert trees.same_bits(adapted, adapted_by(ByHand))
    assert not trees.same_bits(adapted, adapted_by(Unfrozen))


@pytest.mark.parametrize("name", ["lg_fedavg", "local_only"])
def test_a_new_client_trains_the_same_on_every_engine(name):
    trained_federation, _ = trained(name)
    one, other = (
        join(trained_federation, examples(), join_plan=JoinPlan(epochs=5), engine=engine)
        for engine in ("looped", "vmapped")
    )
    algorithm = trained_federation.algorithm
    assert world.distance(one.params(algorithm), other.params(algorithm)) < 1e-5


def test_joining_twice_gives_the_same_bits_and_the_number_is_then_taken():
    trained_federation, _ = trained()
    first, second = (join(trained_federation, examples(), engine="looped") for _ in range(2))
    algorithm = trained_federation.algorithm
    assert trees.same_bits(first.params(algorithm), second.params(algorithm))
    data = append_client(examples(), None, trained_federation.clients)
    joining = Joining(trained_federation.plan, data, first.state)
    with pytest.raises(InputError, match=f"client {NEW} is in this federation already"):
        join_many(algorithm, [joining], JoinPlan())


def test_without_existing_clients_the_new_client_trains_alone_in_its_rounds():
    """It always takes part, and the average over one client is that client."""
    trained_federation, fed = trained()
    before = trained_federation.state
    joined = join(
        trained_federation,
        examples(),
        existing_data=fed.train,
        join_plan=JoinPlan(epochs=0, rounds=2),
        engine="looped",
    )
    assert {*joined.state.private.stored} - {*before.private.stored} == {NEW}
    for client, tree in before.private.stored.items():
        assert joined.state.private.stored[client] is tree
    assert world.distance(joined.state.shared, before.shared) > 0
    assert joined.ledger.upload.bytes == 2 * trees.nbytes(before.shared)


def test_existing_clients_train_too_and_their_traffic_is_counted():
    trained_federation, fed = trained()
    before, join_plan = trained_federation.state, JoinPlan(epochs=1, rounds=3, existing_clients=2)
    joined = join(
        trained_federation,
        examples(),
        existing_data=fed.train,
        join_plan=join_plan,
        engine="looped",
    )
    shared, local = trees.nbytes(before.shared), trees.nbytes(before.private.initial)
    assert joined.ledger.upload.bytes == 3 * 3 * shared
    assert joined.ledger.download.bytes == shared + local + 3 * 3 * shared
    after = joined.state.private
    assert any(after.of(client) is not before.private.of(client) for client in range(NEW))
    with pytest.raises(InputError, match="2 existing clients were asked for, but not their data"):
        join(trained_federation, examples(), join_plan=join_plan)


def test_starting_from_the_average_sends_every_local_part_once():
    trained_federation, _ = trained()
    joined = join(
        trained_federation,
        examples(),
        join_plan=JoinPlan(epochs=0, rounds=1, start="average"),
        engine="looped",
    )
    private = trained_federation.state.private
    expected = len(private.stored) * trees.nbytes(private.initial)
    assert joined.ledger.ensemble.bytes == expected


def test_an_algorithm_without_a_private_part_has_nothing_to_adapt():
    trained_federation, fed = trained("fedavg")
    with pytest.raises(InputError, match="FedAvg has no private part, so nothing would be"):
        join(trained_federation, examples(), join_plan=JoinPlan(epochs=7))
    joined = join(
        trained_federation,
        examples(),
        existing_data=fed.train,
        join_plan=JoinPlan(epochs=0, rounds=1),
        engine="looped",
    )
    assert NEW in joined.state.private.stored


def test_multi_task_learning_has_no_place_for_one_more():
    trained_federation, _ = trained("mtl")
    with pytest.raises(InputError, match=f"MTL is made for a fixed number of {NEW} clients"):
        join(trained_federation, examples())


def test_joined_rounds_have_as_many_local_epochs_as_the_run(monkeypatch):
    trained_federation, fed = trained()
    local_epochs = []

    def spy(plan, *rest, **lengths):
        local_epochs.append(plan.local_epochs)
        return client_batches(plan, *rest, **lengths)

    monkeypatch.setattr(sys.modules["glocal.federate.rounds"], "client_batches", spy)
    plan = replace(trained_federation.plan, local_epochs=4)
    trained_federation = trained_federation._replace(plan=plan)
    join(
        trained_federation,
        examples(120),
        existing_data=fed.train,
        join_plan=JoinPlan(epochs=2, rounds=1),
        engine="looped",
    )
    assert local_epochs == [1, 1, 1, 1, 4], "adaptation has one epoch a round, and 100 steps"


WRONG_EXAMPLES = {
    "shape": (
        Examples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)),
        "cannot take inputs .3,. float32",
    ),
    "label": (
        examples()._replace(y=torch.full((20,), 99)),
        "labels from 0 to 2 were expected; the client has 99 to 99",
    ),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG_EXAMPLES.values(), ids=WRONG_EXAMPLES)
def test_examples_that_do_not_fit_are_refused(wrong, words):
    trained_federation, _ = trained()
    with pytest.raises(InputError, match=words):
        join(trained_federation, wrong)


def test_more_existing_clients_than_there_are_is_refused():
    trained_federation, fed = trained()
    with pytest.raises(InputError, match="9 existing clients were asked for, but there are 6"):
        join(
            trained_federation,
            examples(),
            existing_data=fed.train,
            join_plan=JoinPlan(rounds=1, existing_clients=9),
        )


def test_training_that_diverges_is_refused():
    trained_federation, _ = trained()
    far = examples()._replace(x=1e30 * examples().x)
    with pytest.raises(
        DivergedError, match=f"the loss or the upload of client {NEW} is not finite"
    ):
        join(trained_federation, far, join_plan=JoinPlan(epochs=20), engine="looped")


def test_the_ensemble_of_everyone_is_the_new_test():
    result, fed = fitted()
    trained_federation = TrainedFederation.from_result(result)
    test = fed.test.examples.take(fed.test.all_rows())
    members = select_ensemble(trained_federation, test.x)
    assert members == sorted(trained_federation.state.private.stored)
    figure = new_client_ensemble_figure(trained_federation, members, test)
    assert figure == result.new_test
    classes = new_client_ensemble_classes(trained_federation, members, test.x)
    correct = torch.tensor(classes) == test.y
    assert float(correct.double().mean()) == result.new_test


def test_the_most_confident_have_the_lowest_entropy_and_the_nearest_agree_most():
    trained_federation, _ = trained()
    state = trained_federation.state
    confident = {name: 50 * tensor for name, tensor in state.private.of(0).items()}
    state = state._replace(private=state.private.put([0], [confident]))
    trained_federation = trained_federation._replace(state=state)
    sample = examples().x
    assert select_ensemble(trained_federation, sample, by="confident", count=1) == [0]
    assert 0 not in select_ensemble(trained_federation, sample, by="nearest", count=1)
    assert len(select_ensemble(trained_federation, sample, by="nearest", count=3)) == 3
    with pytest.raises(InputError, match="by is 'loud'"):
        select_ensemble(trained_federation, sample, by="loud")
    with pytest.raises(InputError, match="needs a sample"):
        select_ensemble(trained_federation, sample[:0], by="confident", count=1)


def test_a_client_with_one_class_is_right_on_it():
    trained_federation, _ = trained()
    one = examples(classes=1)
    joined = join(trained_federation, one, join_plan=JoinPlan(epochs=30), engine="looped")
    assert new_client_figure(trained_federation, joined, one) == 1.0


def test_a_client_without_labels_is_refused():
    trained_federation, _ = trained()
    with pytest.raises(InputError, match="no labelled example"):
        join(trained_federation, sample_labeled(examples(), 0, seed=0))
    with pytest.raises(InputError, match="no labelled example to test on"):
        new_client_ensemble_figure(trained_federation, [0], examples(0))


def test_more_labels_are_a_superset_of_fewer():
    whole, samples = examples(), []
    for labels in (1, 5, 20):
        inputs = sample_labeled(whole, labels, seed=3).x
        samples.append({tuple(x) for x in inputs.tolist()})
    assert samples[0] < samples[1] < samples[2]
    assert sample_labeled(whole, None, seed=3) is whole
    message = "21 labelled examples were asked for, but the client has 20"
    with pytest.raises(InputError, match=message):
        sample_labeled(whole, 21, seed=3)


def test_training_alone_does_not_depend_on_the_federation():
    trained_federation, _ = trained()
    state, algorithm = trained_federation.state, trained_federation.algorithm
    changed = {name: tensor + 1 for name, tensor in state.shared.items()}
    other = trained_federation._replace(state=state._replace(shared=changed))
    one, two = (
        train_alone(federation, examples(), epochs=2, engine="looped").params(algorithm)
        for federation in (trained_federation, other)
    )
    assert trees.same_bits(one, two)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"existing_clients": -2}, "existing_clients is -2"),
        ({"start": "middle"}, "'middle'"),
    ],
)
def test_an_invalid_join_plan_is_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        JoinPlan(**wrong)


def test_a_join_trial_needs_an_ensemble():
    with pytest.raises(InputError, match="ensemble_size is 0"):
        JoinTrialSettings(ensemble_size=0)


def test_the_data_of_old_and_new_clients_are_in_one_store():
    _, fed = trained()
    data = append_client(examples(), fed.train, NEW)
    assert isinstance(data, ClientData)
    assert data.num_clients == NEW + 1
    assert torch.equal(data.of(NEW).x, examples().x)
    for client in range(NEW):
        assert torch.equal(data.of(client).y, fed.train.of(client).y)


# the command


SMALL = [
    "plan.rounds=4",
    "plan.seeds=2",
    "data.clients=6",
    "model.hidden=[16,16]",
    "split.local=layer1",
    "run.validate_every=2",
]
EXPERIMENTS = """
[experiments.FedAvg]
algorithm = "fedavg"
[experiments.LG]
algorithm = "lg_fedavg"
start_from = "FedAvg"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on digits by another process."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "small.toml").write_text(EXPERIMENTS)
    changes = [f"--set={change}" for change in SMALL]
    command = [sys.executable, "-m", "glocal", "run", "small.toml", "--out", "run", *changes]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "run"


def digits(rows=60, **changes):
    """Digits in the arrays of an .npz file."""
    loaded = load_dataset("digits")
    arrays = {"x": loaded.test.x[:rows].numpy(), "y": loaded.test.y[:rows].numpy()}
    return {name: array for name, array in (arrays | changes).items() if array is not None}


def checksums(folder):
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "joined" not in path.relative_to(folder).parts
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_join_measures_every_method_and_does_not_change_the_run(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    before = checksums(saved)
    options = ["--labels", "0,5,all", "--epochs", "2", "--rounds", "2", "--existing-clients", "2"]
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "Ward 7", *options) == 0
    assert checksums(saved) == before
    written = json.loads((saved / "joined" / "ward-7" / "join.json").read_text())
    without_labels = [("everyone", 0), ("confident", 0), ("nearest", 0)]
    with_five = [("local part", 5), ("alone", 5)]
    with_all = [("local part", 42), ("alone", 42), ("in the rounds", 42)]
    methods = [(row["method"], row["labels"]) for row in written["rows"]]
    assert methods == without_labels + with_five + with_all
    assert written["experiment"] == "LG"
    assert all(0 <= row["figure"] <= 1 for row in written["rows"])
    assert "in the rounds" in capsys.readouterr().out
    page = (saved / "joined" / "ward-7" / "report.html").read_text()
    assert "labelled examples of the new client" in page
    for name in ("local-part", "in-the-rounds", "shared"):
        assert (saved / "joined" / "ward-7" / f"{name}.safetensors").exists()


def test_a_name_joins_once(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    command = ["join", saved, "--data", tmp_path / "new.npz", "--name", "twice", "--labels", "0"]
    assert run(*command) == 0
    capsys.readouterr()
    assert run(*command) == 2
    assert "holds a client that has joined already; give another --name" in complaint(capsys)
    assert run("report", saved / "joined" / "twice") == 0, "its page can be written anew"
    assert "everyone" in capsys.readouterr().out
    assert run(*command, "--out", tmp_path / "elsewhere") == 0
    assert (tmp_path / "elsewhere" / "report.html").exists()


def test_a_client_without_any_label_gets_predictions(saved, tmp_path):
    np.savez(tmp_path / "new.npz", **digits(y=None))
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "blind") == 0
    lines = (saved / "joined" / "blind" / "predictions.csv").read_text().splitlines()
    assert len(lines) == 61
    written = json.loads((saved / "joined" / "blind" / "join.json").read_text())
    assert written["rows"][0]["figure"] is None


def test_a_client_without_training_labels_can_be_tested(saved, tmp_path):
    whole = digits()
    np.savez(
        tmp_path / "new.npz", x=whole["x"][:40], x_test=whole["x"][40:], y_test=whole["y"][40:]
    )
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "tested") == 0
    rows = json.loads((saved / "joined" / "tested" / "join.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["everyone", "confident", "nearest"]
    assert all(row["figure"] is not None for row in rows)


def test_arrays_of_any_order_and_layout_are_read(saved, tmp_path):
    whole, results = digits(), []
    layouts = {
        "plain": whole["x"],
        "big": whole["x"].astype(">f4"),
        "wide": whole["x"].astype(np.float64),
    }
    for name, x in layouts.items():
        np.savez(tmp_path / "new.npz", x=np.asfortranarray(x), y=whole["y"].astype(np.int32))
        options = ["--data", tmp_path / "new.npz", "--name", name, "--labels", "0"]
        assert run("join", saved, *options) == 0
        results.append(json.loads((saved / "joined" / name / "join.json").read_text())["rows"])
    assert results[0] == results[1] == results[2]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    saved, tmp_path, capsys
):
    np.savez(tmp_path / "new.npz", **digits())
    (tmp_path / "file").write_text("in the way")
    assert (
        run("join", saved, "--data", tmp_path / "new.npz", "--out", tmp_path / "file" / "new") == 2
    )
    assert "choose another --out" in complaint(capsys)


def test_a_number_of_labels_above_those_there_is_left_out(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    options = ["--data", tmp_path / "new.npz", "--name", "asks", "--labels", "1,5000"]
    assert run("join", saved, *options, "--rounds", "0") == 0
    assert "5000 labelled examples; the client has 42" in capsys.readouterr().err
    rows = json.loads((saved / "joined" / "asks" / "join.json").read_text())["rows"]
    assert {row["labels"] for row in rows} == {1}, "without 0 there is no ensemble"


def test_a_run_that_went_on_untested_is_refused(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run" / "experiments" / "lg" / "result.json"
    results = json.loads(path.read_text())
    path.write_text(json.dumps([{**result, "rounds": 1} for result in results]))
    assert run("join", tmp_path / "run", "--data", tmp_path / "new.npz") == 2
    assert "LG was resumed after its test" in complaint(capsys)


def test_a_client_with_one_class_and_one_example_joins(saved, tmp_path):
    whole = digits()
    threes = whole["y"] == 3
    np.savez(tmp_path / "new.npz", x=whole["x"][threes], y=whole["y"][threes])
    options = ["--data", tmp_path / "new.npz", "--name", "threes", "--labels", "1,all"]
    assert run("join", saved, *options, "--rounds", "0") == 0
    written = json.loads((saved / "joined" / "threes" / "join.json").read_text())
    assert written["new_client"]["classes"] == [3]
    assert written["rows"][-2]["figure"] == 1.0


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_inputs_of_any_precision_become_the_federations(own, tmp_path):
    for given in (np.float32, np.float64):
        np.savez(tmp_path / "new.npz", x=np.full((3, 2), 0.1, dtype=given))
        inputs, _ = read_inputs(str(tmp_path / "new.npz"), like=torch.zeros(1, 2, dtype=own))
        assert inputs.dtype == own


WRONG = {
    "shape": (
        {"x": np.zeros((60, 1, 28, 28), dtype=np.float32)},
        "x is (60, 1, 28, 28) torch.float32, but this federation takes",
    ),
    "type": ({"x": np.zeros((60, 1, 8, 8), dtype=np.uint8)}, "torch.uint8"),
    "label": ({"y": np.full(60, 10)}, "y holds 10, but this federation knows the classes 0..9"),
    "length": ({"y": np.zeros(3, dtype=np.int64)}, "y is (3,) for 60 inputs"),
    "NaN": ({"x": np.full((60, 1, 8, 8), np.nan, dtype=np.float32)}, "NaN or infinity"),
    "words": ({"x": np.full((60, 1, 8, 8), "a")}, "x cannot be read as numbers"),
    "fractions": (
        {"y": np.full(60, 0.5)},
        "y is torch.float64; class numbers 0..9 as whole numbers",
    ),
    "half a test": ({"x_test": np.zeros((2, 1, 8, 8), dtype=np.float32)}, "x_test with y_test"),
    "nothing": (
        {"x": np.zeros((0, 1, 8, 8), dtype=np.float32), "y": np.zeros(0, dtype=np.int64)},
        "no examples",
    ),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_data_that_do_not_fit_are_refused_in_one_line(saved, tmp_path, capsys, changes, words):
    np.savez(tmp_path / "new.npz", **digits(**changes))
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "odd") == 2
    assert words in complaint(capsys)
    assert not (saved / "joined" / "odd").exists()


MISTAKES = {
    "no file": (["--data", "none.npz"], "there is no file none.npz"),
    "no address": (["--data", "somewhere"], "the data are 'somewhere'"),
    "no module": (["--data", "nowhere:nothing"], "cannot be found"),
    "labels": (["--data", "new.npz", "--labels", "many"], "labels is 'many'"),
    "experiment": (["--data", "new.npz", "--experiment", "LGG"], "did you mean 'LG'?"),
    "seed": (["--data", "new.npz", "--seed", "7"], "there is no seed 7; this run has 0, 1"),
    "existing_clients": (
        ["--data", "new.npz", "--existing-clients", "7"],
        "7 existing clients were asked for, but there are 6",
    ),
    "start": (["--data", "new.npz", "--start", "top"], "start is 'top'; known: average, initial"),
}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_join_are_one_line(saved, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "new.npz", **digits())
    assert run("join", saved, *options) == 2
    assert words in complaint(capsys)


@pytest.mark.parametrize("content", [b"not numbers", b"", b"\x93NUMPY"])
def test_a_file_that_is_no_npz_is_refused(saved, tmp_path, capsys, content):
    (tmp_path / "new.npz").write_bytes(content)
    assert run("join", saved, "--data", tmp_path / "new.npz") == 2
    assert "cannot be read" in complaint(capsys)


def test_joining_needs_a_finished_run(tmp_path, capsys):
    assert run("join", tmp_path / "none", "--data", "new.npz") == 2
    assert "does not exist" in complaint(capsys)
