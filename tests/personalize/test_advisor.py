"""The advisor: what it measures, what crosses the wire for it, what it recommends, and how it says so."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms import fedavg, lg_fedavg
from glocal.cli import main
from glocal.cli.advise import print_advice, recommendation
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.sampling import Plan
from glocal.core.training import cross_entropy
from glocal.engines import Executor
from glocal.evaluate.intervals import ConfidenceInterval
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.personalize.advisor import AdvisorConfig, Budget, advise, halving, search
from glocal.personalize.advisor.budget import Cost
from glocal.personalize.advisor.candidates import make_candidates
from glocal.personalize.advisor.groups import accuracy_difference, find_groups
from glocal.personalize.advisor.halving import HalvingSetup, Stage, run_rounds, start_halving
from glocal.personalize.advisor.variances import estimate_variances
from glocal.studies import STUDIES, with_overrides
from glocal.studies.models import lenet5
from glocal.wire import Ledger
from tests.support import world

DEVICES, FEATURES, CLASSES = 8, 6, 4
QUICK = AdvisorConfig(num_clients=8, stages=(1, 2))
SGD = glocal.sgd(0.1, momentum=0.5)


def two_layers():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def federation(*, own_labels, examples=60):
    """Devices with one rule for all, or each with the classes renamed in its own way: then a shared last layer can only guess."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    clients = []
    for _ in range(DEVICES):
        x = torch.randn(examples, FEATURES, generator=generator)
        renamed = (
            torch.randperm(CLASSES, generator=generator) if own_labels else torch.arange(CLASSES)
        )
        clients.append((x, renamed[(x @ teacher).argmax(1)]))
    return glocal.from_tensors(clients)


def asked(fed, *, plan=None, **config):
    model = world.seeded(two_layers)
    algorithm = fedavg(cross_entropy(model), SGD)
    return advise(
        algorithm, model, fed, plan or Plan(10, 4, batch_size=10), config=replace(QUICK, **config)
    )


def test_devices_that_name_classes_differently_keep_the_last_layer():
    advice = asked(federation(own_labels=True, examples=200))
    assert "2" in advice.choice.local
    assert advice.variances["all"].low > 0.5
    worst = min(advice.rows, key=lambda row: row.accuracy[1])
    assert "2" in worst.candidate.shared


def test_devices_that_are_all_alike_share():
    advice = asked(federation(own_labels=False, examples=200))
    assert advice.choice.shared
    assert advice.variances["all"].high < 0.5


def test_the_same_seed_gives_the_same_advice():
    first, second = (asked(federation(own_labels=True)) for _ in range(2))
    assert [row.accuracy for row in first.rows] == [row.accuracy for row in second.rows]
    assert first.variances == second.variances


def test_every_boundary_is_a_candidate_in_both_directions():
    names = [each.name for each in make_candidates(lenet5())]
    assert names[0] == "nothing shared"
    assert names[-1] == "all shared"
    assert {f"{end} {count} shared" for end in ("first", "last") for count in range(1, 5)} == {
        *names[1:-1]
    }


def test_of_a_deep_network_only_some_depths_race():
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)])
    made = make_candidates(deep, max_candidates=12)
    assert len(made) == 12
    assert {each.name for each in made} >= {
        "first 1 shared",
        "first 39 shared",
        "last 1 shared",
        "nothing shared",
        "all shared",
    }


def test_tied_weights_are_never_split():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    for each in make_candidates(model):
        assert ("0" in each.shared) == ("2" in each.shared)


def test_variances_are_found_as_they_were_drawn():
    generator = torch.Generator().manual_seed(1)
    own = 3 * torch.randn(400, 50, generator=generator)
    halves = [{"w": own + 2 * torch.randn(400, 50, generator=generator)} for _ in range(2)]
    found = estimate_variances(*halves, {"layer": ["w"]})["layer"]
    assert found.between_client == pytest.approx(50 * 9, rel=0.05)
    assert found.within_client == pytest.approx(50 * 4 / 2, rel=0.05)  # of the mean of both halves
    assert found.alpha == pytest.approx(9 / (9 + 2), abs=0.02)
    assert found.low < 9 / 11 < found.high


def test_devices_without_a_difference_have_no_device_variance():
    generator = torch.Generator().manual_seed(2)
    halves = [{"w": torch.randn(100, 200, generator=generator)} for _ in range(2)]
    found = estimate_variances(*halves, {"layer": ["w"]})["all"]
    assert found.alpha < 0.05
    assert found.low == 0 < found.high < 0.1


@pytest.mark.parametrize(
    "name", ["nothing shared", "first 1 shared", "last 1 shared", "all shared"]
)
def test_a_lane_of_the_race_is_lg_fedavg(name):
    """Side by side with other lanes it takes the steps that the simulator would."""
    model, fed, plan = (
        world.seeded(two_layers),
        federation(own_labels=True),
        Plan(3, DEVICES, batch_size=10),
    )
    objective, participants = cross_entropy(model), np.arange(DEVICES)
    rivals = make_candidates(model)
    executor = Executor(fedavg(objective, SGD).client_update, engine="vmapped")
    candidate_states = start_halving(rivals, params_of(model), DEVICES)
    ledger = Ledger()
    for moved, traffic in run_rounds(
        HalvingSetup(plan, fed.train, participants, executor), candidate_states, range(3)
    ):
        candidate_states, ledger = moved, ledger + traffic
    (candidate_state,) = (
        candidate_state
        for candidate_state in candidate_states
        if candidate_state.candidate.name == name
    )
    algorithm = lg_fedavg(objective, SGD, split=candidate_state.candidate.split)
    alone = Executor(algorithm.client_update, engine="vmapped")
    state = world.last(
        simulate_seeds(
            algorithm, [Seat(plan, fed.train, initial_state(algorithm, params_of(model)))], alone
        )
    )[0][0]
    for device, ours in enumerate(candidate_state.models):
        assert (
            world.distance(ours, algorithm.personal(state.shared, state.private.of(device))) < 1e-5
        )
    sent = sum(trees.nbytes(each.split.take_shared(params_of(model))) for each in rivals)
    assert ledger.total.bytes == 3 * 2 * DEVICES * sent


def test_nothing_but_models_and_accuracies_crosses(monkeypatch):
    """Spied at the three doors: uploads, updates of halves, and what the race is decided by."""
    crossed = []

    def spy(module, name, read):
        real = getattr(module, name)

        def watched(*arguments):
            crossed.append((name, read(arguments)))
            return real(*arguments)

        monkeypatch.setattr(module, name, watched)

    spy(
        halving,
        "admit",
        lambda arguments: {name: tuple(tensor.shape[1:]) for name, tensor in arguments[0].items()},
    )
    spy(
        search,
        "estimate_variances",
        lambda arguments: {name: tuple(tensor.shape[1:]) for name, tensor in arguments[0].items()},
    )
    spy(search, "keep_better_half", lambda arguments: arguments[1])
    asked(federation(own_labels=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in params_of(two_layers()).items()}
    assert {name for name, _ in crossed} == {"admit", "estimate_variances", "keep_better_half"}
    for name, what in crossed:
        if name == "keep_better_half":
            assert what.halves.shape == (2, 4, 8)  # one number per half, split and device
        else:
            assert what.items() <= shapes.items()


def test_what_crosses_is_counted():
    advice = asked(federation(own_labels=True))
    whole = trees.nbytes(params_of(two_layers()))
    warm, halves = 10 * 4 * 2 * whole, 8 * 3 * whole
    shares = {row.candidate.name: row.sent_fraction * whole for row in advice.rows}
    later = [row for row in advice.rows if 3 in row.accuracy]
    racing = sum(3 * 8 * sent for sent in shares.values()) + sum(
        5 * 8 * shares[row.candidate.name] for row in later
    )
    assert advice.cost.ledger.total.bytes == pytest.approx(warm + halves + racing)
    assert advice.cost.updates == 10 * 4 + 8 + 4 * 8 + 2 * 2 * 8


def test_the_devices_that_race_hold_data_back_from_everybody():
    fed = federation(own_labels=True)
    participants = np.array([1, 4])
    train, judges = search._hold_out(fed, participants, 0, 0.5)
    for device in range(DEVICES):
        kept, judged = {*train.rows[device]}, {*judges[0].rows[device], *judges[1].rows[device]}
        assert kept.isdisjoint(judged)
        assert bool(judged) == (device in participants)
        if device in participants:
            assert {*fed.val.rows[device]} <= judged
            assert kept | judged == {*fed.train.rows[device], *fed.val.rows[device]}
        assert judged.isdisjoint({*fed.test.rows[device]})


@pytest.mark.parametrize("limit", [30_000, 60_000, 120_000])
def test_a_budget_of_bytes_is_kept(limit):
    advice = asked(federation(own_labels=True), budget=Budget(bytes=limit))
    assert advice.cost.ledger.total.bytes <= limit


@pytest.mark.parametrize("limit", [6_300, 7_000, 9_000, 9_500])
def test_a_budget_with_room_for_little_more_than_variances_is_kept(limit):
    assert (
        asked(federation(own_labels=True), budget=Budget(bytes=limit)).cost.ledger.total.bytes
        <= limit
    )


def test_a_budget_that_cannot_be_kept_is_refused_before_anything_is_sent():
    with pytest.raises(
        InputError, match="a round of FedAvg and two updates of 3 devices send 6,256 bytes at least"
    ):
        asked(federation(own_labels=True), budget=Budget(bytes=6_000))


def test_without_room_for_a_race_the_variances_decide():
    advice = asked(federation(own_labels=True), budget=Budget(bytes=15_000))
    assert not advice.ran_halving
    assert not advice.finished
    assert advice.choice.name == advice.by_variances


def test_a_budget_of_seconds_ends_it():
    cost = Cost.start()
    assert cost.within(Budget(seconds=100.0))
    assert not replace(cost, started_at=cost.started_at - 200).within(Budget(seconds=100.0))


def stage(ahead, *, names=("all shared", "first 1 shared"), noise=0.0, rows=50):
    """A stage in which the second split is ahead of the first by so much on each device."""
    generator = np.random.default_rng(0)
    base = np.full((2, len(ahead)), 0.5)
    halves = np.stack(
        [base, base + ahead + noise * generator.standard_normal((2, len(ahead)))], axis=1
    )
    return Stage(4, names, halves, np.full((2, len(ahead)), rows))


def test_a_group_that_clearly_prefers_another_split_is_found():
    ahead = np.array([0.1] * 10 + [-0.1] * 20)
    (group,) = find_groups([stage(ahead, noise=0.02)], "all shared", np.arange(30) + 100)
    assert group.candidate == "first 1 shared"
    assert group.clients == tuple(range(100, 110))
    assert group.gain.low < 0.1 < group.gain.high


def test_chance_makes_no_group():
    assert not find_groups([stage(np.zeros(30), noise=0.05)], "all shared", np.arange(30))


def test_a_difference_is_paired_where_both_raced_last():
    first, last = (
        stage(np.full(10, 0.2)),
        stage(np.full(10, 0.1), names=("all shared", "last 1 shared")),
    )
    assert accuracy_difference([first, last], "first 1 shared", "all shared").mean == pytest.approx(
        0.2
    )
    assert accuracy_difference([first, last], "last 1 shared", "all shared").mean == pytest.approx(
        0.1
    )


def test_of_those_that_are_as_good_the_one_that_shares_most_is_chosen_or_one_that_sends_half_as_much():
    sent_fraction = {
        "first 1 shared": 0.1,
        "first 2 shared": 0.3,
        "last 1 shared": 0.9,
        "all shared": 1.0,
    }
    errs = {"first 1 shared": 3.0, "first 2 shared": 2.0, "last 1 shared": 1.0, "all shared": 4.0}
    assert (
        search.choose_candidate(
            ["first 1 shared", "last 1 shared", "first 2 shared"], sent_fraction, errs, "accuracy"
        )
        == "last 1 shared"
    )
    assert (
        search.choose_candidate(["all shared", "first 1 shared"], sent_fraction, errs, "bytes")
        == "first 1 shared"
    )
    assert (
        search.choose_candidate(
            ["all shared", "first 1 shared", "first 2 shared"], sent_fraction, errs, "bytes"
        )
        == "first 2 shared"
    )
    assert (
        search.choose_candidate(["all shared", "last 1 shared"], sent_fraction, errs, "bytes")
        == "all shared"
    )


def test_an_unknown_preference_is_refused():
    with pytest.raises(InputError, match="prefer is 'speed'; it must be accuracy or bytes"):
        search.AdvisorConfig(prefer="speed")


def test_a_tolerance_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="tolerance nan"):
        search.AdvisorConfig(tolerance=float("nan"))


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(-0.02, "nothing shared"), (-0.002, "first 1 shared"), (0.02, "first 1 shared")],
)
def test_to_share_nothing_has_to_be_clearly_ahead(ahead, expected):
    close = stage(np.full(30, ahead), names=("nothing shared", "first 1 shared"), noise=0.02)
    assert search._equally_good([close], 0.01) == [expected]


def test_what_sharing_nothing_is_clearly_ahead_of_is_not_as_good():
    shares = np.random.default_rng(0).normal(0.5, 0.1, 30)
    names, gaps = ("nothing shared", "first 1 shared", "first 2 shared"), np.zeros((3, 30))
    gaps[1], gaps[2] = -0.004 + 0.02 * np.resize([1, -1], 30), -0.005
    close = Stage(4, names, np.stack([shares + gaps] * 2), np.full((2, 30), 50))
    assert accuracy_difference([close], "first 1 shared", "first 2 shared").low < 0
    assert search._equally_good([close], 0.01) == ["first 1 shared"]


def judged(*, ahead):
    """Advice to share all where to share nothing was ahead by so much, give or take two points."""
    advice = asked(federation(own_labels=False), plan=Plan(2, 2), stages=(1,), max_candidates=2)
    gap = ConfidenceInterval(ahead, ahead - 0.02, ahead + 0.02)
    nothing, everything = advice.rows
    rows = (
        nothing._replace(difference=gap, accuracy={1: 0.5 + ahead}),
        everything._replace(accuracy={1: 0.5}),
    )
    return replace(
        advice,
        choice=everything.candidate,
        equally_good=("all shared",),
        rows=rows,
        by_variances="nothing shared",
        rounds=1,
    )


@pytest.mark.parametrize(
    ("ahead", "why", "sure"),
    [
        (
            0.01,
            "was ahead, but not clearly, in the search",
            "low. 'nothing shared' was ahead by 1.0 points (-1.0 to +3.0)",
        ),
        (
            0.0,
            "did about as well in the search",
            "low. 'nothing shared' did as well in 1 round.",
        ),
        (
            -0.01,
            "did worse in the search",
            "not clearly ahead of 'nothing shared', by 1.0 points (-1.0 to +3.0)",
        ),
    ],
)
def test_what_is_said_of_sharing_nothing_is_what_the_race_showed(ahead, why, sure):
    said = recommendation(judged(ahead=ahead))
    assert any(why in line for line in said)
    assert any(line.startswith(f"Certainty: {sure}") for line in said)


def test_a_table_keeps_its_digits_where_lines_are_short(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_advice(judged(ahead=0.01))
    assert "-1.0 to +3.0\n" in capsys.readouterr().out.replace(" \n", "\n")


def test_what_is_clearly_below_is_not_as_good_and_neither_is_what_is_far_below():
    assert search._equally_good([stage(np.full(30, 0.005), noise=0.001)], 0.01) == ["first 1 shared"]
    assert search._equally_good([stage(np.full(30, 0.03), noise=0.3)], 0.01) == ["first 1 shared"]
    assert search._equally_good([stage(np.full(30, 0.005), noise=0.05)], 0.01) == [
        "first 1 shared",
        "all shared",
    ]


@pytest.mark.parametrize(
    "text", ["20", "MB", "-1 MB", "0 s", "2 parsec", "", "9" * 400 + " MB", "9" * 400 + " s"]
)
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="budget"):
        Budget.parse(text)


def test_an_algorithm_with_private_parts_is_refused():
    model = world.seeded(two_layers)
    split = glocal.Split.of(model, local="0")
    with pytest.raises(InputError, match="begin with one that shares all"):
        advise(
            lg_fedavg(cross_entropy(model), SGD, split=split),
            model,
            federation(own_labels=True),
            Plan(2, 2),
        )


def test_no_advice_comes_of_a_training_that_diverged():
    model = world.seeded(two_layers)
    with pytest.raises(InputError, match=r"training diverged; lower optimizer\.lr"):
        advise(
            fedavg(cross_entropy(model), glocal.sgd(1e30)),
            model,
            federation(own_labels=True),
            Plan(3, 4),
            config=QUICK,
        )


def test_too_few_devices_or_examples_are_refused():
    with pytest.raises(InputError, match="at least 3 have to race"):
        asked(world.federation(sizes=(20, 30, 3)), plan=Plan(2, 2))


def command(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


@pytest.mark.parametrize("place", [".", "file/advice.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(place, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert command("advise", "digits", "mlp", "--out", tmp_path / place) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_prints_what_why_how_sure_and_the_cost(capsys, tmp_path):
    out = tmp_path / "advice.json"
    assert command("advise", "digits", "mlp", "--rounds", 3, "--clients", 5, "--out", out) == 0
    printed = capsys.readouterr().out
    for word in ("alpha*", "The search", "split.local = [", "Why:", "Certainty:", "Groups:", "Cost:"):
        assert word in printed
    told = json.loads(out.read_text())
    assert told["command"] == "glocal advise digits mlp --rounds 3 --clients 5 --prefer accuracy"
    assert told["choice"]["name"] in [row["split"] for row in told["candidates"]]
    assert told["cost"]["ledger"]["total"]["bytes"] > 0


def test_two_times_the_same_question_leaves_the_same_bytes(tmp_path, monkeypatch):
    """However long it took: that is printed, and not written down."""
    clock, answers = time.perf_counter, []
    for late in (0, 1000):
        monkeypatch.setattr(time, "perf_counter", lambda late=late: clock() * (1 + late))
        out = tmp_path / f"{late}.json"
        assert command("advise", "digits", "mlp", "--rounds", 3, "--clients", 5, "--out", out) == 0
        answers.append(out.read_bytes())
    assert answers[0] == answers[1]


def test_what_it_says_to_paste_is_a_setting(capsys):
    assert (
        command("advise", "digits", "--rounds", 2, "--clients", 5, "--set", "data.partition=iid")
        == 0
    )
    (line,) = (
        line.strip()
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith("split.local")
    )
    assert with_overrides(STUDIES["digits"], [line.replace(" = ", "=")]).split.local is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "neither a study nor a TOML file"),
        (["digitz", "mlp"], "did you mean 'digits'"),
        (["digits", "mpl"], "did you mean 'mlp'"),
        (["digits", "--budget", "much"], "such as '20 MB' or '60 s'"),
        (["digits", "--rounds", "0"], "rounds is 0"),
        (["digits", "--clients", "1"], "at least 3"),
        (["digits", "--seed", "-3"], "seed is -3"),
        (["digits", "--budget", "9" * 400 + " GB"], "above 0 and below 1e+24"),
        (["digits", "--budget", "1 kB"], "send 520,920 bytes at least"),
        (["digits", "--set", "plan.clients_per_round=99"], "clients_per_round is 99"),
        (["nowhere.toml"], "cannot read nowhere.toml"),
        (["digits", "--budget", ""], "the budget is ''; bytes or seconds were expected"),
        (["digits", "--set", "plan.max_tokens=100"], "max_tokens"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_code_two(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert command("advise", *arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("glocal: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_stop_is_met_politely_and_lets_go_of_the_engine(capsys, monkeypatch):
    closed = []
    monkeypatch.setattr(
        search, "_estimate_variances", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    real = Executor.close
    monkeypatch.setattr(Executor, "close", lambda self: (closed.append(1), real(self))[1])
    assert command("advise", "digits", "--rounds", 2) == 130
    assert "stopped" in capsys.readouterr().err
    assert closed


def test_a_study_of_ones_own_is_advised_on(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[data]\nsource = "digits"\nclients = 6\n[model]\nhidden = [16]\n')
    assert command("advise", "mine.toml", "--rounds", 2) == 0
    assert "6 clients with" in capsys.readouterr().out


def test_the_race_is_judged_by_what_a_guess_is_worth():
    model = world.seeded(two_layers)
    worthless = advise(
        fedavg(cross_entropy(model), SGD),
        model,
        federation(own_labels=True),
        Plan(4, 4, batch_size=10),
        config=QUICK,
        metric=lambda guesses, labels, group: torch.zeros_like(guesses, dtype=torch.float32),
    )
    assert {accuracy for row in worthless.rows for accuracy in row.accuracy.values()} == {0}
