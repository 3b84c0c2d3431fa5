"""A new device meets a trained federation: what it may learn, what it must leave alone, and what is refused."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from glocal import Plan, fit, sgd
from glocal.algorithms import lg_fedavg
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.errors import DivergedError, InputError
from glocal.core.sampling import client_batches
from glocal.core.training import cross_entropy
from glocal.federate.fitting import Options
from glocal.federate.rounds import Seat
from glocal.personalize.onboarding import (
    JoinPlan,
    TrainedFederation,
    append_client,
    join,
    join_many,
    new_client_accuracy,
    new_client_ensemble_accuracy,
    new_client_ensemble_classes,
    sample_labeled,
    select_ensemble,
    train_alone,
)
from glocal.studies.join_trial import JoinTrialSettings
from tests.cli.test_cli import complaint, run
from tests.support import world

PLAN = Plan(rounds=4, clients_per_round=3, batch_size=4, seed=5)
NEW = world.NUM_CLIENTS


def examples(rows=20, seed=9, classes=world.CLASSES):
    generator = torch.Generator().manual_seed(seed)
    return Examples(
        torch.randn(rows, world.FEATURES, generator=generator), torch.arange(rows) % classes
    )


def trained(name="lg_fedavg", make=world.plain, **hyperparameters):
    """A federation after a few rounds, with its data."""
    model, fed = world.seeded(make), world.federation()
    return TrainedFederation.from_result(
        fit(
            world.algorithm(name, model, **hyperparameters),
            model,
            fed,
            PLAN,
            options=Options(engine="looped"),
        )
    ), fed


def row(state, device):
    return {name: tensor.clone() for name, tensor in state.private.of(device).items()}


@pytest.mark.parametrize("make", world.MODELS.values(), ids=world.MODELS)
def test_learning_the_local_part_changes_nothing_but_the_newcomer(make):
    trained_federation, _ = trained(make=make)
    shared, before = (
        dict(trained_federation.state.shared),
        [row(trained_federation.state, device) for device in range(NEW)],
    )
    joined = join(trained_federation, examples(), join_plan=JoinPlan(epochs=3), engine="looped")
    assert trees.same_bits(joined.state.shared, shared)
    assert all(
        trees.same_bits(joined.state.private.of(device), before[device]) for device in range(NEW)
    )
    assert NEW not in trained_federation.state.private.trained
    learnt = joined.state.private.of(NEW)
    assert world.distance(learnt, trained_federation.state.private.initial) > 0
    assert (
        world.distance(joined.params(trained_federation.algorithm), trees.merge(learnt, shared))
        == 0
    )


def test_the_shared_part_is_frozen_while_the_newcomer_settles():
    """What it has learnt is what gradient descent gives where only the local part may move."""
    model = world.seeded(world.plain)
    trained_federation, _ = trained()
    only_local = cross_entropy(model)._replace(trainable=world.first_half(model).local)
    by_hand = lg_fedavg(
        only_local, sgd(0.1, momentum=0.5), split=world.first_half(model)
    ).client_update
    joined, expected = (
        join(
            trained_federation._replace(
                algorithm=trained_federation.algorithm._replace(adapt=adapt)
            ),
            examples(),
            join_plan=JoinPlan(epochs=2),
            engine="looped",
        )
        for adapt in (trained_federation.algorithm.adapt, by_hand)
    )
    assert trees.same_bits(joined.state.private.of(NEW), expected.state.private.of(NEW))
    both = trained_federation._replace(
        algorithm=trained_federation.algorithm._replace(
            adapt=trained_federation.algorithm.client_update
        )
    )
    unfrozen = join(both, examples(), join_plan=JoinPlan(epochs=2), engine="looped")
    assert not trees.same_bits(joined.state.private.of(NEW), unfrozen.state.private.of(NEW))


@pytest.mark.parametrize("name", ["lg_fedavg", "local_only"])
def test_a_newcomer_learns_the_same_on_every_engine(name):
    trained_federation, _ = trained(name)
    one, other = (
        join(trained_federation, examples(), join_plan=JoinPlan(epochs=5), engine=engine)
        for engine in ("looped", "vmapped")
    )
    assert (
        world.distance(
            one.params(trained_federation.algorithm), other.params(trained_federation.algorithm)
        )
        < 1e-5
    )


def test_joining_twice_gives_the_same_bits_and_the_number_is_then_taken():
    trained_federation, _ = trained()
    first, second = (join(trained_federation, examples(), engine="looped") for _ in range(2))
    assert trees.same_bits(
        first.params(trained_federation.algorithm), second.params(trained_federation.algorithm)
    )
    seat = Seat(
        trained_federation.plan,
        append_client(examples(), None, trained_federation.clients),
        first.state,
    )
    with pytest.raises(InputError, match=f"device {NEW} is in this federation already"):
        join_many(trained_federation.algorithm, [seat], JoinPlan())


def test_without_guests_the_rounds_are_the_newcomers_own():
    """It always takes part, and the average over one device is that device."""
    trained_federation, fed = trained()
    joined = join(
        trained_federation,
        examples(),
        existing_data=fed.train,
        join_plan=JoinPlan(epochs=0, rounds=2),
        engine="looped",
    )
    assert sorted(
        {*joined.state.private.trained} - {*trained_federation.state.private.trained}
    ) == [NEW]
    assert all(
        joined.state.private.trained[device] is row
        for device, row in trained_federation.state.private.trained.items()
    )
    assert world.distance(joined.state.shared, trained_federation.state.shared) > 0
    assert joined.ledger.upload.bytes == 2 * trees.nbytes(trained_federation.state.shared)


def test_guests_take_part_and_everything_they_receive_and_send_is_counted():
    trained_federation, fed = trained()
    join_plan = JoinPlan(epochs=1, rounds=3, existing_clients=2)
    joined = join(
        trained_federation,
        examples(),
        existing_data=fed.train,
        join_plan=join_plan,
        engine="looped",
    )
    shared, local = (
        trees.nbytes(trained_federation.state.shared),
        trees.nbytes(trained_federation.state.private.initial),
    )
    assert joined.ledger.upload.bytes == 3 * 3 * shared
    assert joined.ledger.download.bytes == shared + local + 3 * 3 * shared
    moved = [
        device
        for device in range(NEW)
        if joined.state.private.of(device) is not trained_federation.state.private.of(device)
    ]
    assert moved, "guests train"
    with pytest.raises(InputError, match="2 guests were asked for, but not their data"):
        join(trained_federation, examples(), join_plan=join_plan)


def test_starting_from_the_average_shows_every_local_part_once():
    trained_federation, _ = trained()
    joined = join(
        trained_federation,
        examples(),
        join_plan=JoinPlan(epochs=0, rounds=1, start="average"),
        engine="looped",
    )
    count = len(trained_federation.state.private.trained)
    assert joined.ledger.ensemble.bytes == count * trees.nbytes(
        trained_federation.state.private.initial
    )


def test_an_algorithm_without_private_parts_has_nothing_to_settle():
    trained_federation, fed = trained("fedavg")
    with pytest.raises(
        InputError, match="fedavg keeps nothing local, so that nothing would be learnt"
    ):
        join(trained_federation, examples(), join_plan=JoinPlan(epochs=7))
    joined = join(
        trained_federation,
        examples(),
        existing_data=fed.train,
        join_plan=JoinPlan(epochs=0, rounds=1),
        engine="looped",
    )
    assert NEW in joined.state.private.trained


def test_multi_task_learning_has_no_place_for_one_more():
    trained_federation, _ = trained("mtl")
    with pytest.raises(InputError, match=f"mtl is made for {NEW} devices"):
        join(trained_federation, examples())


def test_joined_rounds_have_as_many_local_epochs_as_the_run(monkeypatch):
    trained_federation, fed = trained()
    seen = []

    def spy(plan, *rest, **lengths):
        seen.append(plan.local_epochs)
        return client_batches(plan, *rest, **lengths)

    monkeypatch.setattr(sys.modules["glocal.federate.rounds"], "client_batches", spy)
    trained_federation = trained_federation._replace(
        plan=replace(trained_federation.plan, local_epochs=4)
    )
    join(
        trained_federation,
        examples(120),
        existing_data=fed.train,
        join_plan=JoinPlan(epochs=2, rounds=1),
        engine="looped",
    )
    assert seen == [1, 1, 1, 1, 4], (
        "a settling epoch is one, and a hundred steps are taken at least"
    )


WRONG_EXAMPLES = {
    "shape": (
        Examples(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)),
        "cannot take inputs of shape",
    ),
    "label": (
        examples()._replace(y=torch.full((20,), 99)),
        "labels from 0 to 2 were expected; the device has 99 to 99",
    ),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG_EXAMPLES.values(), ids=WRONG_EXAMPLES)
def test_examples_that_do_not_fit_are_refused(wrong, words):
    trained_federation, _ = trained()
    with pytest.raises(InputError, match=words):
        join(trained_federation, wrong)


def test_more_guests_than_devices_are_refused():
    trained_federation, fed = trained()
    with pytest.raises(InputError, match="9 guests were asked for, but there are 6 devices"):
        join(
            trained_federation,
            examples(),
            existing_data=fed.train,
            join_plan=JoinPlan(rounds=1, existing_clients=9),
        )


def test_training_that_diverges_is_told():
    trained_federation, _ = trained()
    far = examples()._replace(x=1e30 * examples().x)
    with pytest.raises(DivergedError, match="a loss is not finite"):
        join(trained_federation, far, join_plan=JoinPlan(epochs=20), engine="looped")


def test_the_ensemble_of_everyone_is_the_new_test():
    model, fed = world.seeded(world.plain), world.federation()
    result = fit(
        world.algorithm("lg_fedavg", model), model, fed, PLAN, options=Options(engine="looped")
    )
    trained_federation = TrainedFederation.from_result(result)
    test = fed.test.examples.take(fed.test.all_rows())
    assert select_ensemble(trained_federation, test.x) == sorted(
        trained_federation.state.private.trained
    )
    assert (
        new_client_ensemble_accuracy(
            trained_federation, select_ensemble(trained_federation, test.x), test
        )
        == result.new_spread.logits
    )
    guesses = torch.tensor(
        new_client_ensemble_classes(
            trained_federation, select_ensemble(trained_federation, test.x), test.x
        )
    )
    assert float((guesses == test.y).double().mean()) == result.new_spread.logits


def test_the_most_confident_have_the_lowest_entropy_and_the_nearest_agree_most():
    trained_federation, _ = trained()
    sure = {name: 50 * tensor for name, tensor in trained_federation.state.private.of(0).items()}
    trained_federation = trained_federation._replace(
        state=trained_federation.state._replace(
            private=trained_federation.state.private.put([0], [sure])
        )
    )
    sample = examples().x
    assert select_ensemble(trained_federation, sample, by="confident", count=1) == [0]
    assert 0 not in select_ensemble(trained_federation, sample, by="nearest", count=1)
    assert len(select_ensemble(trained_federation, sample, by="nearest", count=3)) == 3
    with pytest.raises(InputError, match="by is 'loud'"):
        select_ensemble(trained_federation, sample, by="loud")
    with pytest.raises(InputError, match="needs a sample"):
        select_ensemble(trained_federation, sample[:0], by="confident", count=1)


def test_a_device_with_one_class_learns_it():
    trained_federation, _ = trained()
    one = examples(classes=1)
    joined = join(trained_federation, one, join_plan=JoinPlan(epochs=30), engine="looped")
    assert new_client_accuracy(trained_federation, joined, one) == 1.0


def test_a_device_without_labels_can_learn_nothing():
    trained_federation, _ = trained()
    with pytest.raises(InputError, match="no labelled example"):
        join(trained_federation, sample_labeled(examples(), 0, seed=0))
    with pytest.raises(InputError, match="no labelled example to test on"):
        new_client_ensemble_accuracy(trained_federation, [0], examples(0))


def test_more_labels_are_a_superset_of_fewer():
    whole = examples()
    sets = [
        {tuple(x.tolist()) for x in sample_labeled(whole, labels, seed=3).x}
        for labels in (1, 5, 20)
    ]
    assert sets[0] < sets[1] < sets[2]
    assert sample_labeled(whole, None, seed=3) is whole
    with pytest.raises(
        InputError, match="21 labelled examples were asked for, but the device has 20"
    ):
        sample_labeled(whole, 21, seed=3)


def test_alone_is_training_on_its_own_data_from_fresh_weights():
    trained_federation, _ = trained()
    lonely = train_alone(trained_federation, examples(), epochs=2, engine="looped")
    changed = trained_federation._replace(
        state=trained_federation.state._replace(
            shared={n: t + 1 for n, t in trained_federation.state.shared.items()}
        )
    )
    other = train_alone(changed, examples(), epochs=2, engine="looped")
    assert trees.same_bits(
        lonely.params(trained_federation.algorithm), other.params(trained_federation.algorithm)
    ), "the federation plays no part in it"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"existing_clients": -2}, "existing_clients is -2"),
        ({"start": "middle"}, "'middle'"),
    ],
)
def test_a_welcome_that_makes_no_sense_is_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        JoinPlan(**wrong)


def test_a_joining_needs_members_and_a_sample():
    with pytest.raises(InputError, match="ensemble_size is 0"):
        JoinTrialSettings(ensemble_size=0)


def test_old_data_and_the_newcomers_go_into_one_store():
    _, fed = trained()
    crowd = append_client(examples(), fed.train, NEW)
    assert crowd.num_clients == NEW + 1
    assert torch.equal(crowd.of(NEW).x, examples().x)
    assert all(torch.equal(crowd.of(device).y, fed.train.of(device).y) for device in range(NEW))
    assert isinstance(crowd, ClientData)


# the command


SMALL = [
    "plan.rounds=4",
    "plan.seeds=2",
    "data.clients=6",
    "model.hidden=[16,16]",
    "split.local=layer1",
    "run.validate_every=2",
]
CASES = """
[experiments.FedAvg]
algorithm = "fedavg"
[experiments.LG]
algorithm = "lg_fedavg"
start_from = "FedAvg"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of digits that another process has left behind."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "small.toml").write_text(CASES)
    changes = [word for change in SMALL for word in ("--set", change)]
    command = [sys.executable, "-m", "glocal", "run", "small.toml", "--out", "run", *changes]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder / "run"


def digits(rows=60, **changes):
    """Digits as the federation has them, as an .npz holds them."""
    from glocal.datasets import load

    loaded = load("digits")
    taken = {"x": loaded.test.x[:rows].numpy(), "y": loaded.test.y[:rows].numpy()}
    return {name: array for name, array in (taken | changes).items() if array is not None}


def checksums(folder):
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "joined" not in path.relative_to(folder).parts
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_join_tries_every_way_and_leaves_the_run_as_it_was(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    before = checksums(saved)
    options = ["--labels", "0,5,all", "--epochs", "2", "--rounds", "2", "--existing-clients", "2"]
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "Ward 7", *options) == 0
    assert checksums(saved) == before
    found = json.loads((saved / "joined" / "ward-7" / "join.json").read_text())
    ways = [(row["method"], row["labels"]) for row in found["rows"]]
    learnt = [
        ("local part", 5),
        ("alone", 5),
        ("local part", 42),
        ("alone", 42),
        ("in the rounds", 42),
    ]
    assert ways == [("everyone", 0), ("confident", 0), ("nearest", 0), *learnt]
    assert found["experiment"] == "LG"
    assert all(0 <= row["accuracy"] <= 1 for row in found["rows"])
    assert "in the rounds" in capsys.readouterr().out
    page = (saved / "joined" / "ward-7" / "report.html").read_text()
    assert "labelled examples of the new device" in page
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


def test_a_device_without_any_label_gets_predictions(saved, tmp_path):
    np.savez(tmp_path / "new.npz", **digits(y=None))
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "blind") == 0
    lines = (saved / "joined" / "blind" / "predictions.csv").read_text().splitlines()
    assert len(lines) == 61
    assert (
        json.loads((saved / "joined" / "blind" / "join.json").read_text())["rows"][0]["accuracy"]
        is None
    )


def test_a_device_without_labels_of_its_own_can_be_tested(saved, tmp_path):
    whole = digits()
    np.savez(
        tmp_path / "new.npz", x=whole["x"][:40], x_test=whole["x"][40:], y_test=whole["y"][40:]
    )
    assert run("join", saved, "--data", tmp_path / "new.npz", "--name", "tested") == 0
    rows = json.loads((saved / "joined" / "tested" / "join.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["everyone", "confident", "nearest"]
    assert all(row["accuracy"] is not None for row in rows)


def test_arrays_of_any_order_and_layout_are_read(saved, tmp_path):
    whole = digits()
    found = []
    for name, x in (
        ("plain", whole["x"]),
        ("big", whole["x"].astype(">f4")),
        ("wide", whole["x"].astype(np.float64)),
    ):
        np.savez(tmp_path / "new.npz", x=np.asfortranarray(x), y=whole["y"].astype(np.int32))
        assert (
            run("join", saved, "--data", tmp_path / "new.npz", "--name", name, "--labels", "0") == 0
        )
        found.append(json.loads((saved / "joined" / name / "join.json").read_text())["rows"])
    assert found[0] == found[1] == found[2]


def test_what_cannot_be_written_is_told_before_anything_is_computed(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    (tmp_path / "file").write_text("in the way")
    assert (
        run("join", saved, "--data", tmp_path / "new.npz", "--out", tmp_path / "file" / "new") == 2
    )
    assert "choose another --out" in complaint(capsys)


def test_a_number_of_labels_that_is_not_there_is_told(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    assert (
        run(
            "join",
            saved,
            "--data",
            tmp_path / "new.npz",
            "--name",
            "asks",
            "--labels",
            "1,5000",
            "--rounds",
            "0",
        )
        == 0
    )
    assert "skipped: 5000 labelled examples; the client has 42" in capsys.readouterr().err
    rows = json.loads((saved / "joined" / "asks" / "join.json").read_text())["rows"]
    assert {row["labels"] for row in rows} == {1}, "without 0 nothing is borrowed"


def test_a_run_that_went_on_untested_is_refused(saved, tmp_path, capsys):
    np.savez(tmp_path / "new.npz", **digits())
    shutil.copytree(saved, tmp_path / "run")
    path = tmp_path / "run" / "experiments" / "lg" / "result.json"
    results = json.loads(path.read_text())
    path.write_text(json.dumps([{**result, "rounds": 1} for result in results]))
    assert run("join", tmp_path / "run", "--data", tmp_path / "new.npz") == 2
    assert "LG was resumed after its test" in complaint(capsys)


def test_a_device_with_one_class_and_one_example_joins(saved, tmp_path):
    one = digits()
    mine = one["y"] == 3
    np.savez(tmp_path / "new.npz", x=one["x"][mine], y=one["y"][mine])
    assert (
        run(
            "join",
            saved,
            "--data",
            tmp_path / "new.npz",
            "--name",
            "threes",
            "--labels",
            "1,all",
            "--rounds",
            "0",
        )
        == 0
    )
    found = json.loads((saved / "joined" / "threes" / "join.json").read_text())
    assert found["new_client"]["classes"] == [3]
    assert found["rows"][-2]["accuracy"] == 1.0


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
        "y is torch.float32; class numbers 0..9 as whole numbers",
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
        "7 guests were asked for, but there are 6 devices",
    ),
    "start": (["--data", "new.npz", "--start", "top"], "'initial' or 'average'"),
}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_join_are_one_line(saved, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "new.npz", **digits())
    assert run("join", saved, *options) == 2
    assert words in complaint(capsys)


@pytest.mark.parametrize("held", [b"not numbers", b"", b"\x93NUMPY"])
def test_a_file_that_is_no_npz_is_refused(saved, tmp_path, capsys, held):
    (tmp_path / "new.npz").write_bytes(held)
    assert run("join", saved, "--data", tmp_path / "new.npz") == 2
    assert "cannot be read" in complaint(capsys)


def test_joining_needs_a_finished_run(tmp_path, capsys):
    assert run("join", tmp_path / "none", "--data", "new.npz") == 2
    assert "does not exist" in complaint(capsys)
