"""Table 3 of the paper: a new client with rotated digits joins after the last round."""

import json
from dataclasses import replace

import pytest
import torch

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.datasets import load_dataset
from glocal.datasets.rotation import rotate_images
from glocal.personalize.onboarding import JoinPlan
from glocal.studies import new_client_trial
from glocal.studies.new_client_trial import NewClientSettings
from glocal.studies.run import run_study
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    PlanSettings,
    Settings,
    SplitSettings,
    from_dict,
)
from tests.support.command_line import complaint, run

SMALL = Settings(
    name="small",
    data=DataSettings(clients=6, classes_per_client=4),
    model=ModelSettings(hidden=(16, 16)),
    split=SplitSettings(local=("layer1",)),
    plan=PlanSettings(rounds=4, clients_per_round=2, batch_size=8, seeds=2),
    new_client=NewClientSettings(rotate=90, train=60, test=40),
    experiments={
        "FedAvg": ExperimentSettings("fedavg", join_plan=JoinPlan(epochs=0, rounds=2)),
        "LG": ExperimentSettings(
            "lg_fedavg",
            start_from="FedAvg",
            join_plan=JoinPlan(epochs=2, rounds=2, existing_clients=2),
        ),
        "Quiet": ExperimentSettings("lg_fedavg", start_from="FedAvg", join_plan=JoinPlan(epochs=2)),
    },
)


def done(settings, folder):
    for _ in run_study(settings, folder):
        pass
    return {
        name: json.loads((folder / "experiments" / name.lower() / "result.json").read_text())
        for name in settings.experiments
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return done(SMALL, tmp_path_factory.mktemp("new-client"))


def test_every_seed_has_the_metrics_of_its_new_client(results):
    for seeds in results.values():
        assert len(seeds) == 2
        for result in seeds:
            assert {"normal", "normal_local", "rotated", "rotated_before", "ledger"} == {
                *result["new_client"]
            }


def test_a_new_client_that_only_adapts_does_not_change_existing_clients(results):
    for result in results["Quiet"]:
        assert result["new_client"]["normal"] == result["new_test"]["logits"]
        assert result["new_client"]["normal_local"] == result["local_test"]["mean"]
        assert result["new_client"]["ledger"]["upload"]["bytes"] == 0


def test_the_bytes_of_joining_are_those_on_the_wire(results):
    shared, whole = 4 * (17 * 16 + 17 * 10), 4 * (65 * 16 + 17 * 16 + 17 * 10)
    ledgers = {name: seeds[0]["new_client"]["ledger"] for name, seeds in results.items()}
    assert ledgers["FedAvg"]["total"]["bytes"] == whole + 2 * 2 * whole
    assert ledgers["LG"]["total"]["bytes"] == whole + 2 * 3 * 2 * shared


def test_two_runs_with_a_new_client_give_the_same_bits(results, tmp_path):
    assert done(SMALL, tmp_path) == results


def test_several_seeds_at_once_do_not_change_a_new_client(results, tmp_path):
    alone = done(replace(SMALL, plan=replace(SMALL.plan, seeds=1, seed=1)), tmp_path)
    for name, seeds in results.items():
        assert alone[name][0]["new_client"]["rotated"] == pytest.approx(
            seeds[1]["new_client"]["rotated"], abs=1e-6
        )


def test_a_quarter_turn_only_moves_pixels():
    x = load_dataset("digits").train.x[:50]
    turned = rotate_images(x, 90)
    assert torch.equal(rotate_images(turned, 270), x)
    assert torch.equal(turned[:, :, 0, 0], x[:, :, 0, -1])
    assert trees.same_bits({"x": rotate_images(x, 360)}, {"x": x})


WRONG = {
    "no new client": (
        replace(SMALL, new_client=None),
        r"experiments.FedAvg has a join_plan, but there is no \[new_client\]",
    ),
    "too many": (
        replace(SMALL, new_client=NewClientSettings(train=10**6)),
        "new_client.train is 1000000; it must be from 1 to 1347",
    ),
    "no angle": (
        replace(SMALL, new_client=NewClientSettings(float("nan"), 9, 9)),
        "new_client.rotate is nan",
    ),
    "none to test": (
        replace(SMALL, new_client=NewClientSettings(train=9, test=0)),
        "new_client.test is 0; it must be from 1 to 450",
    ),
}


@pytest.mark.parametrize(("settings", "words"), WRONG.values(), ids=WRONG)
def test_a_new_client_that_cannot_join_is_refused_before_anything_is_written(
    settings, words, tmp_path
):
    with pytest.raises(InputError, match=words):
        done(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_with_a_new_client_survive_json():
    assert from_dict(json.loads(json.dumps(SMALL.as_dict()))) == SMALL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("experiments.LG.join_plan.epoch=3", "unknown option 'experiments.LG.join_plan.epoch'"),
        ("new_client.rotate=far", "new_client.rotate is 'far'"),
    ],
)
def test_a_misspelt_join_plan_is_named(change, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(
        '[new_client]\n[experiments.LG]\nalgorithm = "lg_fedavg"\njoin_plan = {rounds = 1}\n'
    )
    assert run("run", "a.toml", "--set", change) == 2
    assert words in complaint(capsys)


def test_a_run_cannot_be_resumed_with_another_join_plan(tmp_path):
    folder = tmp_path / "run"
    done(SMALL, folder)
    experiments = {
        **SMALL.experiments,
        "LG": replace(SMALL.experiments["LG"], join_plan=JoinPlan(epochs=9)),
    }
    with pytest.raises(InputError, match="another join_plan"):
        done(replace(SMALL, experiments=experiments), folder)


def own_source():
    """Images client by client: training and test rows are in one store."""
    x, y, _ = load_dataset("digits").train
    return [(x[start : start + 100], y[start : start + 100]) for start in range(0, 600, 100)]


def pictures(images):
    return {tuple(image.flatten().tolist()) for image in images}


def test_a_new_client_trains_on_no_test_data(monkeypatch, tmp_path):
    images, select_rows = {}, new_client_trial._new_client_rows

    def spy(result, federations, new_client, part):
        rows, store = select_rows(result, federations, new_client, part)
        fed = federations[0]
        images[part] = pictures(rotate_images(store.x[rows[0]], 270))
        images["tests"] = pictures(fed.test.examples.take(fed.test.all_rows()).x)
        return rows, store

    monkeypatch.setattr(new_client_trial, "_new_client_rows", spy)
    data = DataSettings(source="tests.studies.test_new_client_trial:own_source", validation=0.1)
    done(
        replace(
            SMALL,
            data=data,
            plan=replace(SMALL.plan, seeds=1),
            experiments={"FedAvg": SMALL.experiments["FedAvg"]},
        ),
        tmp_path,
    )
    assert not images["train"] & images["tests"]
    assert images["test"] <= images["tests"]


def test_a_stop_while_a_new_client_joins_keeps_the_rounds_before(monkeypatch, tmp_path, results):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    figures = replace(SMALL, run=replace(SMALL.run, save="metrics", checkpoint_every=100))
    with monkeypatch.context() as patch:
        patch.setattr(new_client_trial, "join_many", stopped)
        with pytest.raises(KeyboardInterrupt):
            done(figures, tmp_path)
    assert (tmp_path / "experiments" / "fedavg" / "checkpoint.safetensors").exists()
    assert done(figures, tmp_path) == results
