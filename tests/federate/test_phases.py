"""Clients that come, go and drift: training, changes of data, resuming, settings and reports."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch

import glocal
from glocal.cli import main
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError
from glocal.core.files import read_rows
from glocal.core.sampling import Availability, Plan, sample_available, sample_clients
from glocal.datasets.federated import FederatedData
from glocal.datasets.rotation import add_rotated_copies, rotate_images
from glocal.evaluate.forgetting import MetricHistory
from glocal.federate.experiment import Experiment, Group, Phase
from glocal.federate.options import Evaluation, Options
from glocal.federate.phases import subgroup_history
from glocal.federate.run import Run
from glocal.studies import STUDIES, from_toml, run_study, with_overrides
from glocal.studies.groups import build_phases, rotation_angle
from glocal.studies.run import resolve
from glocal.studies.settings import GroupSettings, from_dict
from tests.support import world
from tests.support.world import NUM_CLIENTS, algorithm, federation, plain, same_bits, seeded

ALL = Availability.of(range(NUM_CLIENTS))
PLAN = Plan(rounds=6, clients_per_round=3, batch_size=4)
QUICK = Options(device="cpu", engine="looped", checkpoint_every=4)
EVERY_SECOND = Evaluation(every=2)
MODEL = seeded(plain)
ROOT = Path(__file__).parents[2]


def experiment(
    *starts, data=None, plan=PLAN, name="lg_fedavg", seeds=(0,), evaluation=EVERY_SECOND, **groups
):
    """Phases of (first round, availability), all on the same data."""
    phases = tuple(Phase(first, availability) for first, availability in starts)
    return Experiment.of(
        algorithm(name, MODEL),
        data or federation(),
        plan,
        seeds=seeds,
        evaluation=evaluation,
        phases=phases,
        subgroups=groups or {"all": tuple(range(NUM_CLIENTS))},
    )


class Finished:
    """A run to its end: the result of its seed, and its rows."""

    def __init__(self, own, folder=None, callbacks=()):
        self.rows = []
        run = Run(own, folder=folder, options=QUICK, callbacks=[self, *callbacks])
        self.group = run.to_end().group()
        self.state = self.group.state.alone()

    def on_round(self, run, records):
        self.rows += [record.as_row() for record in records]

    def history(self, name):
        return subgroup_history(self.rows, name, self.group.seed)


def rounds(availability, plan=PLAN, train=None):
    """The state and the report of every round."""
    own = algorithm("lg_fedavg", MODEL)
    train = train or federation().train
    return [*world.simulate(own, train, plan, engine="looped", availability=availability)]


# which clients are sampled


def test_availability_is_sorted_and_does_not_sample_clients_that_always_take_part():
    availability = Availability.of([5, 0, 3], always=[3, 1], dropouts=[5])
    assert [row.tolist() for row in availability] == [[0, 5], [1, 3], [5]]


@pytest.mark.parametrize("part", ["available", "always", "dropouts"])
def test_a_client_named_twice_is_refused(part):
    with pytest.raises(InputError, match=f"availability: {part} names a client twice"):
        Availability.of(**{"available": [0, 1], part: [2, 2]})


def test_with_all_clients_available_sampling_is_the_plain_one():
    for index in range(20):
        assert (
            sample_available(PLAN, ALL, index).tolist()
            == sample_clients(PLAN, NUM_CLIENTS, index).tolist()
        )


def test_where_too_few_clients_are_available_all_of_them_take_part():
    assert sample_available(PLAN, Availability.of([4, 1]), 0).tolist() == [1, 4]
    assert sample_available(PLAN, Availability.of([]), 0).tolist() == []


def test_clients_that_always_take_part_do_so_besides_the_sampled_ones():
    for index in range(10):
        availability = Availability.of(range(NUM_CLIENTS), always=[2])
        sampled = sample_available(PLAN, availability, index).tolist()
        assert len(sampled) == len(set(sampled)) == 4
        assert 2 in sampled


def test_a_client_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match=r"there is no client 9; clients are 0..5"):
        rounds(Availability.of([], always=[9]))
    with pytest.raises(InputError, match=r"there is no client 9; clients are 0..5"):
        Finished(experiment((0, Availability.of([0, 9]))))


def without_rows_of(fed, client):
    none = np.zeros(0, dtype=np.int64)
    rows = tuple(none if number == client else own for number, own in enumerate(fed.train.rows))
    return replace(fed, train=replace(fed.train, rows=rows))


def test_a_client_without_rows_may_be_absent_but_not_available():
    fed = without_rows_of(federation(), 2)
    with pytest.raises(InputError, match="client 2 is available and has no training examples"):
        rounds(Availability.of([2]), train=fed.train)
    message = "client 2 is available from round 0 on and has no training examples"
    with pytest.raises(InputError, match=message):
        Finished(experiment((0, ALL), data=fed))
    without = experiment((0, Availability.of([0, 1, 4, 5])), data=fed)
    assert Finished(without).group.times_sampled[2] == 0


# absence and dropout


def test_absent_clients_never_train():
    own = experiment((0, Availability.of([0, 1, 2])), (3, Availability.of([0, 4, 5])))
    result = Finished(own).group
    assert set(result.state.private.stored) <= {0, 1, 2, 4, 5}
    assert result.times_sampled == own.times_sampled(0, PLAN.rounds).tolist()
    assert result.times_sampled[3] == 0
    assert sum(result.times_sampled) == 3 * PLAN.rounds
    assert result.state.private.of(3) is result.state.private.initial


def test_a_client_that_leaves_in_a_round_changes_nothing_but_the_download():
    everyone = replace(PLAN, rounds=1, clients_per_round=NUM_CLIENTS)
    [(stayed, left_out)] = rounds(Availability.of([0, 1, 2]), plan=everyone)
    [(left, report)] = rounds(
        Availability.of(range(NUM_CLIENTS), dropouts=[3, 4, 5]), plan=everyone
    )
    assert same_bits(stayed, left)
    assert report.clients.tolist() == [0, 1, 2]
    [traffic], [expected] = report.traffic, left_out.traffic
    assert traffic.upload == expected.upload
    assert traffic.download.bytes == 2 * expected.download.bytes


def test_a_round_that_all_clients_leave_changes_nothing():
    _, before = world.set_up(algorithm("lg_fedavg", MODEL), federation().train, PLAN)
    [(after, report)] = rounds(
        Availability.of(range(NUM_CLIENTS), dropouts=range(NUM_CLIENTS)),
        plan=replace(PLAN, rounds=1),
    )
    assert same_bits(before, after)
    assert not after.private[0].stored
    assert report.traffic[0].upload.bytes == 0
    sent = PLAN.clients_per_round * trees.nbytes(before.shared)
    assert report.traffic[0].download.bytes == sent


def test_training_goes_on_after_all_clients_left_and_others_came():
    own = experiment(
        (0, Availability.of([0, 1])),
        (2, Availability.of([0, 1], dropouts=[0, 1])),
        (3, Availability.of([])),
        (4, ALL),
    )
    finished = Finished(own)
    assert finished.group.times_sampled[0] >= 2
    assert finished.history("all").present == [2, 2, 0, 0, NUM_CLIENTS, NUM_CLIENTS]


def test_a_group_that_joins_late_has_the_initial_private_tree_until_then():
    own = experiment(
        (0, Availability.of([0, 1, 2])),
        (4, Availability.of([3, 4, 5])),
        old=(0, 1, 2),
        new=(3, 4, 5),
    )
    before = Finished(replace(own, plan=replace(PLAN, rounds=4))).state
    assert {*before.private[0].stored} == {0, 1, 2}
    after = Finished(own)
    assert {*after.state.private[0].stored} == set(range(NUM_CLIENTS))
    assert after.history("new").rounds == [5, 6]
    assert after.history("old").rounds == [1, 2, 4, 5, 6]
    assert after.history("old").present == [3, 3, 3, 0, 0]
    assert not same_bits(before, after.state, num_clients=3), "the shared part was trained"
    for client in (0, 1, 2):
        old, new = before.private[0].of(client), after.state.private[0].of(client)
        assert trees.same_bits(old, new)


def test_a_client_that_left_is_tested_with_its_local_part_and_the_current_shared_one():
    own = experiment((0, Availability.of([0, 2])), (3, Availability.of([4, 5])), old=(0, 2))
    finished = Finished(own)
    result = finished.group
    test, accuracies = federation().test, []
    for client in (0, 2):
        x, y, _ = test.of(client)
        accuracies.append((result.model(client)(x).argmax(1) == y).double().mean().item())
    assert finished.history("old").values[-1] == pytest.approx(np.mean(accuracies))
    assert np.isnan(result.by_client[[0, 1, 2, 3]]).all()


# reductions, bits, resuming


def test_phases_without_a_change_equal_a_run_without_phases():
    plain_run = Finished(replace(experiment(), subgroups={})).group
    through = Finished(experiment((0, ALL), (1, ALL), (4, ALL))).group
    assert same_bits(plain_run.state.alone(), through.state.alone())
    for name in ("local_spread", "new", "times_sampled"):
        assert getattr(plain_run, name) == getattr(through, name)
    for name in ("download", "upload"):
        assert getattr(plain_run.ledger, name) == getattr(through.ledger, name)


CHANGING = (
    (0, Availability.of([0, 1, 2, 3])),
    (2, Availability.of([0, 1, 2, 3], dropouts=[3])),
    (3, Availability.of([0, 2, 4, 5])),
)


def test_the_same_seed_gives_the_same_bits():
    first, second = Finished(experiment(*CHANGING)), Finished(experiment(*CHANGING))
    assert same_bits(first.state, second.state)
    assert first.history("all") == second.history("all")
    other = Finished(experiment(*CHANGING, seeds=(1,)))
    assert not same_bits(first.state, other.state)


def stop_after(monkeypatch, done, error):
    """Let a run fail after so many rounds."""
    advance = Run._advance

    def stopping(own, finished, plans):
        if own.progress.done == done:
            raise error
        return advance(own, finished, plans)

    monkeypatch.setattr(Run, "_advance", stopping)


# after a crash the last checkpoint is of round four; Ctrl-C saves what is done
@pytest.mark.parametrize(
    ("done", "error"),
    [(1, KeyboardInterrupt), (3, KeyboardInterrupt), (3, MemoryError), (5, MemoryError)],
)
def test_a_run_with_phases_that_was_stopped_is_resumed_to_the_same_bits(
    done, error, tmp_path, monkeypatch
):
    whole = Finished(experiment(*CHANGING), tmp_path / "whole")
    with monkeypatch.context() as patched:
        stop_after(patched, done, error)
        with pytest.raises(error):
            Finished(experiment(*CHANGING), tmp_path / "stopped")
    resumed = Finished(experiment(*CHANGING), tmp_path / "stopped")
    assert same_bits(whole.state, resumed.state)
    assert whole.group.ledger == resumed.group.ledger
    assert read_rows(tmp_path / "whole/rows.jsonl") == read_rows(tmp_path / "stopped/rows.jsonl")
    results = [(tmp_path / name / "result.json").read_bytes() for name in ("whole", "stopped")]
    assert results[0] == results[1]


def test_a_longer_run_continues_to_the_same_bits(tmp_path):
    Finished(experiment(*CHANGING, plan=replace(PLAN, rounds=4)), tmp_path)
    longer = Finished(experiment(*CHANGING), tmp_path)
    assert same_bits(longer.state, Finished(experiment(*CHANGING)).state)


def test_a_client_that_joins_after_a_warm_start_is_sent_its_local_part():
    old, plan = Availability.of([0, 1, 2]), replace(PLAN, first_round=2, rounds=4)

    def downloaded(*starts):
        return Finished(experiment(*starts, plan=plan)).group.ledger.download.bytes

    late = downloaded((0, old), (4, ALL))
    again = downloaded((0, ALL), (1, old), (4, ALL))
    made = algorithm("lg_fedavg", MODEL)
    private = made.init(made.task.initial_params()).private
    assert late == again + 3 * trees.nbytes(private)


def test_a_folder_is_not_resumed_with_other_phases(tmp_path):
    Finished(experiment(*CHANGING, plan=replace(PLAN, rounds=4)), tmp_path)
    with pytest.raises(InputError, match="was made with another phases"):
        Finished(experiment(*CHANGING[:2]), tmp_path)


def on_other_data():
    phases = (Phase(0, ALL), Phase(1, ALL, ((federation(seed=1),),)))
    return replace(experiment((0, ALL)), phases=phases)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: experiment((1, ALL)), r"begin in rounds \[1\]; begin with 0"),
        (lambda: experiment((0, ALL), (0, ALL)), r"begin in rounds \[0, 0\]"),
        (lambda: experiment((0, ALL), odd=(9,)), "subgroup 'odd' has client 9; name some of 0..5"),
        (lambda: experiment((0, ALL), none=()), "the subgroup 'none' has no client"),
        (on_other_data, "different stores of examples"),
        (
            lambda: experiment((0, ALL), evaluation=Evaluation(select="best")),
            "select = 'best' compares rounds with different",
        ),
    ],
)
def test_invalid_phases_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_forgetting_is_the_best_earlier_accuracy_less_the_last():
    assert MetricHistory([], [], []).summary() is None
    assert MetricHistory([1], [0.5], [1]).summary().forgetting == 0
    assert MetricHistory(
        [1, 2, 3], [0.5, 0.7, 0.9], [1, 1, 1]
    ).summary().forgetting == pytest.approx(-0.2)


def test_of_a_metric_of_which_lower_is_better_the_best_is_the_lowest():
    history = MetricHistory([1, 2, 3], [0.9, 0.5, 0.8], [1, 1, 1])
    first, best, last, forgetting = history.summary(higher_is_better=False)
    assert (first, best, last) == (0.9, 0.5, 0.8)
    assert forgetting == pytest.approx(0.3), "an error that rises is forgetting"
    assert str(MetricHistory([1], [0.5], [1]).summary(higher_is_better=False).forgetting) == "0.0"


def regression(name="", shift=0.0):
    """A group of clients that predict a number from the inputs."""
    task = glocal.regression(seeded(lambda: torch.nn.Linear(world.FEATURES, 1)))
    clients = [(x, x[:, 0] + shift) for x, _ in world.clients()]
    data = FederatedData.from_tensors(clients)
    return Group(glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.05)), (data,), name=name)


def with_subgroup(*groups):
    """An experiment in which half of the first group's clients are tested by themselves."""
    clients = sum(group.num_clients for group in groups)
    phases = (Phase(0, Availability.of(range(clients))),)
    subgroups = {"some": (0, 1, 2), "last": (clients - 1,)}
    return Experiment(groups, PLAN, evaluation=EVERY_SECOND, phases=phases, subgroups=subgroups)


def test_a_saved_result_has_the_forgetting_of_an_error_by_its_direction(tmp_path):
    history = Finished(with_subgroup(regression()), tmp_path).history("some")
    [saved] = json.loads((tmp_path / "result.json").read_text())
    *earlier, last = history.values
    assert saved["metric"] == "rmse"
    assert last < history.values[0], "it learns"
    assert saved["subgroups"]["some"]["best"] == min(history.values)
    assert saved["subgroups"]["some"]["forgetting"] == pytest.approx(last - min(earlier))


def test_each_group_has_the_history_of_its_own_clients(tmp_path):
    """A subgroup is evaluated once per round, and only with the clients of the group."""
    groups = (regression("near"), regression("far", shift=10.0))
    Finished(with_subgroup(*groups), tmp_path)
    rows = read_rows(tmp_path / "rows.jsonl")
    near = subgroup_history(rows, "some", 0, group="near")
    assert near.rounds == [1, 2, 4, 6]
    assert not subgroup_history(rows, "some", 0, group="far").rounds
    results = json.loads((tmp_path / "result.json").read_text())
    [first, second] = [result["subgroups"] for result in results]
    assert (first["last"], second["some"]) == (None, None)
    assert first["some"]["last"] == near.values[-1] < second["last"]["last"]


# rotation and drift


def test_rotation_by_90_degrees_moves_pixels_and_other_angles_are_close():
    images = torch.rand(5, 2, 6, 6)
    assert torch.equal(rotate_images(images, 90), images.rot90(1, (-2, -1)))
    assert torch.equal(rotate_images(images, 360), images)
    assert torch.equal(rotate_images(images[:, 0], 180), images[:, 0].flip(1, 2))
    assert torch.allclose(rotate_images(images, 90.001), rotate_images(images, 90), atol=1e-3)
    assert torch.allclose(rotate_images(torch.ones(1, 1, 8, 8), 45, 1.0), torch.ones(1, 1, 8, 8))
    oblong = torch.zeros(1, 1, 5, 9)
    oblong[..., 2, 6] = 1.0  # two to the right of the centre, and two above it after 90 degrees
    assert rotate_images(oblong, 90)[0, 0, 0, 4] == pytest.approx(1.0, abs=1e-5)


def test_rotated_copies_are_added_after_the_originals():
    examples = Examples(torch.rand(4, 1, 3, 3), torch.arange(4))
    made = add_rotated_copies(examples, {90.0: np.array([1, 3])})
    assert made.copy_rows[90.0].tolist() == [-1, 4, -1, 5]
    assert torch.equal(made.examples.x[:4], examples.x)
    assert torch.equal(made.examples.x[5], examples.x[3].rot90(1, (-2, -1)))
    assert made.examples.y.tolist() == [0, 1, 2, 3, 1, 3]


def pictures(clients=4, each=10):
    """A federation of small images."""
    generator = torch.Generator().manual_seed(0)
    count = clients * each
    store = Examples(torch.rand(count, 1, 4, 4, generator=generator), torch.arange(count) % 2)
    rows = np.arange(count).reshape(clients, each)
    return FederatedData(
        *(ClientData(store, tuple(rows[:, part])) for part in (slice(6), slice(6, 8), slice(8, 10)))
    )


def test_a_drift_gives_a_client_other_rows_from_its_round_on_only():
    groups = {
        "still": GroupSettings(2),
        "drift": GroupSettings(2, drift=30.0, drift_start=5, drift_end=30),
    }
    phases = build_phases(groups, [pictures()], 40)
    assert [phase.first_round for phase in phases] == [0, 15, 25]
    angles = [rotation_angle(groups["drift"], index) for index in (0, 14, 15, 24, 25, 39)]
    assert angles == [0.0, 0.0, 30.0, 30.0, 60.0, 60.0]
    first, second, third = (phase.data[0][0] for phase in phases)
    for part in ("train", "val", "test"):
        own = [getattr(each, part) for each in (first, second, third)]
        for each in own:
            assert np.array_equal(own[0].rows[0], each.rows[0])
            assert np.array_equal(own[0].rows[1], each.rows[1])
        assert not np.array_equal(own[0].rows[2], own[1].rows[2])
        assert torch.equal(own[1].of(2).y, own[0].of(2).y)
        before, after = own[0].of(3).x, own[2].of(3).x
        originals = first.train.examples.x[:40]
        assert torch.allclose(after, rotate_images(before, 60, originals.min()))


def test_a_group_that_leaves_is_sampled_once_more_and_drifts_no_further():
    groups = {"stay": GroupSettings(2), "go": GroupSettings(2, leave_round=12, drift=10.0)}
    phases = build_phases(groups, [pictures()], 40)
    assert [phase.first_round for phase in phases] == [0, 10, 12, 13]
    assert phases[2].availability.dropouts.tolist() == [2, 3]
    assert phases[3].availability.available.tolist() == [0, 1]
    assert rotation_angle(groups["go"], 39) == 10.0
    assert phases[3].data[0] is phases[1].data[0]


def test_seeds_have_one_store_of_examples():
    groups = {"turned": GroupSettings(4, rotate=45.0)}
    store = pictures()
    other = replace(store, train=replace(store.train, rows=store.train.rows[::-1]))
    [phase] = build_phases(groups, [store, other], 5)
    one, two = phase.data[0]
    assert one.train.examples.x is two.train.examples.x


# settings and the command line


def test_the_example_is_a_study_of_glocal():
    assert from_toml(ROOT / "examples/arrivals.toml") == STUDIES["arrivals"]


def test_groups_survive_being_written_and_read():
    settings = STUDIES["arrivals"]
    assert from_dict(settings.as_dict()) == settings
    assert "groups" not in STUDIES["digits"].as_dict()


TINY = """
[data]
clients = 6
[model]
hidden = [8]
[split]
local = ["layer1"]
[plan]
rounds = 14
clients_per_round = 2
batch_size = 50
seeds = 2
[run]
validate_every = 5
checkpoint_every = 4
engine = "looped"
[groups.old]
clients = 3
leave_round = 4
[groups.new]
clients = 2
join_round = 2
rotate = 90
[groups.drift]
clients = 1
drift = 20
[experiments.FedAvg]
algorithm = "fedavg"
[experiments.LG]
algorithm = "lg_fedavg"
start_from = "FedAvg"
start_round = 3
rounds = 11
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


@pytest.mark.usefixtures("tiny")
def test_a_study_with_groups_runs_from_toml_to_its_report(capsys):
    assert run("run", "tiny.toml", "--out", "out") == 0
    printed = capsys.readouterr().out
    assert "forgetting" in printed
    assert all(printed.count(f" {group} ") == 2 for group in ("old", "new", "drift"))
    page = Path("out/report.html").read_text()
    assert "Accuracy and forgetting" in page
    for mark in ("− old", "+ new", "↻ drift", "FedAvg: accuracy by group", "LG: accuracy by group"):
        assert mark in page
    results = json.loads(Path("out/results.json").read_text())
    assert [sorted(seed["subgroups"]) for seed in results["LG"]] == [["drift", "new", "old"]] * 2
    assert all(row["local_test"] is None for row in results["FedAvg"][0]["clients"][:3])
    assert run("report", "out") == 0
    assert "forgetting" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_a_stopped_study_with_groups_is_resumed_to_the_same_results(monkeypatch):
    settings, whole, stopped = from_toml(Path("tiny.toml")), Path("whole"), Path("stopped")
    assert list(run_study(settings, whole))
    for done, error in ((6, KeyboardInterrupt), (9, MemoryError)):
        with monkeypatch.context() as patched:
            stop_after(patched, done, error)
            with pytest.raises(error):
                list(run_study(settings, stopped))
    assert list(run_study(settings, stopped))
    for file in ("results.json", "experiments/fedavg/rows.jsonl", "experiments/lg/rows.jsonl"):
        assert (stopped / file).read_text() == (whole / file).read_text()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("groups.old.leave=3", "unknown option 'groups.old.leave'; did you mean 'leave_round'"),
        (
            "groups.old.leave_round=0",
            "groups.old joins in round 0 and leaves in round 0; make it leave later than it joins",
        ),
        (
            "groups.old.clients=30",
            "the groups have 33 clients together, the data 6; make both the same",
        ),
        ("groups.old.clients=0", "groups.old.clients is 0; a whole number from 1 to"),
        ("groups.new.join_round=14", "groups.new.join_round is 14, but rounds go from 0 to 13"),
        ("groups.old.drift_start=3", "groups.old has a drift_start or drift_end, but no drift"),
        ("groups.drift.drift_end=0", "groups.drift drifts from round 0 until 0"),
        ("groups.old.rotate=nan", "groups.old.rotate is nan; a number of degrees was expected"),
        ("groups.drift.drift_start=-5", "groups.drift.drift_start is -5; a whole number from 0 to"),
        ("groups.drift.drift_start=8", "groups.drift would rotate in round 18 for the first time"),
        ("groups.more.rotate=3", "groups.more has no number of clients"),
        ("groups.old=3", "groups.old is 3; a table was expected"),
        ("groups=3", "groups is 3; tables [groups.NAME] were expected"),
        ("run.select=best", "select = 'best' compares rounds with different clients and data"),
    ],
)
def test_invalid_settings_of_groups_are_refused_in_one_line(change, message, capsys):
    assert run("run", "tiny.toml", "--set", change, "--out", "out") == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.usefixtures("tiny")
def test_a_drift_of_data_that_are_not_images_is_refused(capsys):
    Path("table_of_mine.py").write_text(
        "import torch\n"
        "def data():\n"
        "    return [(torch.zeros(20, 5), torch.arange(20) % 2) for _ in range(6)]\n"
    )
    assert run("run", "tiny.toml", "--set", "data.source=table_of_mine:data", "--out", "out") == 2
    assert (
        "rotate: one example is (5,) torch.float32; an image (height, width)"
        in capsys.readouterr().err
    )


# the page


def committed():
    return json.loads((ROOT / "docs/results/arrivals.json").read_text())


def quoted(seeds, group, column):
    values = [100 * seed["subgroups"][group][column] for seed in seeds]
    return f"{fmean(values):.1f} ± {stdev(values):.1f}".replace("-", "−")


def test_the_page_quotes_the_measured_figures_of_every_group():
    page = (ROOT / "docs/phases.md").read_text()
    for experiment, seeds in committed()["results"].items():
        for group in seeds[0]["subgroups"]:
            columns = ("first", "best", "last", "forgetting")
            cells = [quoted(seeds, group, column) for column in columns]
            assert f"| {experiment} | {group} | {' | '.join(cells)} |" in page


def test_the_figures_of_the_page_come_with_their_command():
    results = committed()
    assert re.fullmatch(r"glocal run arrivals --seeds \d+", results["command"])
    changes = [f"plan.seeds={results['command'].split()[-1]}"]
    assert from_dict(results["settings"]) == resolve(with_overrides(STUDIES["arrivals"], changes))


WARM = """
[data]
source = "digits"
clients = 8
[model]
hidden = [16, 16]
[split]
local = ["layer1"]
[plan]
rounds = 16
clients_per_round = 3
batch_size = 5
[run]
validate_every = 4
engine = "looped"
[groups.gone]
clients = 2
leave_round = 3
[groups.old]
clients = 4
[groups.new]
clients = 2
join_round = 8
[experiments.FedAvg]
algorithm = "fedavg"
[experiments.LG]
algorithm = "lg_fedavg"
start_from = "FedAvg"
start_round = 8
rounds = 8
"""


def warm_started(folder, *changes):
    (folder / "warm.toml").write_text(WARM)
    for _ in run_study(from_toml(folder / "warm.toml", changes), folder / "run"):
        pass
    return json.loads((folder / "run" / "experiments" / "lg" / "result.json").read_text())[0]


@pytest.mark.slow
def test_a_warm_start_is_sent_to_present_clients_and_to_those_that_join_later(tmp_path):
    """The local layer has 65 x 16 numbers.

    Two new clients lack it whenever they join. Clients that left are sent nothing.
    """
    changes = {
        "at once": (),
        "later": ["groups.new.join_round=9"],
        "unvalidated": ["data.validation=0"],
    }
    sent = {}
    for name, overrides in changes.items():
        (tmp_path / name).mkdir()
        ledger = warm_started(tmp_path / name, *overrides)["ledger"]
        sent[name] = ledger["download"]["parameters"]
    assert sent["at once"] == sent["later"]
    more = sent["unvalidated"] - sent["at once"]
    assert more == 4 * 65 * 16, "without a validation, four clients lack it"


def test_a_group_that_left_before_a_warm_start_is_not_evaluated(tmp_path):
    groups = warm_started(tmp_path)["subgroups"]
    assert groups["gone"] is None
    assert groups["old"] is not None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"available": [0, -1]}, "a client in available is -1; a whole number from 0"),
        ({"available": [0], "dropouts": [7]}, "client 7 drops out, but is not available"),
    ],
)
def test_an_invalid_availability_is_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        Availability.of(**wrong)
