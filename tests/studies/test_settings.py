"""Settings from TOML: every error names its setting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glocal.core.errors import InputError
from glocal.core.sampling import Plan
from glocal.datasets import load_dataset
from glocal.datasets.fetch import no_progress
from glocal.studies import STUDIES, Settings, from_toml, mlp, with_overrides
from glocal.studies.build import (
    build_algorithm,
    build_components,
    build_split,
    named_split,
    partition_data,
)
from glocal.studies.run import plans_of, run_study
from glocal.studies.settings import DataSettings, from_dict
from tests.support import world

EXPERIMENT = {"experiments": {"a": {"algorithm": "fedavg"}}}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_study_survives_being_written_and_read(study):
    assert from_dict(study.as_dict()) == study


def test_toml_and_changes_are_read(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[data]\nclients = 4\n[split]\nlocal = "layer1"\n'
        '[experiments.one]\nalgorithm = "fedprox"\nmu = 1\nrounds = 3\n'
    )
    settings = from_toml(
        file,
        [
            "plan.rounds=9",
            "optimizer.lr=1",
            "experiments.one.mu=0.5",
            "data.source=digits",
            "model.hidden=[3, 4]",
        ],
    )
    assert settings.name == "mine"
    assert settings.data.clients == 4
    assert settings.split.local == ("layer1",)
    assert settings.plan.rounds == 9
    assert settings.optimizer.lr == 1.0
    assert settings.model.hidden == (3, 4)
    assert settings.experiments["one"].hyperparameters == {"mu": 0.5}
    assert settings.experiments["one"].rounds == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("plan.roundz=3", "unknown option 'plan.roundz'; did you mean 'rounds'"),
        ("plam.rounds=3", "unknown option 'plam'; did you mean 'plan'"),
        ("plan.rounds=many", "plan.rounds is 'many'; a whole number was expected"),
        ("plan.rounds=2.5", "plan.rounds is 2.5; a whole number was expected"),
        ("plan.rounds=true", "plan.rounds is True; a whole number was expected"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; a number was expected"),
        ("data.source=3", "data.source is 3; a string was expected"),
        ("model.hidden=[1, 'x']", "model.hidden is 'x'; a whole number was expected"),
        ("model.hidden=7", "model.hidden is 7; a list, each item a whole number, was expected"),
        ("plan=3", "plan is 3; a table was expected"),
        ("run.chunk_size=x", "run.chunk_size is 'x'; a whole number was expected"),
        ("experiments=3", "experiments is 3; tables"),
        ("experiments.a=3", "experiments.a is 3; a table was expected"),
        ("experiments.a.algorithm=3", "experiments.a.algorithm is 3; a string was expected"),
        ("experiments.b.rounds=3", "experiments.b has no algorithm"),
        ("experiments.a.mu=[1]", r"experiments.a.mu is \[1\]; a number or a string was expected"),
        ("plan.rounds", "is not a change; write it as section.option=value"),
        ("name.x=3", "goes through a value that is not a table"),
    ],
)
def test_a_mistake_in_a_setting_is_named(change, message):
    with pytest.raises(InputError, match=message):
        from_dict({"name": "x", **EXPERIMENT}, [change])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["experiments.a.algorithm=fedavgg"], "algorithm is 'fedavgg'; did you mean 'fedavg'"),
        (["experiments.a.mu=1"], "fedavg has no hyper-parameter 'mu'"),
        (
            ["experiments.a.local_lr=0.1"],
            "fedavg has no split, so its experiments take no 'local_lr'",
        ),
        (
            ["experiments.a.algorithm=lg_fedavg", "split.local=layer1", "experiments.a.local_lr=0"],
            "lr is 0.0; a number above 0 was expected",
        ),
        (
            ["experiments.a.algorithm=fedprox", "experiments.a.nu=1"],
            "fedprox has no hyper-parameter 'nu'; did you mean 'mu'",
        ),
        (
            ["experiments.a.algorithm=fedprox", "experiments.a.mu=big"],
            "fedprox.mu is 'big'; a number was expected",
        ),
        (["experiments.a.algorithm=lg_fedavg"], "neither side given"),
        (
            ["experiments.a.algorithm=lg_fedavg", "split.local=encoder"],
            "'encoder' matches no parameter",
        ),
        (["data.source=minst"], "did you mean 'mnist'"),
        (["data.partition=shard"], "did you mean 'shards'"),
        (["data.partition=natural"], "one \\(x, y\\) pair per client"),
        (["data.augment=flip"], "data.augment is 'flip'"),
        (
            ["data.augment=crop_and_flip", "data.source=settings_data:vectors"],
            "crop_and_flip needs images",
        ),
        (["model.name=mpl"], "did you mean 'mlp'"),
        (["model.name=nowhere:build"], "cannot be found"),
        (["model.name=math:pi"], "is not a function"),
        (["model.name=os:getcwd"], "returned str; an nn.Module was expected"),
        (["data.source=os:getcwd"], "returned str; a Dataset"),
        (["optimizer.name=sdg"], "did you mean 'sgd'"),
        (["optimizer.lr=-1"], "lr is -1.0; a number above 0 was expected"),
        (["optimizer.momentum=1"], "momentum is 1.0"),
        (["plan.clients_per_round=0"], "clients_per_round is 0; a whole number from 1 to"),
        (["plan.clients_per_round=99"], "clients_per_round is 99, but there are 20"),
        (["plan.seeds=0"], "plan.seeds is 0"),
        (["plan.seed=-1"], "seed is -1"),
        (["run.select=test"], "select is 'test'; 'last', 'best' or a metric with its direction"),
        (["run.engine=warp"], "engine: name is 'warp'; known: auto"),
        (["run.device=abacus"], "device 'abacus' cannot be used here"),
        (["data.clients=5000"], "client"),
        (["data.validation=1"], "below 1"),
        (["data.validation=0", "run.select=best"], "needs validation data"),
        (["model.hidden=[-3]"], "model.hidden is -3; a whole number from 1 to"),
        (["model.hidden=[0]"], "model.hidden is 0; a whole number from 1 to"),
        (["run.device=meta"], "device 'meta' cannot be used here"),
        (["experiments.a.algorithm=math:sqrt"], "math:sqrt"),
        (["experiments.!!.algorithm=fedavg"], "is not a name"),
        (["model.name=settings_data:fails"], "the function failed .ZeroDivisionError"),
        (["data.source=settings_data:fails"], "the function failed .ZeroDivisionError"),
        (["experiments.a.start_from=b"], "is not an earlier experiment"),
        (
            [
                "experiments.b.algorithm=fedavg",
                "experiments.b.start_from=a",
                "experiments.b.start_round=99",
            ],
            "start_round is 99, but an experiment can start from a after 1 to 2 rounds",
        ),
        (
            [
                "experiments.b.algorithm=fedavg",
                "experiments.b.start_from=a",
                "experiments.b.start_model=newest",
            ],
            "'newest'; it must be 'best' .* or 'last'",
        ),
        (
            ["experiments.a.start_model=last"],
            "'last', but it starts from no other experiment; name one with `start_from`",
        ),
        (
            [
                "experiments.b.algorithm=fedavg",
                "experiments.b.start_from=a",
                "experiments.b.start_model=best",
            ],
            "run.select is 'last', so no round",
        ),
        (["experiments.A.algorithm=fedavg"], "would share a folder"),
    ],
)
def test_a_study_that_cannot_run_is_refused_before_it_starts(
    changes, message, tmp_path, monkeypatch
):
    (tmp_path / "settings_data.py").write_text(
        "import torch\ndef vectors():\n    return [(torch.zeros(9, 4), torch.arange(9) % 2)] * 6\n"
        "def fails():\n    return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=message):
        list(
            run_study(
                from_dict({"name": "x", "plan": {"rounds": 2}, **EXPERIMENT}, changes),
                tmp_path / "run",
            )
        )
    assert not (tmp_path / "run").exists()


def test_the_local_part_may_have_a_learning_rate_of_its_own():
    def after_a_round(*changes):
        settings = from_dict(
            {"split": {"local": ["layer1"]}, **EXPERIMENT},
            ["experiments.a.algorithm=lg_fedavg", *changes],
        )
        parts = build_components(settings, no_progress)
        algorithm = build_algorithm(settings, settings.experiments["a"], parts)
        params, train = parts.params[0], parts.federations[0].train
        rounds = world.simulate(algorithm, train, Plan(1, 20, batch_size=10), params=params)
        state, _ = world.last(rounds)
        assert world.distance(state.shared, algorithm.init(params).shared) > 1e-3
        return state.group()

    plain, same, slow = (
        after_a_round(),
        after_a_round("experiments.a.local_lr=0.05"),
        after_a_round("experiments.a.local_lr=1e-9"),
    )
    assert world.gap(plain.alone(), same.alone(), num_clients=20) < 1e-6
    assert (
        max(world.distance(slow.private.of(0), slow.private.of(client)) for client in range(20))
        < 1e-6
    )
    assert world.distance(plain.private.of(0), slow.private.of(0)) > 1e-3
    assert world.distance(plain.shared, slow.shared) < 1e-3  # the shared part is trained as before


def test_a_study_without_experiments_is_refused(tmp_path):
    with pytest.raises(InputError, match="there are no experiments"):
        list(run_study(Settings(), tmp_path))


@pytest.mark.parametrize("content", [b"[plan", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_refused(content, tmp_path):
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(InputError, match="is not TOML"):
        from_toml(tmp_path / "bad.toml")


@given(
    st.integers(1, 10**6),
    st.floats(1e-6, 10),
    st.lists(st.integers(1, 999), min_size=1, max_size=4),
)
def test_changes_go_in_as_they_are(rounds, lr, hidden):
    settings = with_overrides(
        STUDIES["digits"],
        [f"plan.rounds={rounds}", f"optimizer.lr={lr!r}", f"model.hidden={hidden}"],
    )
    assert (settings.plan.rounds, settings.optimizer.lr, settings.model.hidden) == (
        rounds,
        lr,
        tuple(hidden),
    )


def test_an_experiment_may_have_clients_per_round_and_a_split_of_its_own():
    settings = from_dict(
        {
            "split": {"local": ["layer1"]},
            "experiments": {
                "all": {"algorithm": "local_only", "clients_per_round": 20},
                "mine": {"algorithm": "lg_fedavg", "shared": "layer1"},
            },
        }
    )
    assert [plan.clients_per_round for plan in plans_of(settings).values()] == [20, 5]
    model = mlp(64, (8,), 10)
    splits = {
        name: build_split(named_split(settings, experiment), model)
        for name, experiment in settings.experiments.items()
    }
    assert splits["all"].local == {"layer1.weight", "layer1.bias"}
    assert splits["mine"].shared == {"layer1.weight", "layer1.bias"}


def test_only_the_first_clients_take_part_with_keep_clients():
    dataset = load_dataset("digits")
    everyone, few = (
        partition_data(dataset, DataSettings(clients=10, keep_clients=keep), 0)
        for keep in (None, 3)
    )
    assert few.num_clients == 3
    for part in ("train", "val", "test"):
        for mine, theirs in zip(
            getattr(few, part).rows, getattr(everyone, part).rows[:3], strict=True
        ):
            assert mine.tolist() == theirs.tolist()
