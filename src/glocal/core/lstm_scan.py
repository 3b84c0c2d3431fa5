"""An LSTM over the words of texts, with hand-derived gradients (Hochreiter, Schmidhuber 1997).

torch's own LSTM has no batching rule for weights that differ between clients, and autograd under
`vmap` launches many small kernels for every word. Here there are fewer, for all clients and
directions at once: clients become leading axes of the tensors. No control flow depends on data, so
that a CUDA graph can capture it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


def lstm_scan(from_words: Tensor, of_state: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """States (..., rows, words, units) after every word, and the last cells (..., rows, units).

    `from_words` (..., rows, words, 4 units) is the words' part of the gates i, f, g, o before their
    activations, in torch's order, biases included. `of_state` (..., 4 units, units) are the weights
    of the previous state. Where `real` (..., rows, words) is false, there is padding: state and
    cell do not change.
    """
    states, cell, _, _ = _Forward.apply(from_words, of_state, real)  # type: ignore[no-untyped-call]
    return states, cell


class _Forward(Function):
    """The forward pass; it also returns all cells and gates, which the backward pass needs."""

    @staticmethod
    def forward(
        from_words: Tensor, of_state: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(from_words.device.type, enabled=False):
            return _scan(from_words.to(of_state.dtype), of_state, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, of_state, real = inputs
        states, _, cells, gates = output
        ctx.mark_non_differentiable(cells, gates)
        ctx.set_materialize_grads(False)  # no zeros for outputs that are not used
        ctx.save_for_backward(of_state, real, states, cells, gates)

    @staticmethod
    def backward(
        ctx: Any, d_states: Tensor | None, d_cell: Tensor | None, *_: None
    ) -> tuple[Tensor, Tensor, None]:
        states = ctx.saved_tensors[2]
        d_states = torch.zeros_like(states) if d_states is None else d_states
        d_cell = torch.zeros_like(states[..., -1, :]) if d_cell is None else d_cell
        inputs = (d_states, d_cell, *ctx.saved_tensors)
        d_from_words, d_of_state = _Backward.apply(*inputs)  # type: ignore[no-untyped-call]
        return d_from_words, d_of_state, None

    @staticmethod
    def vmap(info: Any, axes: Sequence[int | None], *tensors: Tensor) -> Any:
        outputs = _Forward.apply(*_leading(info, axes, tensors))  # type: ignore[no-untyped-call]
        return outputs, (0, 0, 0, 0)


class _Backward(Function):
    """The gradients with respect to `from_words` and `of_state`."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return _scan_back(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # no second derivatives

    @staticmethod
    def vmap(info: Any, axes: Sequence[int | None], *tensors: Tensor) -> Any:
        gradients = _Backward.apply(*_leading(info, axes, tensors))  # type: ignore[no-untyped-call]
        return gradients, (0, 0)


def _leading(info: Any, axes: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the axis of `vmap` first, in each of them."""
    leading = []
    for tensor, axis in zip(tensors, axes, strict=True):
        if axis is None:
            leading.append(tensor.expand(info.batch_size, *tensor.shape))
        else:
            leading.append(tensor.movedim(axis, 0))
    return leading


def _scan(
    from_words: Tensor, of_state: Tensor, real: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, the last cells, all cells and all gates after their activations; any leading axes."""
    lead, (rows, words, wide) = from_words.shape[:-3], from_words.shape[-3:]
    units = wide // 4
    weights = of_state.reshape(-1, wide, units).transpose(1, 2)
    by_word = from_words.reshape(-1, rows, words, wide).unbind(2)
    real_by_word = real.reshape(-1, rows, words, 1).unbind(2)
    cell = state = from_words.new_zeros(len(weights), rows, units)
    states, cells, activated = [], [], []
    for word, is_real in zip(by_word, real_by_word, strict=True):
        gates = _activate(torch.baddbmm(word, state, weights), units)
        i, f, g, o = gates.chunk(4, -1)
        cell = torch.where(is_real, torch.addcmul(f * cell, i, g), cell)
        state = torch.where(is_real, o * cell.tanh(), state)
        states.append(state)
        cells.append(cell)
        activated.append(gates)
    return (
        torch.stack(states, 2).reshape(*lead, rows, words, units),
        cell.reshape(*lead, rows, units),
        torch.stack(cells, 2).reshape(*lead, rows, words, units),
        torch.stack(activated, 2).reshape(*lead, rows, words, wide),
    )


def _activate(gates: Tensor, units: int) -> Tensor:
    """The activations of the gates i, f, g, o (lead, rows, 4 units), in place."""
    gates[..., : 2 * units].sigmoid_()
    gates[..., 2 * units : 3 * units].tanh_()
    gates[..., 3 * units :].sigmoid_()
    return gates


def _scan_back(
    d_states: Tensor,
    d_cell: Tensor,
    of_state: Tensor,
    real: Tensor,
    states: Tensor,
    cells: Tensor,
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of `from_words` and `of_state`, from those of all states and of the last cells.

    Backpropagation through time: the derivatives within a word are ready for all words, and the
    loop from the last word to the first only multiplies and adds.
    """
    rows, words, units = states.shape[-3:]
    weights, is_real = of_state.reshape(-1, 4 * units, units), real.reshape(-1, rows, words, 1)
    d_states, states, cells = (
        tensor.reshape(-1, rows, words, units) for tensor in (d_states, states, cells)
    )
    within = _derivatives(gates.reshape(-1, rows, words, 4 * units), cells, is_real)
    d_cell = d_cell.reshape(-1, rows, units)
    d_state = torch.zeros_like(d_states[:, :, 0])
    d_gates_backwards = []
    for t in reversed(range(words)):
        d_state = d_states[:, :, t] + d_state
        d_cell = torch.addcmul(d_cell, d_state, within.state_by_cell[:, :, t])
        d_ifg = d_cell[:, :, None] * within.cell_by_gates[:, :, t]
        d_o = (d_state * within.state_by_gate[:, :, t])[:, :, None]
        d_gates = torch.cat([d_ifg, d_o], 2).flatten(2)
        d_cell = d_cell * within.cell_by_earlier[:, :, t]
        d_state = torch.baddbmm(d_state * within.state_by_earlier[:, :, t], d_gates, weights)
        d_gates_backwards.append(d_gates)
    d_from_words = torch.stack(d_gates_backwards[::-1], 2)
    d_weights = d_from_words.flatten(1, 2).transpose(1, 2) @ _one_earlier(states).flatten(1, 2)
    return d_from_words.reshape(gates.shape), d_weights.reshape(of_state.shape)


class _Derivatives(NamedTuple):
    """What changes what within a word; (lead, rows, words, units) unless another shape is named.

    Gates count before their activations. At padding, state and cell are copies of those one word
    earlier, so that gates have no influence there.
    """

    cell_by_gates: Tensor  # of i, f, g: (lead, rows, words, 3, units)
    state_by_gate: Tensor  # of o
    state_by_cell: Tensor
    cell_by_earlier: Tensor  # by the cell one word earlier, at fixed gates
    state_by_earlier: Tensor  # by the state one word earlier, at fixed gates: (..., 1)


def _derivatives(gates: Tensor, cells: Tensor, is_real: Tensor) -> _Derivatives:
    """The derivatives within every word; none needs a gradient of a later word."""
    i, f, g, o = gates.chunk(4, -1)
    mask, cells_tanh = is_real.to(cells.dtype), cells.tanh()
    by_gates = torch.stack([g * i * (1 - i), _one_earlier(cells) * f * (1 - f), i * (1 - g * g)], 3)
    return _Derivatives(
        cell_by_gates=by_gates * mask[..., None, :],
        state_by_gate=cells_tanh * o * (1 - o) * mask,
        state_by_cell=o * (1 - cells_tanh * cells_tanh) * mask,
        cell_by_earlier=torch.where(is_real, f, 1),
        state_by_earlier=1 - mask,
    )


def _one_earlier(states: Tensor) -> Tensor:
    """States (lead, rows, words, units) one word earlier, zeros before the first."""
    return torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
