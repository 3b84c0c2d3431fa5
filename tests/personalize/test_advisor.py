"""The advisor: its measurements, its traffic, its recommendation, and the text of it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms import FedAvg, LGFedAvg
from glocal.cli import main
from glocal.cli.advise import print_advice, recommendation
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.sampling import Plan
from glocal.core.task import classification, regression
from glocal.engines import Executor
from glocal.evaluate.intervals import ConfidenceInterval
from glocal.personalize.advisor import AdvisorConfig, Budget, advise, halving, search
from glocal.personalize.advisor.budget import Cost
from glocal.personalize.advisor.candidates import make_candidates
from glocal.personalize.advisor.groups import find_groups, find_lead
from glocal.personalize.advisor.halving import (
    HalvingSetup,
    Stage,
    build_whole_executor,
    run_rounds,
    start_halving,
)
from glocal.personalize.advisor.variances import estimate_variances
from glocal.studies import STUDIES, with_overrides
from glocal.studies.models import lenet5
from glocal.wire import Ledger
from tests.support import world

NUM_CLIENTS, FEATURES, CLASSES = 8, 6, 4
QUICK = AdvisorConfig(num_clients=8, stages=(1, 2))
SGD = glocal.SGD(0.1, momentum=0.5)


def two_layers():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def federation(*, own_labels, examples=60):
    """Clients that label by one rule, or by rules with the classes permuted per client.

    With permuted classes a shared last layer can only guess.
    """
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    clients = []
    for _ in range(NUM_CLIENTS):
        x = torch.randn(examples, FEATURES, generator=generator)
        classes = torch.arange(CLASSES)
        if own_labels:
            classes = torch.randperm(CLASSES, generator=generator)
        clients.append((x, classes[(x @ teacher).argmax(1)]))
    return glocal.FederatedData.from_tensors(clients)


def fedavg(optimizer=SGD, **task):
    return FedAvg(classification(world.seeded(two_layers), **task), optimizer=optimizer)


def advice_for(fed, *, plan=None, algorithm=None, **config):
    plan = plan or Plan(10, 4, batch_size=10)
    return advise(algorithm or fedavg(), fed, plan, config=replace(QUICK, **config))


def test_clients_that_label_differently_keep_the_last_layer_local():
    advice = advice_for(federation(own_labels=True, examples=200))
    assert "2" in advice.choice.local
    assert advice.variances["all"].low > 0.5
    worst = min(advice.rows, key=lambda row: row.figures[1])
    assert "2" in worst.candidate.shared


def test_clients_with_the_same_distribution_share():
    advice = advice_for(federation(own_labels=False, examples=200))
    assert advice.choice.shared
    assert advice.variances["all"].high < 0.5


def test_the_same_seed_gives_the_same_advice():
    first, second = (advice_for(federation(own_labels=True)) for _ in range(2))
    assert [row.figures for row in first.rows] == [row.figures for row in second.rows]
    assert first.variances == second.variances


def test_every_boundary_is_a_candidate_in_both_directions():
    names = [each.name for each in make_candidates(lenet5())]
    assert names[0] == "nothing shared"
    assert names[-1] == "all shared"
    assert {f"{end} {count} shared" for end in ("first", "last") for count in range(1, 5)} == {
        *names[1:-1]
    }


def test_of_a_deep_network_only_some_depths_are_candidates():
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)])
    candidates = make_candidates(deep, max_candidates=12)
    assert len(candidates) == 12
    assert {each.name for each in candidates} >= {
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


def test_variances_are_estimated_as_they_were_drawn():
    generator = torch.Generator().manual_seed(1)
    own = 3 * torch.randn(400, 50, generator=generator)
    halves = [{"w": own + 2 * torch.randn(400, 50, generator=generator)} for _ in range(2)]
    variances = estimate_variances(*halves, {"layer": ["w"]})["layer"]
    assert variances.between_client == pytest.approx(50 * 9, rel=0.05)
    assert variances.within_client == pytest.approx(
        50 * 4 / 2, rel=0.05
    )  # of the mean of both halves
    assert variances.alpha == pytest.approx(9 / (9 + 2), abs=0.02)
    assert variances.low < 9 / 11 < variances.high


def test_clients_without_a_difference_have_no_between_client_variance():
    generator = torch.Generator().manual_seed(2)
    halves = [{"w": torch.randn(100, 200, generator=generator)} for _ in range(2)]
    variances = estimate_variances(*halves, {"layer": ["w"]})["all"]
    assert variances.alpha < 0.05
    assert variances.low == 0 < variances.high < 0.1


@pytest.mark.parametrize(
    "name", ["nothing shared", "first 1 shared", "last 1 shared", "all shared"]
)
def test_a_candidate_trains_as_lg_fedavg_does(name):
    """Side by side with other candidates it takes the steps that the simulator would."""
    algorithm, fed = fedavg(), federation(own_labels=True)
    plan, task = Plan(3, NUM_CLIENTS, batch_size=10), algorithm.task
    candidates, start = make_candidates(task.model), params_of(task.model)
    setup = HalvingSetup(algorithm, plan, fed.train, np.arange(NUM_CLIENTS))
    executor = build_whole_executor(setup, engine="vmapped")
    candidate_states, ledger = start_halving(setup, candidates, start), Ledger()
    for trained, traffic in run_rounds(executor, candidate_states, range(3)):
        candidate_states, ledger = trained, ledger + traffic
    (candidate_state,) = (each for each in candidate_states if each.candidate.name == name)
    split = candidate_state.candidate.split
    lg = LGFedAvg(task, optimizer=SGD, local=sorted(split.local), shared=sorted(split.shared))
    state, _ = world.last(world.simulate(lg, fed.train, plan, engine="vmapped"))
    for client, ours in candidate_state.models.items():
        expected = lg.personal(state.shared, state.private[0].of(client))
        assert world.distance(ours, expected) < 1e-5
    sent = sum(trees.nbytes(each.split.take_shared(start)) for each in candidates)
    assert ledger.total.bytes == 3 * 2 * NUM_CLIENTS * sent


def test_nothing_but_models_and_scores_crosses(monkeypatch):
    """Spied on are uploads, updates of halves, and the scores that decide a stage."""
    crossed = []

    def spy(module, name, read):
        real = getattr(module, name)

        def watched(*arguments):
            crossed.append((name, read(arguments)))
            return real(*arguments)

        monkeypatch.setattr(module, name, watched)

    def shapes_of(stacked):
        return {name: tuple(tensor.shape[1:]) for name, tensor in stacked.items()}

    spy(halving, "collect", lambda arguments: shapes_of(arguments[2][0].payloads))
    spy(search, "estimate_variances", lambda arguments: shapes_of(arguments[0]))
    spy(search, "keep_better_half", lambda arguments: arguments[1])
    advice_for(federation(own_labels=True))
    shapes = {name: tuple(tensor.shape) for name, tensor in params_of(two_layers()).items()}
    assert {name for name, _ in crossed} == {"collect", "estimate_variances", "keep_better_half"}
    for name, content in crossed:
        if name == "keep_better_half":
            assert content.halves.shape == (2, 4, 8)  # one number per half, candidate and client
        else:
            assert content.items() <= shapes.items()


def test_what_crosses_is_counted():
    advice = advice_for(federation(own_labels=True))
    whole = trees.nbytes(params_of(two_layers()))
    warm_up, halves = 10 * 4 * 2 * whole, 8 * 3 * whole
    sent = {row.candidate.name: row.sent_fraction * whole for row in advice.rows}
    second_stage = [sent[row.candidate.name] for row in advice.rows if 3 in row.figures]
    stages = 3 * 8 * sum(sent.values()) + 5 * 8 * sum(second_stage)
    assert advice.cost.ledger.total.bytes == pytest.approx(warm_up + halves + stages)
    assert advice.cost.updates == 10 * 4 + 8 + 4 * 8 + 2 * 2 * 8


def test_participants_hold_out_data_that_nobody_trains_on():
    fed = federation(own_labels=True)
    participants = np.array([1, 4])
    train, halves = search._hold_out(fed, participants, 0, 0.5)
    for client in range(NUM_CLIENTS):
        trained_on = {*train.rows[client]}
        held_out = {*halves[0].rows[client], *halves[1].rows[client]}
        assert trained_on.isdisjoint(held_out)
        assert bool(held_out) == (client in participants)
        if client in participants:
            assert {*fed.val.rows[client]} <= held_out
            assert trained_on | held_out == {*fed.train.rows[client], *fed.val.rows[client]}
        assert held_out.isdisjoint({*fed.test.rows[client]})


@pytest.mark.parametrize("limit", [30_000, 60_000, 120_000])
def test_a_budget_of_bytes_is_kept(limit):
    advice = advice_for(federation(own_labels=True), budget=Budget(bytes=limit))
    assert advice.cost.ledger.total.bytes <= limit


@pytest.mark.parametrize("limit", [6_300, 7_000, 9_000, 9_500])
def test_a_budget_with_room_for_little_more_than_variances_is_kept(limit):
    advice = advice_for(federation(own_labels=True), budget=Budget(bytes=limit))
    assert advice.cost.ledger.total.bytes <= limit


def test_a_budget_that_cannot_be_kept_is_refused_before_anything_is_sent():
    with pytest.raises(
        InputError, match="a round of FedAvg and two updates of 3 clients send 6,256 bytes at least"
    ):
        advice_for(federation(own_labels=True), budget=Budget(bytes=6_000))


def test_without_room_for_a_stage_the_variances_decide():
    advice = advice_for(federation(own_labels=True), budget=Budget(bytes=15_000))
    assert not advice.ran_halving
    assert not advice.finished
    assert advice.choice.name == advice.by_variances


def test_a_budget_of_seconds_ends_it():
    cost = Cost.start()
    assert cost.within(Budget(seconds=100.0))
    assert not replace(cost, started_at=cost.started_at - 200).within(Budget(seconds=100.0))


def stage(ahead, *, names=("all shared", "first 1 shared"), noise=0.0, rows=50):
    """A stage in which the second candidate is ahead of the first by `ahead` on each client."""
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


def test_a_difference_is_taken_at_the_last_stage_with_both_candidates():
    first = stage(np.full(10, 0.2))
    last = stage(np.full(10, 0.1), names=("all shared", "last 1 shared"))
    early = find_lead([first, last], "first 1 shared", "all shared")
    late = find_lead([first, last], "last 1 shared", "all shared")
    assert early.mean == pytest.approx(0.2)
    assert late.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("equally_good", "prefer", "expected"),
    [
        (["first 1 shared", "last 1 shared", "first 2 shared"], "accuracy", "last 1 shared"),
        (["all shared", "first 1 shared"], "bytes", "first 1 shared"),
        (["all shared", "first 1 shared", "first 2 shared"], "bytes", "first 2 shared"),
        (["all shared", "last 1 shared"], "bytes", "all shared"),
    ],
)
def test_of_equally_good_candidates_one_is_chosen_by_preference(equally_good, prefer, expected):
    """For accuracy the one that shares most; for bytes the best, or one that sends half as much."""
    names = ("first 1 shared", "first 2 shared", "last 1 shared", "all shared")
    sent_fraction = dict(zip(names, (0.1, 0.3, 0.9, 1.0), strict=True))
    predicted_error = dict(zip(names, (3.0, 2.0, 1.0, 4.0), strict=True))
    choice = search.choose_candidate(equally_good, sent_fraction, predicted_error, prefer)
    assert choice == expected


def test_an_unknown_preference_is_refused():
    with pytest.raises(InputError, match="prefer is 'speed'; known: accuracy, bytes"):
        search.AdvisorConfig(prefer="speed")


def test_a_tolerance_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="tolerance is nan"):
        search.AdvisorConfig(tolerance=float("nan"))


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(-0.02, "nothing shared"), (-0.002, "first 1 shared"), (0.02, "first 1 shared")],
)
def test_sharing_nothing_has_to_be_clearly_ahead(ahead, expected):
    close = stage(np.full(30, ahead), names=("nothing shared", "first 1 shared"), noise=0.02)
    assert search._equally_good([close], 0.01) == [expected]


def test_what_sharing_nothing_is_clearly_ahead_of_is_not_equally_good():
    shares = np.random.default_rng(0).normal(0.5, 0.1, 30)
    names, gaps = ("nothing shared", "first 1 shared", "first 2 shared"), np.zeros((3, 30))
    gaps[1], gaps[2] = -0.004 + 0.02 * np.resize([1, -1], 30), -0.005
    close = Stage(4, names, np.stack([shares + gaps] * 2), np.full((2, 30), 50))
    assert find_lead([close], "first 1 shared", "first 2 shared").low < 0
    assert search._equally_good([close], 0.01) == ["first 1 shared"]


def advice_to_share_all(*, ahead):
    """Advice to share all, where sharing nothing was ahead by `ahead`, give or take two points."""
    advice = advice_for(
        federation(own_labels=False), plan=Plan(2, 2), stages=(1,), max_candidates=2
    )
    gap = ConfidenceInterval(ahead, ahead - 0.02, ahead + 0.02)
    nothing, everything = advice.rows
    rows = (
        nothing._replace(lead=gap, figures={1: 0.5 + ahead}),
        everything._replace(figures={1: 0.5}),
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
    ("ahead", "why", "certainty"),
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
def test_the_text_about_sharing_nothing_agrees_with_its_accuracy(ahead, why, certainty):
    lines = recommendation(advice_to_share_all(ahead=ahead))
    assert any(why in line for line in lines)
    assert any(line.startswith(f"Certainty: {certainty}") for line in lines)


def test_a_table_keeps_its_digits_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_advice(advice_to_share_all(ahead=0.01))
    assert "-1.0 to +3.0\n" in capsys.readouterr().out.replace(" \n", "\n")


def test_what_is_clearly_below_or_far_below_is_not_equally_good():
    assert search._equally_good([stage(np.full(30, 0.005), noise=0.001)], 0.01) == [
        "first 1 shared"
    ]
    assert search._equally_good([stage(np.full(30, 0.03), noise=0.3)], 0.01) == ["first 1 shared"]
    assert search._equally_good([stage(np.full(30, 0.005), noise=0.05)], 0.01) == [
        "first 1 shared",
        "all shared",
    ]


@pytest.mark.parametrize(
    "text", ["20", "MB", "-1 MB", "0 s", "2 parsec", "", "9" * 400 + " MB", "9" * 400 + " s"]
)
def test_an_invalid_budget_is_refused(text):
    with pytest.raises(InputError, match="budget"):
        Budget.parse(text)


def test_an_algorithm_with_private_parts_is_refused():
    task = classification(world.seeded(two_layers))
    for kind in (LGFedAvg, FedAvg):
        algorithm = kind(task, optimizer=SGD, local="0")
        with pytest.raises(InputError, match="begin with FedAvg, which shares everything"):
            advise(algorithm, federation(own_labels=True), Plan(2, 2))


def test_training_that_diverged_gives_no_advice():
    data, plan = federation(own_labels=True), Plan(3, 4)
    with pytest.raises(InputError, match=r"training diverged in round .*; lower the learning rate"):
        advise(fedavg(glocal.SGD(1e30)), data, plan, config=QUICK)


def test_updates_that_are_not_finite_give_no_advice(monkeypatch):
    spread = search.estimate_variances

    def infinite(*arguments):
        whole = spread(*arguments)["all"]
        return {"all": whole._replace(within_client=float("inf"))}

    monkeypatch.setattr(search, "estimate_variances", infinite)
    with pytest.raises(InputError, match=r"training diverged; lower optimizer\.lr"):
        advice_for(federation(own_labels=True), plan=Plan(2, 2))


def test_too_few_clients_or_examples_are_refused():
    with pytest.raises(InputError, match="at least 3 clients have to participate"):
        advice_for(world.federation(sizes=(20, 30, 3)), plan=Plan(2, 2))


def command(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


@pytest.mark.parametrize("place", [".", "file/advice.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(place, capsys, tmp_path):
    (tmp_path / "file").touch()
    assert command("advise", "digits", "mlp", "--out", tmp_path / place) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_prints_the_choice_its_reason_certainty_and_cost(capsys, tmp_path):
    out = tmp_path / "advice.json"
    assert command("advise", "digits", "mlp", "--rounds", 3, "--clients", 5, "--out", out) == 0
    printed = capsys.readouterr().out
    for word in (
        "alpha*",
        "The search",
        "split.local = [",
        "Why:",
        "Certainty:",
        "Groups:",
        "Cost:",
    ):
        assert word in printed
    written = json.loads(out.read_text())
    assert written["command"] == "glocal advise digits mlp --rounds 3 --clients 5 --prefer accuracy"
    assert written["choice"]["name"] in [row["split"] for row in written["halving"]]
    assert written["cost"]["ledger"]["total"]["bytes"] > 0


def test_the_same_question_writes_the_same_bytes(tmp_path, monkeypatch):
    """The seconds are printed, but not written to the file."""
    clock, files = time.perf_counter, []
    for late in (0, 1000):
        monkeypatch.setattr(time, "perf_counter", lambda late=late: clock() * (1 + late))
        out = tmp_path / f"{late}.json"
        assert command("advise", "digits", "mlp", "--rounds", 3, "--clients", 5, "--out", out) == 0
        files.append(out.read_bytes())
    assert files[0] == files[1]


def test_the_line_to_paste_is_a_setting(capsys):
    options = ["--rounds", 2, "--clients", 5, "--set", "data.partition=iid"]
    assert command("advise", "digits", *options) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (line,) = (line for line in lines if line.startswith("split.local"))
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
def test_a_mistake_of_the_user_is_one_line_and_exit_code_two(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert command("advise", *arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("glocal: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_ctrl_c_prints_one_word_and_closes_the_engine(capsys, monkeypatch):
    closed, close = [], Executor.close

    def interrupt(*_):
        raise KeyboardInterrupt

    def spied_close(executor):
        closed.append(executor)
        close(executor)

    monkeypatch.setattr(search, "_estimate_variances", interrupt)
    monkeypatch.setattr(Executor, "close", spied_close)
    assert command("advise", "digits", "--rounds", 2) == 130
    assert "stopped" in capsys.readouterr().err
    assert closed


def test_a_study_of_the_users_own_gets_advice(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[data]\nsource = "digits"\nclients = 6\n[model]\nhidden = [16]\n')
    assert command("advise", "mine.toml", "--rounds", 2) == 0
    assert "6 clients with" in capsys.readouterr().out


def worthless(outputs, targets):
    return torch.zeros(len(targets))


def test_candidates_are_compared_by_the_tasks_metric():
    advice = advice_for(
        federation(own_labels=True), plan=Plan(4, 4), algorithm=fedavg(metrics=worthless)
    )
    assert advice.metric.name == "worthless"
    assert all({*row.figures.values()} == {0} for row in advice.rows)


def test_of_a_metric_that_is_an_error_less_is_better():
    """Clients whose numbers are all shifted do better with a last layer of their own."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for shift in range(NUM_CLIENTS):
        x = torch.randn(100, FEATURES, generator=generator)
        clients.append((x, x.sum(1) + 10 * shift))
    model = world.seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, 1)))
    algorithm = FedAvg(regression(model, metrics="rmse"), optimizer=glocal.SGD(0.001))
    advice = advice_for(glocal.FederatedData.from_tensors(clients), algorithm=algorithm)
    figures = {row.candidate.name: row.figures[1] for row in advice.rows}
    leads = {row.candidate.name: row.lead.mean for row in advice.rows}
    assert "1" in advice.choice.local
    assert figures["all shared"] > figures[advice.choice.name] > 0
    assert leads["all shared"] < 0
    assert advice.as_dict()["metric"]["name"] == "rmse"
    lines = recommendation(advice)
    assert not any("points" in line for line in lines)


def test_a_table_of_errors_has_no_per_cent(capsys):
    rmse = glocal.Metric("rmse", per_example=worthless, higher_is_better=False)
    print_advice(replace(advice_to_share_all(ahead=0.01), metric=rmse))
    printed = capsys.readouterr().out
    assert "The search: rmse on held-out data" in printed
    assert "was ahead by 0.01 (-0.01 to +0.03)" in printed


def test_clients_for_which_the_metric_is_undefined_do_not_count():
    halves = np.full((2, 2, 5), 0.5)
    halves[:, 1] += 0.2
    halves[0, :, 3] = halves[:, :, 4] = np.nan
    half_known = Stage(1, ("all shared", "first 1 shared"), halves, np.full((2, 5), 9))
    assert half_known.ranking() == ["first 1 shared", "all shared"]
    assert half_known.scores_of("first 1 shared")[:4].tolist() == pytest.approx([0.7] * 4)
    assert find_lead([half_known], "first 1 shared", "all shared").mean == pytest.approx(0.2)


def test_a_metric_that_is_undefined_for_everybody_gives_no_advice():
    nobody = glocal.Metric("nobody", of_client=lambda outputs, targets: None)
    with pytest.raises(InputError, match="nobody is undefined for the examples that every"):
        advice_for(federation(own_labels=True), plan=Plan(2, 2), algorithm=fedavg(metrics=nobody))


@pytest.mark.parametrize(("unit", "expected"), [(1.0, True), (20.0, False)])
def test_tolerances_of_a_metric_that_is_no_fraction_are_shares_of_it(unit, expected):
    ahead = np.array([0.1] * 10 + [-0.1] * 20)
    scaled = stage(ahead, noise=0.02)._replace(unit=unit)
    assert bool(find_groups([scaled], "all shared", np.arange(30))) == expected
    behind = stage(np.full(30, -0.15), noise=0.6)._replace(unit=unit)
    assert (len(search._equally_good([behind], 0.01)) == 2) == (not expected)
