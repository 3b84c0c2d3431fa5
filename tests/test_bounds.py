"""Numbers have bounds: what is outside is refused in one line that names it and what it may be."""

import math

import pytest
from torch import nn

import glocal
import world
from glocal.errors import InputError
from glocal.modules import GaussianNoise
from glocal.studies.models import coded_mlp
from glocal.studies.recurrent import mood_lstm
from glocal.studies.vqa_model import ResNet
from test_cli import complaint, run

NO_SHARES = [3.0, -0.5, 1.0, math.nan, math.inf]
NO_DEVIATIONS = [-0.1, 1e30, math.nan, math.inf]
MODELS = ["mlp", "softmax_mlp", "coded_mlp", "lenet5", "coded_cnn", "mood_lstm", "vqa"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [3.0, -0.5, "nan", 1])
def test_a_share_to_drop_outside_0_to_1_is_refused_for_every_model(share, model, capsys, tmp_path):
    out = tmp_path / "run"
    changes = ("--set", f'model.name="{model}"', "--set", f"model.dropout={share}")
    assert run("run", "digits", *changes, "--out", out) == 2
    assert "model.dropout is " in (told := complaint(capsys))
    assert "from 0 to below 1" in told
    assert not out.exists()


@pytest.mark.parametrize("deviation", [-0.1, "1e30", "inf", "nan"])
def test_noise_outside_its_bounds_is_refused_for_every_model(deviation, capsys, tmp_path):
    for model in MODELS:
        changes = ("--set", f'model.name="{model}"', "--set", f"model.blur={deviation}")
        assert run("run", "digits", *changes, "--out", tmp_path / "run") == 2
        assert "model.blur is " in (told := complaint(capsys))
        assert "from 0 to 1000" in told


def test_a_file_of_settings_is_held_to_the_same(capsys, tmp_path):
    for line in ("dropout = 3.0", "dropout = -0.5", "blur = -1.0"):
        text = f'[model]\nname = "coded_mlp"\n{line}\n[cases.A]\nalgorithm = "fedavg"\n'
        (tmp_path / "study.toml").write_text(text)
        assert run("run", tmp_path / "study.toml", "--out", tmp_path / "run") == 2
        assert f"model.{line.split()[0]} is {line.split()[2]}" in complaint(capsys)


MAKES = {
    "coded_mlp": lambda share: coded_mlp(dropout=share),
    "coded_mlp without hidden layers": lambda share: coded_mlp(hidden=(), dropout=share),
    "mood_lstm": lambda share: mood_lstm(5, dropout=share),
    "resnet": lambda share: ResNet(dropout=share),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("share", NO_SHARES)
def test_every_network_refuses_it_in_python_too(make, share):
    with pytest.raises(InputError, match=r"^model: dropout is .*from 0 to below 1"):
        MAKES[make](share)


@pytest.mark.parametrize("share", [3.0, -0.5, math.nan])
def test_a_layer_of_ones_own_that_was_set_to_such_a_share_is_refused_by_name(share):
    model = world.seeded(world.with_dropout)
    model[2].p = share  # torch's own constructor lets NaN through, and looks at nothing afterwards
    algorithm = glocal.fedavg(glocal.cross_entropy(world.seeded(world.plain)), glocal.sgd(0.1))
    with pytest.raises(InputError, match=r"^model: '2' drops a share of .*give one from 0 to 1"):
        glocal.fit(algorithm, model, world.federation(), glocal.Plan(1, 2))


@pytest.mark.parametrize("deviation", NO_DEVIATIONS)
def test_noise_is_refused_in_python_too(deviation):
    with pytest.raises(InputError, match=r"^model: the noise's deviation is .*from 0 to 1000"):
        GaussianNoise(deviation)
    with pytest.raises(InputError, match=r"^model: the noise's deviation is "):
        coded_mlp(blur=deviation)


def test_what_is_within_bounds_is_taken():
    assert nn.Dropout in {type(layer) for layer in coded_mlp(dropout=0.99).head}
    assert GaussianNoise(0).deviation == 0
    assert GaussianNoise(1000).deviation == 1000
