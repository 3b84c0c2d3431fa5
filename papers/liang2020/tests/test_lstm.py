"""An LSTM with slopes worked out by hand: against plain autograd, one by one and batched, and against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from liang2020.lstm import lstm_scan
from torch import nn
from torch.func import grad, vmap


def plainly(asked, of_state, real):
    """The same, word by word in plain operations."""
    state = cell = asked.new_zeros(*asked.shape[:-2], of_state.shape[-1])
    states = []
    for word in range(asked.shape[-2]):
        i, f, g, o = (asked[..., word, :] + state @ of_state.transpose(-1, -2)).chunk(4, -1)
        after = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        known = real[..., word, None]
        state = torch.where(known, o.sigmoid() * after.tanh(), state)
        cell = torch.where(known, after, cell)
        states.append(state)
    return torch.stack(states, -2), cell


def drawn(seed, lead, *, rows=3, words=5, units=4, share=0.3):
    draw = torch.Generator().manual_seed(seed)
    asked = torch.randn(*lead, rows, words, 4 * units, generator=draw, dtype=torch.float64)
    of_state = torch.randn(*lead, 4 * units, units, generator=draw, dtype=torch.float64)
    return asked, of_state, torch.rand(*lead, rows, words, generator=draw) >= share


def loss_of(way, *, cells=True):
    def loss(asked, of_state, real):
        states, cell = way(asked, of_state, real)
        return states.sin().sum() + (cell.square().sum() if cells else 0)

    return loss


@given(
    seed=st.integers(0, 2**32),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    words=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    cells=st.booleans(),
)
@settings(max_examples=40)
def test_states_cells_and_slopes_are_those_of_autograd(seed, lead, words, share, cells):
    given_ = drawn(seed, lead, words=words, share=share)
    for ours, plain in zip(lstm_scan(*given_), plainly(*given_), strict=True):
        torch.testing.assert_close(ours, plain)
    slopes = (grad(loss_of(way, cells=cells), (0, 1))(*given_) for way in (lstm_scan, plainly))
    for ours, plain in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, plain)


def test_devices_and_examples_can_be_batched_whatever_is_common_to_them():
    asked, _, real = drawn(0, (2, 3))
    _, of_state, _ = drawn(1, (2,))
    slopes = []
    for way in (lstm_scan, plainly):
        of_examples = vmap(grad(loss_of(way), (0, 1)), in_dims=(0, None, 0))
        slopes.append(vmap(of_examples, in_dims=(0, 0, None))(asked, of_state, real[0]))
    for ours, plain in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, plain)


def test_it_is_torchs_own_layer():
    torchs = nn.LSTM(5, 4, batch_first=True).double()
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    asked = x @ torchs.weight_ih_l0.T + torchs.bias_ih_l0 + torchs.bias_hh_l0
    states, cell = lstm_scan(asked, torchs.weight_hh_l0, torch.ones(3, 6, dtype=torch.bool))
    expected, (_, expected_cell) = torchs(x)
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(cell, expected_cell[0])


@pytest.mark.parametrize(
    "way", [lambda function: function, lambda function: vmap(function, in_dims=(0, 0, 0))]
)
def test_in_bfloat16_states_are_kept_in_full(way):
    asked, of_state, real = drawn(0, (2,))
    asked, of_state = asked.float(), of_state.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = way(lstm_scan)(asked.bfloat16(), of_state, real)
        slopes = grad(lambda x: way(lstm_scan)(x.bfloat16(), of_state, real)[0].sum())(asked)
    assert states.dtype == torch.float32
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(states, lstm_scan(asked, of_state, real)[0], rtol=0.05, atol=0.05)
