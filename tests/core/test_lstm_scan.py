"""The LSTM with hand-derived gradients: against autograd, batched or not, and against torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, vmap

from glocal.core.lstm_scan import lstm_scan


def plain_scan(from_words, of_state, real):
    """The same, word by word in plain operations."""
    state = cell = from_words.new_zeros(*from_words.shape[:-2], of_state.shape[-1])
    states = []
    for word in range(from_words.shape[-2]):
        i, f, g, o = (from_words[..., word, :] + state @ of_state.transpose(-1, -2)).chunk(4, -1)
        after = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        is_real = real[..., word, None]
        state = torch.where(is_real, o.sigmoid() * after.tanh(), state)
        cell = torch.where(is_real, after, cell)
        states.append(state)
    return torch.stack(states, -2), cell


def random_inputs(seed, lead, *, rows=3, words=5, units=4, share=0.3):
    draw = torch.Generator().manual_seed(seed)
    from_words = torch.randn(*lead, rows, words, 4 * units, generator=draw, dtype=torch.float64)
    of_state = torch.randn(*lead, 4 * units, units, generator=draw, dtype=torch.float64)
    return from_words, of_state, torch.rand(*lead, rows, words, generator=draw) >= share


def loss_of(scan, *, cells=True):
    def loss(from_words, of_state, real):
        states, cell = scan(from_words, of_state, real)
        return states.sin().sum() + (cell.square().sum() if cells else 0)

    return loss


@given(
    seed=st.integers(0, 2**32),
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    words=st.integers(1, 6),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    cells=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_states_cells_and_gradients_are_those_of_autograd(seed, lead, words, share, cells):
    inputs = random_inputs(seed, lead, words=words, share=share)
    for ours, plain in zip(lstm_scan(*inputs), plain_scan(*inputs), strict=True):
        torch.testing.assert_close(ours, plain)
    gradients = [
        grad(loss_of(scan, cells=cells), (0, 1))(*inputs) for scan in (lstm_scan, plain_scan)
    ]
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)


def test_clients_and_examples_can_be_batched_whatever_they_share():
    from_words, _, real = random_inputs(0, (2, 3))
    _, of_state, _ = random_inputs(1, (2,))
    gradients = []
    for scan in (lstm_scan, plain_scan):
        of_examples = vmap(grad(loss_of(scan), (0, 1)), in_dims=(0, None, 0))
        gradients.append(vmap(of_examples, in_dims=(0, 0, None))(from_words, of_state, real[0]))
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)


def test_it_computes_the_same_as_torchs_own_layer():
    torchs = nn.LSTM(5, 4, batch_first=True).double()
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    from_words = x @ torchs.weight_ih_l0.T + torchs.bias_ih_l0 + torchs.bias_hh_l0
    states, cell = lstm_scan(from_words, torchs.weight_hh_l0, torch.ones(3, 6, dtype=torch.bool))
    expected, (_, expected_cell) = torchs(x)
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(cell, expected_cell[0])


@pytest.mark.parametrize(
    "transform", [lambda function: function, lambda function: vmap(function, in_dims=(0, 0, 0))]
)
def test_in_bfloat16_states_stay_in_float32(transform):
    from_words, of_state, real = random_inputs(0, (2,))
    from_words, of_state = from_words.float(), of_state.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = transform(lstm_scan)(from_words.bfloat16(), of_state, real)
        gradient = grad(lambda x: transform(lstm_scan)(x.bfloat16(), of_state, real)[0].sum())(
            from_words
        )
    assert states.dtype == torch.float32
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(
        states, lstm_scan(from_words, of_state, real)[0], rtol=0.05, atol=0.05
    )
