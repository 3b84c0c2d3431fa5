"""Which tensors stay on the client and which are sent."""

import pytest
import torch
from torch import nn

from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.split import Split, first_layers, last_layers
from glocal.studies import lenet5, mlp

pytestmark = pytest.mark.quick


def net():
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)),
            "blocks": nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]),
            "head": nn.Linear(8, 2),
        }
    )


def test_the_papers_mnist_network_shares_its_last_three_layers():
    """Liang et al. 2020, appendix C.2: 99,978 / 633,226 = 15.79 %."""
    model = mlp()
    split = Split.of(model, shared=last_layers(model, 3))
    table = split.describe(model)
    assert table.splitlines()[-1].startswith(
        "15.79 % of the model is sent each round: 99,978 of 633,226 parameters, 399,912 bytes"
    )


def test_the_papers_cifar_network_shares_its_convolutions():
    """Liang et al. 2020, appendix C.2: 2,872 / 64,102 = 4.48 %."""
    model = lenet5()
    table = Split.of(model, local="fc*").describe(model)
    assert "4.48 % of the model is sent each round: 2,872 of 64,102 parameters" in table


def starts_with_encoder(name, tensor):
    return name.startswith("encoder")


@pytest.mark.parametrize(
    "selector",
    [
        "encoder",
        "encoder.*",
        ["encoder.0", "encoder.1"],
        ("encoder",),
        {"encoder"},
        starts_with_encoder,
    ],
)
def test_every_way_to_name_the_encoder_means_the_same(selector):
    model = net()
    expected = {name for name in params_of(model) if name.startswith("encoder.")}
    assert len(expected) == 7  # with three buffers of its batch norm
    assert Split.of(model, local=selector).local == expected
    assert Split.of(model, shared=selector).shared == expected


def test_a_glob_can_choose_among_numbered_blocks():
    assert {name.split(".")[1] for name in Split.of(net(), local="blocks.[0-2].*").local} == {
        "0",
        "1",
        "2",
    }


def test_every_parameter_and_buffer_is_on_exactly_one_side():
    model = net()
    for selector in ("encoder", "head", "blocks.1", "*.weight", []):
        split = Split.of(model, local=selector)
        assert split.local | split.shared == params_of(model).keys()
        assert not split.local & split.shared


def test_a_predicate_sees_the_tensor():
    assert Split.of(net(), local=lambda name, tensor: not tensor.is_floating_point()).local == {
        "encoder.1.num_batches_tracked"
    }


def test_layers_are_counted_from_either_end():
    model = mlp(hidden=(3, 4, 5))
    assert first_layers(model, 2) == ("layer1", "layer2")
    assert last_layers(model, 1) == ("layer4",)
    assert first_layers(model, 0) == last_layers(model, 0) == ()
    assert Split.of(model, local=first_layers(model, 2)) == Split.of(
        model, shared=last_layers(model, 2)
    )


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"local": "encodr"}, "did you mean 'encoder'"),
        ({"local": ["encoder", "nothing.*"]}, r"'nothing.\*' matches no parameter"),
        (
            {"shared": lambda name, tensor: False},
            "the predicate matches no parameter.*encoder.0.bias",
        ),
        ({}, "neither side given"),
        ({"local": "encoder", "shared": "head"}, "is on neither side"),
        ({"local": "encoder", "shared": "*"}, "would be both local and shared"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_the_names(sides, message):
    with pytest.raises(InputError, match=message):
        Split.of(net(), **sides)


def test_too_many_layers_are_refused():
    with pytest.raises(InputError, match="9 layers were requested, but the model has 5"):
        first_layers(mlp(), 9)


def test_tied_tensors_must_be_on_one_side():
    model = nn.ModuleDict(
        {
            "encoder": nn.Linear(3, 3, bias=False),
            "decoder": nn.Linear(3, 3, bias=False),
            "head": nn.Linear(3, 2),
        }
    )
    model["decoder"].weight = model["encoder"].weight
    with pytest.raises(
        InputError, match=r"'decoder.weight' and 'encoder.weight' are one tied tensor"
    ):
        Split.of(model, local="encoder")
    split = Split.of(model, local=["encoder", "decoder"])
    assert split.local == {"encoder.weight"}
    assert split.shared == {"head.weight", "head.bias"}


def test_the_table_names_every_tensor_and_its_bytes():
    model = net()
    lines = Split.of(model, local="encoder").describe(model).splitlines()
    assert len(lines) == len(params_of(model)) + 2
    assert any(
        line.split() == ["encoder.1.num_batches_tracked", "local", "1", "8"] for line in lines
    )
    assert torch.tensor(0).element_size() == 8
