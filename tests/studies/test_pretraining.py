"""Pre-training: every client trains its private part alone, and nothing is sent."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from glocal import FederatedData, datasets
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import read_tensors
from glocal.datasets.fetch import no_progress
from glocal.federate.run import Run
from glocal.studies import build
from glocal.studies.build import build_components
from glocal.studies.models import bottleneck_cnn, bottleneck_mlp
from glocal.studies.run import StudyRun, initial_experiment, run_study
from glocal.studies.settings import from_dict
from tests.studies.saved import run_until, run_whole, saved_files

STUDY = """
[data]
source = "digits"
clients = 6
validation = 0.1
labeled_fraction = {labeled_fraction}
[model]
name = "bottleneck_mlp"
hidden = [16]
bottleneck = 8
[split]
local = ["encoder"]
[optimizer]
name = "adam"
lr = 0.005
[plan]
rounds = 4
clients_per_round = 3
seeds = 2
batch_size = 40
[run]
engine = "looped"
[experiments.Plain]
algorithm = "lg_fedavg"
[experiments.First]
algorithm = "{algorithm}"
[experiments.First.pretext]
kind = "{kind}"
layer = "encoder"
weight = 0
hidden = [8]
pretrain_epochs = {epochs}
"""


def settings_of(*, kind="decoder", epochs=2, labeled_fraction=0.1, algorithm="lg_fedavg", **plan):
    settings = from_dict(
        tomllib.loads(
            STUDY.format(
                kind=kind, epochs=epochs, labeled_fraction=labeled_fraction, algorithm=algorithm
            )
        )
    )
    return replace(settings, plan=replace(settings.plan, **plan))


def trained_tensors(folder, settings):
    for _ in run_study(settings, folder):
        pass
    saved = folder / "experiments" / "first"
    tensors, _ = read_tensors(saved / "checkpoint.safetensors")
    for path in sorted((saved / "checkpoint").iterdir()):
        tensors |= read_tensors(path)[0]
    return tensors


def initial_state(settings, folder):
    """An experiment before its first round, and its initial progress."""
    study = StudyRun(settings, build_components(settings, no_progress), folder)
    experiment = initial_experiment(study, "First")
    return experiment, Run(experiment, options=settings.run.options()).progress


@pytest.mark.parametrize("kind", ["decoder", "jigsaw", "classifier"])
def test_every_private_part_changes_the_shared_one_does_not_and_nothing_is_sent(kind, tmp_path):
    experiment, progress = initial_state(settings_of(kind=kind), tmp_path)
    _, fresh = initial_state(settings_of(kind=kind, epochs=0), tmp_path)
    for state, start, [ledger] in zip(progress.states, fresh.states, progress.ledgers, strict=True):
        assert trees.same_bits(state.shared, start.shared)
        [private], [untrained] = state.private, start.private
        assert sorted(private.stored) == [*range(6)]
        for number in range(6):
            own = private.of(number)
            assert all(not torch.equal(own[name], untrained.initial[name]) for name in own), (
                "encoder and auxiliary alike"
            )
        assert ledger.total.bytes == 0
    assert experiment.pretraining.labels == (kind == "classifier")


def test_an_adversary_comes_along_from_the_start(tmp_path):
    settings = settings_of(kind="adversary", labeled_fraction=1.0)
    settings = replace(
        settings,
        data=replace(settings.data, source="tests.personalize.test_representations:census"),
    )
    experiment, progress = initial_state(settings, tmp_path)
    assert experiment.pretraining.labels
    names = {*progress.states[0].private[0].of(0)}
    assert {name.partition("/")[0].partition(".")[0] for name in names} == {"encoder", "adversary"}


def test_pretraining_changes_the_run(tmp_path):
    plain, first = (
        trained_tensors(tmp_path / str(epochs), settings_of(epochs=epochs)) for epochs in (0, 3)
    )
    assert plain.keys() <= first.keys()
    assert not trees.same_bits(plain, {name: first[name] for name in plain})


def test_a_stopped_study_resumes_to_the_same_bits(tmp_path):
    settings = settings_of()
    run_whole(settings, tmp_path / "whole")
    run_until(settings, tmp_path / "parts", "First", 2)
    run_whole(settings, tmp_path / "parts")
    assert saved_files(tmp_path / "parts") == saved_files(tmp_path / "whole")


def test_a_fraction_of_the_labels_is_used_and_all_inputs():
    digits = datasets.load_dataset("digits")
    fed = FederatedData.partition(digits, datasets.iid(5), validation=0.1, seed=0)
    some = fed.subsample_labels(0.05, seed=3)
    assert some.train.sizes.tolist() == [round(0.05 * size) for size in fed.train.sizes]
    assert all(
        np.isin(few, own).all() for few, own in zip(some.train.rows, fed.train.rows, strict=True)
    )
    assert some.unlabeled is fed.train
    assert some.val is fed.val
    assert fed.subsample_labels(1e-9, seed=0).train.sizes.tolist() == [1] * 5
    again, other = fed.subsample_labels(0.05, seed=3), fed.subsample_labels(0.05, seed=4)
    assert all(map(np.array_equal, some.train.rows, again.train.rows))
    assert not all(map(np.array_equal, some.train.rows, other.train.rows))


@pytest.mark.parametrize(("kind", "differs"), [("decoder", True), ("classifier", False)])
def test_unlabelled_inputs_are_used_where_no_label_is_needed(kind, differs, tmp_path):
    """Without the unlabelled rows, a decoder is trained differently and a classifier is not."""
    settings = settings_of(kind=kind, seeds=1, rounds=1)
    few = trained_tensors(tmp_path / "few", settings)

    def without_the_rest(loaded, wanted, seed):
        data = saved(loaded, wanted, seed)
        return replace(data, unlabeled=data.train)

    saved = build.partition_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "partition_data", without_the_rest)
        alone = trained_tensors(tmp_path / "alone", settings)
    assert trees.same_bits(few, alone) != differs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": -1}, "pretrain_epochs is -1"),
        ({"algorithm": "fedavg"}, "FedAvg: it has no private part"),
        ({"labeled_fraction": 0.0}, "labelled is 0.0"),
        ({"labeled_fraction": 1.5}, "labelled is 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(
    change, words, tmp_path
):
    with pytest.raises(InputError, match=words):
        list(run_study(settings_of(**change), tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_networks_have_the_widths_of_their_settings():
    images = torch.zeros(2, 3, 32, 32)
    model = bottleneck_cnn((3, 32, 32), 7, bottleneck=5)
    assert (model.encoder(images).shape, model(images).shape) == ((2, 5), (2, 7))
    with pytest.raises(InputError, match="at least 16 x 16"):
        bottleneck_cnn((1, 8, 8))
    make_dropout = bottleneck_mlp(dropout=0.5)
    assert [type(layer).__name__ for layer in make_dropout.head] == [
        "Linear",
        "ReLU",
        "Dropout",
        "Linear",
    ]
    assert sum("Dropout" in type(layer).__name__ for layer in make_dropout.encoder) == 2
    with pytest.raises(InputError, match=r"dropout is 1\.5"):
        bottleneck_mlp(dropout=1.5)
