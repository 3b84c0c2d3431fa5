"""Devices that come, go and drift: who is absent never trains, changes come when they are said to, and stops leave no trace."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch

import glocal.federate.scenario
from glocal.cli import main
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError
from glocal.core.files import read_rows
from glocal.core.modules import params_of
from glocal.core.sampling import Availability, Plan, sample_available, sample_clients
from glocal.datasets.federated import FederatedData
from glocal.datasets.rotation import add_rotated_copies, rotate_images
from glocal.engines import Executor
from glocal.evaluate.forgetting import AccuracyHistory
from glocal.federate.fitting import Case, Options, fit
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.federate.scenario import Chapter, Scenario, Story, fit_scenario, participation
from glocal.studies import STUDIES, from_toml, run_study, with_overrides
from glocal.studies.groups import build_scenario, rotation_angle
from glocal.studies.run import resolve
from glocal.studies.settings import GroupSettings, from_dict
from glocal.wire import Ledger
from tests.support.world import NUM_CLIENTS, algorithm, federation, plain, same_bits, seeded

ALL = Availability.of(range(NUM_CLIENTS))
PLAN = Plan(rounds=6, clients_per_round=3, batch_size=4)
QUICK = Options(device="cpu", engine="looped", validate_every=2, checkpoint_every=4)
MODEL = seeded(plain)
ROOT = Path(__file__).parents[2]


def scenario(*chapters, fed=None, **groups):
    """Chapters of (first round, attendance), all on the same data."""
    fed = fed or federation()
    told = tuple(Chapter(first, attendance, (fed,)) for first, attendance in chapters)
    return Scenario(told, groups or {"all": tuple(range(NUM_CLIENTS))})


def told(story, name="lg_fedavg", plan=PLAN, **where):
    return fit_scenario(algorithm(name, MODEL), MODEL, story, plan, **{"options": QUICK, **where})


def seats(attendance, plan=PLAN, train=None, name="lg_fedavg"):
    return [
        Seat(
            plan,
            train or federation().train,
            initial_state(algorithm(name, MODEL), params_of(MODEL)),
            attendance,
        )
    ]


def rounds(attendance, **what):
    made = algorithm("lg_fedavg", MODEL)
    return [
        moment[0]
        for moment in simulate_seeds(
            made, seats(attendance, **what), Executor(made.client_update, engine="looped")
        )
    ]


# who can be asked


def test_an_attendance_is_sorted_and_samples_nobody_who_comes_anyway():
    attendance = Availability.of([5, 0, 3], always=[3, 1], dropouts=[5])
    assert [row.tolist() for row in attendance] == [[0, 5], [1, 3], [5]]


@pytest.mark.parametrize("part", ["available", "always", "dropouts"])
def test_a_device_named_twice_is_refused(part):
    with pytest.raises(InputError, match=f"availability: {part} names a client twice"):
        Availability.of(**{"available": [0, 1], part: [2, 2]})


def test_with_all_present_a_cohort_is_the_plain_one():
    for index in range(20):
        assert (
            sample_available(PLAN, ALL, index).tolist()
            == sample_clients(PLAN, NUM_CLIENTS, index).tolist()
        )


def test_where_fewer_are_present_than_a_cohort_all_of_them_take_part():
    assert sample_available(PLAN, Availability.of([4, 1]), 0).tolist() == [1, 4]
    assert sample_available(PLAN, Availability.of([]), 0).tolist() == []


def test_who_always_takes_part_does_so_besides_a_cohort():
    for index in range(10):
        cohort = sample_available(PLAN, Availability.of(range(NUM_CLIENTS), always=[2]), index).tolist()
        assert len(cohort) == len(set(cohort)) == 4
        assert 2 in cohort


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match=r"there is no device 9; devices are 0..5"):
        rounds(Availability.of([], always=[9]))
    with pytest.raises(InputError, match=r"there is no device 9; devices are 0..5"):
        told(scenario((0, Availability.of([0, 9]))))


def without_rows_of(fed, device):
    none = np.zeros(0, dtype=np.int64)
    rows = tuple(none if number == device else own for number, own in enumerate(fed.train.rows))
    return replace(fed, train=replace(fed.train, rows=rows))


def test_a_device_without_rows_may_be_absent_and_not_present():
    fed = without_rows_of(federation(), 2)
    with pytest.raises(InputError, match="device 2 is present and has no training examples"):
        rounds(Availability.of([2]), train=fed.train)
    with pytest.raises(
        InputError, match="device 2 is present from round 0 on and has no training examples"
    ):
        told(scenario((0, ALL), fed=fed))
    assert told(scenario((0, Availability.of([0, 1, 4, 5])), fed=fed)).result.times_sampled[2] == 0


# what absence and leaving do


def test_devices_that_are_absent_never_train():
    story = scenario((0, Availability.of([0, 1, 2])), (3, Availability.of([0, 4, 5])))
    result = told(story).result
    assert set(result.state.private.trained) <= {0, 1, 2, 4, 5}
    assert result.times_sampled == participation(story, PLAN).tolist()
    assert result.times_sampled[3] == 0
    assert sum(result.times_sampled) == 3 * PLAN.rounds
    assert result.state.private.of(3) is result.state.private.initial


def test_a_device_that_leaves_in_a_round_changes_nothing_and_only_its_download_is_counted():
    everyone = replace(PLAN, rounds=1, clients_per_round=NUM_CLIENTS)
    [(stayed, left_out)] = rounds(Availability.of([0, 1, 2]), plan=everyone)
    [(left, report)] = rounds(Availability.of(range(NUM_CLIENTS), dropouts=[3, 4, 5]), plan=everyone)
    assert same_bits(stayed, left)
    assert report.clients_per_round.tolist() == [0, 1, 2]
    assert report.traffic.upload == left_out.traffic.upload
    assert report.traffic.download.bytes == 2 * left_out.traffic.download.bytes


def test_a_round_that_everybody_leaves_changes_nothing():
    before = initial_state(algorithm("lg_fedavg", MODEL), params_of(MODEL))
    [(after, report)] = rounds(
        Availability.of(range(NUM_CLIENTS), dropouts=range(NUM_CLIENTS)), plan=replace(PLAN, rounds=1)
    )
    assert same_bits(before, after)
    assert not after.private.trained
    assert report.traffic.upload.bytes == 0
    assert report.traffic.download.bytes == PLAN.clients_per_round * trees.nbytes(before.shared)


def test_training_goes_on_after_all_have_left_and_others_have_come():
    story = scenario(
        (0, Availability.of([0, 1])),
        (2, Availability.of([0, 1], dropouts=[0, 1])),
        (3, Availability.of([])),
        (4, ALL),
    )
    result, courses = told(story)
    assert result.times_sampled[0] >= 2
    assert courses["all"].present == [2, 2, 0, 0, NUM_CLIENTS, NUM_CLIENTS]


def test_a_group_that_arrives_late_has_the_initial_row_until_then(tmp_path):
    story = scenario(
        (0, Availability.of([0, 1, 2])),
        (4, Availability.of([3, 4, 5])),
        old=(0, 1, 2),
        new=(3, 4, 5),
    )
    before = told(story, plan=replace(PLAN, rounds=4)).result.state
    assert {*before.private.trained} == {0, 1, 2}
    after, courses = told(story)
    assert {*after.state.private.trained} == set(range(NUM_CLIENTS))
    assert courses["new"].rounds == [5, 6]
    assert courses["old"].rounds == [1, 2, 4, 5, 6]
    assert courses["old"].present == [3, 3, 3, 0, 0]
    assert same_bits(before, after.state, num_clients=3) is False  # the shared part went on
    assert all(
        trees.same_bits(before.private.of(device), after.state.private.of(device))
        for device in (0, 1, 2)
    )


def test_whoever_left_is_tested_with_its_own_part_and_todays_shared_one():
    story = scenario((0, Availability.of([0, 2])), (3, Availability.of([4, 5])), old=(0, 2))
    result, courses = told(story)
    test, right = federation().test, []
    for device in (0, 2):
        x, y, _ = test.of(device)
        right.append((result.model(device)(x).argmax(1) == y).double().mean().item())
    assert courses["old"].accuracies[-1] == pytest.approx(np.mean(right))
    assert np.isnan(result.accuracies[[0, 1, 2, 3]]).all()


# reductions, bits, stops


def test_chapters_in_which_nothing_changes_are_one_plain_fit():
    plain_fit = fit(algorithm("lg_fedavg", MODEL), MODEL, federation(), PLAN, options=QUICK)
    through = told(scenario((0, ALL), (1, ALL), (4, ALL))).result
    assert same_bits(plain_fit.state, through.state)
    assert (plain_fit.local_spread, plain_fit.new_spread, plain_fit.times_sampled) == (
        through.local_spread,
        through.new_spread,
        through.times_sampled,
    )
    assert (plain_fit.ledger.download, plain_fit.ledger.upload) == (
        through.ledger.download,
        through.ledger.upload,
    )


CHANGING = (
    (0, Availability.of([0, 1, 2, 3])),
    (2, Availability.of([0, 1, 2, 3], dropouts=[3])),
    (3, Availability.of([0, 2, 4, 5])),
)


def test_the_same_seed_gives_the_same_bits():
    first, second = told(scenario(*CHANGING)), told(scenario(*CHANGING))
    assert same_bits(first.result.state, second.result.state)
    assert first.courses == second.courses
    assert not same_bits(
        first.result.state, told(scenario(*CHANGING), plan=replace(PLAN, seed=1)).result.state
    )


def stopping_after(done, error):
    """What happens after a round, until so many are done."""
    advanced = glocal.federate.scenario._advanced

    def stopping(story, evaluation, before, round_):
        if before.done == done:
            raise error
        return advanced(story, evaluation, before, round_)

    return stopping


# a crash leaves what the last checkpoint holds, after four rounds; Ctrl-C leaves what was done
@pytest.mark.parametrize(
    ("done", "error"),
    [(1, KeyboardInterrupt), (3, KeyboardInterrupt), (3, MemoryError), (5, MemoryError)],
)
def test_a_scenario_that_was_stopped_goes_on_to_the_same_bits(done, error, tmp_path, monkeypatch):
    whole = told(scenario(*CHANGING), folder=tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(glocal.federate.scenario, "_advanced", stopping_after(done, error))
        with pytest.raises(error):
            told(scenario(*CHANGING), folder=tmp_path / "stopped")
    resumed = told(scenario(*CHANGING), folder=tmp_path / "stopped")
    assert same_bits(whole.result.state, resumed.result.state)
    assert whole.courses == resumed.courses
    assert whole.result.ledger == resumed.result.ledger
    assert read_rows(tmp_path / "whole/rows.jsonl") == read_rows(tmp_path / "stopped/rows.jsonl")


def test_a_scenario_goes_on_for_longer_to_the_same_bits(tmp_path):
    told(scenario(*CHANGING), plan=replace(PLAN, rounds=4), folder=tmp_path)
    longer = told(scenario(*CHANGING), folder=tmp_path).result
    assert same_bits(longer.state, told(scenario(*CHANGING)).result.state)


def test_whoever_arrives_after_a_warm_start_is_sent_the_local_part_it_gives():
    made, old, plan = (
        algorithm("lg_fedavg", MODEL),
        Availability.of([0, 1, 2]),
        replace(PLAN, first_round=2, rounds=4),
    )

    def downloaded(story):
        federations = story.chapters[0].federations
        telling = Story(
            Case(made, MODEL, plan, (0,), (params_of(MODEL),), federations, (Ledger(),)),
            story,
            QUICK,
        ).move_to_device()
        *_, last = telling.train(telling.start_or_resume(None), None)
        return last.progress.ledgers[0].download.bytes

    local = trees.nbytes(made.init(params_of(MODEL))[1])
    assert (
        downloaded(scenario((0, old), (4, ALL)))
        == downloaded(scenario((0, ALL), (1, old), (4, ALL))) + 3 * local
    )


def test_a_folder_is_not_continued_with_another_scenario(tmp_path):
    told(scenario(*CHANGING), plan=replace(PLAN, rounds=4), folder=tmp_path)
    with pytest.raises(InputError, match="was made with another scenario"):
        told(scenario(*CHANGING[:2]), folder=tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: scenario(), r"chapters begin in rounds \[\]; begin with 0"),
        (lambda: scenario((0, ALL), (0, ALL)), r"begin in rounds \[0, 0\]"),
        (lambda: scenario((0, ALL), odd=(9,)), "the group 'odd' has device 9; name some of 0..5"),
        (lambda: scenario((0, ALL), none=()), "the group 'none' has no device"),
        (
            lambda: Scenario(
                (Chapter(0, ALL, (federation(),)), Chapter(1, ALL, (federation(),))), {}
            ),
            "different stores of examples",
        ),
        (
            lambda: told(scenario((0, ALL)), options=replace(QUICK, select="best")),
            "select = 'best' compares rounds with different",
        ),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_forgetting_is_the_best_earlier_accuracy_less_the_last():
    assert AccuracyHistory([], [], []).summary() is None
    assert AccuracyHistory([1], [0.5], [1]).summary().forgetting == 0
    assert AccuracyHistory(
        [1, 2, 3], [0.5, 0.7, 0.9], [1, 1, 1]
    ).summary().forgetting == pytest.approx(-0.2)


# turning and drifting


def test_quarter_turns_move_pixels_and_other_angles_nearly_do():
    images = torch.rand(5, 2, 6, 6)
    assert torch.equal(rotate_images(images, 90), images.rot90(1, (-2, -1)))
    assert torch.equal(rotate_images(images, 360), images)
    assert torch.equal(rotate_images(images[:, 0], 180), images[:, 0].flip(1, 2))
    assert torch.allclose(rotate_images(images, 90.001), rotate_images(images, 90), atol=1e-3)
    assert torch.allclose(rotate_images(torch.ones(1, 1, 8, 8), 45, 1.0), torch.ones(1, 1, 8, 8))
    oblong = torch.zeros(1, 1, 5, 9)
    oblong[..., 2, 6] = 1.0  # two to the right of the middle, so two above it after a quarter turn
    assert rotate_images(oblong, 90)[0, 0, 0, 4] == pytest.approx(1.0, abs=1e-5)


def test_an_album_holds_the_originals_and_the_turned_copies():
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


def test_a_drift_gives_a_device_other_rows_from_its_round_on_only():
    groups = {
        "still": GroupSettings(2),
        "drift": GroupSettings(2, drift=30.0, drift_start=5, drift_end=30),
    }
    story = build_scenario(groups, [pictures()], 40)
    assert [chapter.first_round for chapter in story.chapters] == [0, 15, 25]
    assert [rotation_angle(groups["drift"], index) for index in (0, 14, 15, 24, 25, 39)] == [
        0.0,
        0.0,
        30.0,
        30.0,
        60.0,
        60.0,
    ]
    first, second, third = (chapter.federations[0] for chapter in story.chapters)
    for part in ("train", "val", "test"):
        own = [getattr(each, part) for each in (first, second, third)]
        assert all(
            np.array_equal(own[0].rows[device], each.rows[device])
            for each in own
            for device in (0, 1)
        )
        assert not np.array_equal(own[0].rows[2], own[1].rows[2])
        assert torch.equal(own[1].of(2).y, own[0].of(2).y)
        before, after = own[0].of(3).x, own[2].of(3).x
        assert torch.allclose(
            after,
            rotate_images(before, 60, story.chapters[0].federations[0].train.examples.x[:40].min()),
        )


def test_a_group_that_leaves_is_asked_once_more_and_turns_no_further():
    groups = {"stay": GroupSettings(2), "go": GroupSettings(2, leave_round=12, drift=10.0)}
    story = build_scenario(groups, [pictures()], 40)
    assert [chapter.first_round for chapter in story.chapters] == [0, 10, 12, 13]
    assert story.chapters[2].attendance.dropouts.tolist() == [2, 3]
    assert story.chapters[3].attendance.available.tolist() == [0, 1]
    assert rotation_angle(groups["go"], 39) == 10.0
    assert story.chapters[3].federations is story.chapters[1].federations


def test_seeds_of_a_scenario_share_one_store():
    groups = {"turned": GroupSettings(4, rotate=45.0)}
    store = pictures()
    other = replace(store, train=replace(store.train, rows=store.train.rows[::-1]))
    [chapter] = build_scenario(groups, [store, other], 5).chapters
    assert chapter.federations[0].train.examples.x is chapter.federations[1].train.examples.x


# settings and the command line


def test_the_example_is_the_study_that_comes_with_glocal():
    assert from_toml(ROOT / "examples/arrivals.toml") == STUDIES["arrivals"]


def test_groups_survive_being_written_and_read():
    settings = STUDIES["arrivals"]
    assert from_dict(settings.as_dict()) == settings
    assert "groups" not in STUDIES["digits"].as_dict()


TINY = (
    '[data]\nclients = 6\n[model]\nhidden = [8]\n[split]\nlocal = ["layer1"]\n'
    "[plan]\nrounds = 14\nclients_per_round = 2\nbatch_size = 50\nseeds = 2\n"
    "[run]\nvalidate_every = 5\ncheckpoint_every = 4\nengine = 'looped'\n"
    "[groups.old]\nclients = 3\nleave_round = 4\n[groups.new]\nclients = 2\njoin_round = 2\nrotate = 90\n"
    "[groups.drift]\nclients = 1\ndrift = 20\n"
    '[experiments.FedAvg]\nalgorithm = "fedavg"\n[experiments.LG]\nalgorithm = "lg_fedavg"\nstart_from = "FedAvg"\nstart_round = 3\nrounds = 11\n'
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


@pytest.mark.usefixtures("tiny")
def test_a_scenario_runs_from_toml_to_its_report(capsys):
    assert run("run", "tiny.toml", "--out", "kept") == 0
    printed = capsys.readouterr().out
    assert "forgetting" in printed
    assert all(printed.count(f" {group} ") == 2 for group in ("old", "new", "drift"))
    page = Path("kept/report.html").read_text()
    assert "What they had, and what they forgot" in page
    for mark in ("− old", "+ new", "↻ drift", "FedAvg: accuracy by group", "LG: accuracy by group"):
        assert mark in page
    results = json.loads(Path("kept/results.json").read_text())
    assert [sorted(seed["groups"]) for seed in results["LG"]] == [["drift", "new", "old"]] * 2
    assert all(device["local_test"] is None for device in results["FedAvg"][0]["clients"][:3])
    assert run("report", "kept") == 0
    assert "forgetting" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny")
def test_a_study_stopped_in_a_scenario_goes_on_to_the_same_results(monkeypatch):
    settings, whole, kept = from_toml(Path("tiny.toml")), Path("whole"), Path("kept")
    assert list(run_study(settings, whole))
    for done, error in ((6, KeyboardInterrupt), (9, MemoryError)):
        with monkeypatch.context() as patched:
            patched.setattr(glocal.federate.scenario, "_advanced", stopping_after(done, error))
            with pytest.raises(error):
                list(run_study(settings, kept))
    assert list(run_study(settings, kept))
    for file in ("results.json", "experiments/fedavg/rows.jsonl", "experiments/lg/rows.jsonl"):
        assert (kept / file).read_text() == (whole / file).read_text()


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
        ("run.select=best", "select = 'best' compares rounds with different devices and data"),
    ],
)
def test_settings_of_groups_that_cannot_be_are_refused_in_one_line(change, message, capsys):
    assert run("run", "tiny.toml", "--set", change, "--out", "kept") == 2
    assert message in capsys.readouterr().err
    assert not Path("kept").exists()


@pytest.mark.usefixtures("tiny")
def test_a_drift_of_what_is_no_image_is_refused(capsys):
    Path("table_of_mine.py").write_text(
        "import torch\ndef data():\n    return [(torch.zeros(20, 5), torch.arange(20) % 2) for _ in range(6)]\n"
    )
    assert run("run", "tiny.toml", "--set", "data.source=table_of_mine:data", "--out", "kept") == 2
    assert (
        "rotate: one example is (5,) torch.float32; an image (height, width)"
        in capsys.readouterr().err
    )


# what the page says


def committed():
    return json.loads((ROOT / "docs/results/arrivals.json").read_text())


def quoted(seeds, group, column):
    values = [100 * seed["groups"][group][column] for seed in seeds]
    return f"{fmean(values):.1f} ± {stdev(values):.1f}".replace("-", "−")


def test_the_page_quotes_every_group_as_it_was_measured():
    page = (ROOT / "docs/arrivals.md").read_text()
    for experiment, seeds in committed()["results"].items():
        for group in seeds[0]["groups"]:
            cells = [
                quoted(seeds, group, column) for column in ("first", "best", "last", "forgetting")
            ]
            assert f"| {experiment} | {group} | {' | '.join(cells)} |" in page


def test_the_numbers_of_the_page_name_the_command_that_made_them():
    made = committed()
    assert re.fullmatch(r"glocal run arrivals --seeds \d+", made["command"])
    changes = [f"plan.seeds={made['command'].split()[-1]}"]
    assert from_dict(made["settings"]) == resolve(with_overrides(STUDIES["arrivals"], changes))


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
def test_a_warm_start_is_sent_to_those_who_are_there_and_to_whoever_comes(tmp_path):
    """The local layer has 65 x 16 numbers; two newcomers lack it whenever they come, and whoever left is sent nothing."""
    sent = {}
    for name, changes in {
        "at once": (),
        "later": ["groups.new.join_round=9"],
        "unvalidated": ["data.validation=0"],
    }.items():
        (tmp_path / name).mkdir()
        sent[name] = warm_started(tmp_path / name, *changes)["ledger"]["download"]["parameters"]
    assert sent["at once"] == sent["later"]
    assert sent["unvalidated"] - sent["at once"] == 4 * 65 * 16, (
        "the four who stayed have not been sent it by a validation"
    )


def test_a_group_that_left_before_a_warm_start_has_no_part_in_it(tmp_path):
    groups = warm_started(tmp_path)["groups"]
    assert groups["gone"] is None
    assert groups["old"] is not None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"available": [0, -1]}, "names client -1"),
        ({"available": [0], "dropouts": [7]}, "client 7 drops out, but is not available"),
    ],
)
def test_an_attendance_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        Availability.of(**wrong)
