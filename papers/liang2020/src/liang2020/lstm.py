"""An LSTM's way through a text, with its slopes worked out by hand (Hochreiter, Schmidhuber 1997).

torch's own LSTM has no rule for weights that differ from device to device, and autograd under `vmap` makes many small
kernels of every word. Here they are fewer, for all devices and directions at once: devices become leading axes of the tensors, and
nothing depends on data, so that a CUDA graph can hold it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def lstm_scan(asked: Tensor, of_state: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """States (..., rows, words, units) after every word, and the last cells (..., rows, units).

    `asked` (..., rows, words, 4 units) is what the words ask of the gates i, f, g, o, in torch's order; `of_state` (..., 4 units,
    units) what the last state does. Where `real` (..., rows, words) is not, state and cell stay as they were.
    """
    states, cell, _, _ = _Read.apply(asked, of_state, real)  # type: ignore[no-untyped-call]
    return states, cell


class _Read(Function):
    """Forwards; cells and opened gates come out besides, for the way back."""

    @staticmethod
    def forward(
        asked: Tensor, of_state: Tensor, real: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(asked.device.type, enabled=False):
            return _read(asked.to(of_state.dtype), of_state, real)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, of_state, real = inputs
        states, _, cells, gates = output
        ctx.mark_non_differentiable(cells, gates)
        ctx.set_materialize_grads(False)  # or they would be as many zeros
        ctx.save_for_backward(of_state, real, states, cells, gates)

    @staticmethod
    def backward(
        ctx: Any, d_states: Tensor | None, d_cell: Tensor | None, *_: None
    ) -> tuple[Tensor, Tensor, None]:
        states = ctx.saved_tensors[2]
        d_states = torch.zeros_like(states) if d_states is None else d_states
        d_cell = torch.zeros_like(states[..., -1, :]) if d_cell is None else d_cell
        d_asked, d_of_state = _Back.apply(d_states, d_cell, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return d_asked, d_of_state, None

    @staticmethod
    def vmap(info: Any, axes: Sequence[int | None], *tensors: Tensor) -> Any:
        return _Read.apply(*_leading(info, axes, tensors)), (0, 0, 0, 0)  # type: ignore[no-untyped-call]


class _Back(Function):
    """Backwards: slopes by `asked` and by `of_state`."""

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return _back(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # of slopes there are no slopes: nothing here asks for a second derivative

    @staticmethod
    def vmap(info: Any, axes: Sequence[int | None], *tensors: Tensor) -> Any:
        return _Back.apply(*_leading(info, axes, tensors)), (0, 0)  # type: ignore[no-untyped-call]


def _leading(info: Any, axes: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the axis of `vmap` first, in each of them."""
    pairs = zip(tensors, axes, strict=True)
    return [
        t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
        for t, axis in pairs
    ]


def _read(asked: Tensor, of_state: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, the last cells, all cells and all gates, opened; with whatever axes lead."""
    lead, (rows, words, wide) = asked.shape[:-3], asked.shape[-3:]
    units = wide // 4
    onward, here = (
        of_state.reshape(-1, wide, units).transpose(1, 2),
        real.reshape(-1, rows, words, 1),
    )
    cell = state = asked.new_zeros(len(onward), rows, units)
    states, cells, opened = [], [], []
    for word, known in zip(
        asked.reshape(-1, rows, words, wide).unbind(2), here.unbind(2), strict=True
    ):
        gates = torch.baddbmm(word, state, onward)
        gates[..., : 2 * units].sigmoid_()
        gates[..., 2 * units : 3 * units].tanh_()
        gates[..., 3 * units :].sigmoid_()
        i, f, g, o = gates.chunk(4, -1)
        cell = torch.where(known, torch.addcmul(f * cell, i, g), cell)
        state = torch.where(known, o * cell.tanh(), state)
        states.append(state)
        cells.append(cell)
        opened.append(gates)
    return (
        torch.stack(states, 2).reshape(*lead, rows, words, units),
        cell.reshape(*lead, rows, units),
        torch.stack(cells, 2).reshape(*lead, rows, words, units),
        torch.stack(opened, 2).reshape(*lead, rows, words, wide),
    )


def _back(
    d_states: Tensor,
    d_cell: Tensor,
    of_state: Tensor,
    real: Tensor,
    states: Tensor,
    cells: Tensor,
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Slopes by what words ask (..., rows, words, 4 units) and by `of_state`, from those by states and by the last cells."""
    rows, words, units = states.shape[-3:]
    weights, here = of_state.reshape(-1, 4 * units, units), real.reshape(-1, rows, words, 1)
    d_states, states, cells = (
        tensor.reshape(-1, rows, words, units) for tensor in (d_states, states, cells)
    )
    i, f, g, o = gates.reshape(-1, rows, words, 4 * units).chunk(4, -1)
    known, squashed = here.to(cells.dtype), cells.tanh()
    # all that needs no slope of a later word, for all words at once: of the gates by the cell and by the state, of cells by cells
    by_cell = (
        torch.stack([g * i * (1 - i), _before(cells) * f * (1 - f), i * (1 - g * g)], 3)
        * known[..., None, :]
    )
    by_state = squashed * o * (1 - o) * known
    of_cell = o * (1 - squashed * squashed) * known
    lasts, stays = torch.where(here, f, 1), 1 - known
    d_cell, d_state, found = (
        d_cell.reshape(-1, rows, units),
        torch.zeros_like(d_states[:, :, 0]),
        [],
    )
    for t in reversed(range(words)):
        d_state = d_states[:, :, t] + d_state
        d_cell = torch.addcmul(d_cell, d_state, of_cell[:, :, t])
        d_gates = torch.cat(
            [d_cell[:, :, None] * by_cell[:, :, t], (d_state * by_state[:, :, t])[:, :, None]], 2
        ).flatten(2)
        d_cell = d_cell * lasts[:, :, t]
        d_state = torch.baddbmm(d_state * stays[:, :, t], d_gates, weights)
        found.append(d_gates)
    d_asked = torch.stack(found[::-1], 2)
    d_weights = d_asked.flatten(1, 2).transpose(1, 2) @ _before(states).flatten(1, 2)
    return d_asked.reshape(gates.shape), d_weights.reshape(of_state.shape)


def _before(states: Tensor) -> Tensor:
    """States (lead, rows, words, units) one word earlier, with nothing before the first."""
    return torch.cat([torch.zeros_like(states[:, :, :1]), states[:, :, :-1]], 2)
