"""torch's LSTM and GRU where clients are batched: the same names and numbers, written out.

torch's own have no batching rule for weights that differ between clients. So the skeleton of a
model has these in their places. Where `vmap` batches neither the input nor a weight, they call
torch's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

from glocal.core.lstm_scan import lstm_scan

# One layer in one direction: sequence (rows, words, width), then the states before it
Scan = Callable[["_Weights", Tensor, tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]


class BatchableLSTM(nn.LSTM):
    """`nn.LSTM` that can be batched over clients."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As `nn.LSTM`: outputs, and the last states of all layers, hidden and cell."""
        if not _is_batched(self, input):
            return super().forward(input, hx)
        outputs, (hidden, cell) = _run(self, input, hx or (), _scan_lstm)
        return outputs, (hidden, cell)


class BatchableGRU(nn.GRU):
    """`nn.GRU` that can be batched over clients."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As `nn.GRU`: outputs, and the last states of all layers."""
        if not _is_batched(self, input):
            return super().forward(input, hx)
        start = () if hx is None else (hx,)
        outputs, (hidden,) = _run(self, input, start, _scan_gru)
        return outputs, hidden


def make_batchable(module: nn.Module) -> nn.Module:
    """The module itself as its batchable twin, if it has one; other modules stay as they are."""
    twins: dict[type, type] = {nn.LSTM: BatchableLSTM, nn.GRU: BatchableGRU}
    module.__class__ = twins.get(type(module), type(module))
    return module


class _Weights(NamedTuple):
    """The weights of one layer in one direction; the projection is that of an LSTM with one."""

    of_input: Tensor
    of_state: Tensor
    input_bias: Tensor
    state_bias: Tensor
    projection: Tensor | None

    @classmethod
    def of(cls, module: nn.RNNBase, suffix: str) -> "_Weights":
        """Those of a layer and direction; biases are zero where there are none."""
        of_input = getattr(module, f"weight_ih{suffix}")
        of_state = getattr(module, f"weight_hh{suffix}")
        input_bias = state_bias = of_state.new_zeros(of_state.shape[0])
        if module.bias:
            input_bias = getattr(module, f"bias_ih{suffix}")
            state_bias = getattr(module, f"bias_hh{suffix}")
        projection = getattr(module, f"weight_hr{suffix}") if module.proj_size else None
        return cls(of_input, of_state, input_bias, state_bias, projection)


def _is_batched(module: nn.RNNBase, sequence: Tensor) -> bool:
    """Whether `vmap` batches the input or a weight."""
    return any(map(_is_batched_tensor, (sequence, *module.parameters())))


def _is_batched_tensor(tensor: Tensor) -> bool:
    """Under gradients, the batched tensor is inside a wrapper."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _run(
    module: nn.RNNBase, sequence: Tensor, start: tuple[Tensor, ...], scan: Scan
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs and last states of all layers and directions, with axes as torch has them."""
    _require_batchable(module, sequence)
    x = sequence if module.batch_first else sequence.transpose(0, 1)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(1 + module.bidirectional):
            weights = _Weights.of(module, f"_l{layer}{'_reverse' * direction}")
            words = x.flip(1) if direction else x
            own = tuple(state[len(last)] for state in start)
            output, states = scan(weights, words, own)
            outputs.append(output.flip(1) if direction else output)
            last.append(states)
        x = torch.cat(outputs, -1)
    together = map(torch.stack, zip(*last, strict=True))
    return x if module.batch_first else x.transpose(0, 1), tuple(together)


def _require_batchable(module: nn.RNNBase, sequence: Tensor) -> None:
    """Refuse what has no batched form; the model then runs one client at a time."""
    if sequence.dim() != 3:
        raise NotImplementedError("a sequence without an axis of examples cannot be batched")
    if module.dropout and module.training and module.num_layers > 1:
        raise NotImplementedError(
            "dropout between the layers of one recurrent module cannot be batched; "
            "use a module per layer, and nn.Dropout between them"
        )


def _scan_lstm(
    weights: _Weights, words: Tensor, start: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Without a start and a projection, by the scan whose gradients are derived by hand."""
    from_words = words @ weights.of_input.T + (weights.input_bias + weights.state_bias)
    if start or weights.projection is not None:
        return _step_lstm(weights, from_words, start)
    real = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
    states, cell = lstm_scan(from_words, weights.of_state, real)
    return states, (states[:, -1], cell)


def _step_lstm(
    weights: _Weights, from_words: Tensor, start: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    units, width = weights.of_state.shape[0] // 4, weights.of_state.shape[1]
    rows = len(from_words)
    hidden, cell = start or (from_words.new_zeros(rows, width), from_words.new_zeros(rows, units))
    outputs = []
    for word in from_words.unbind(1):
        i, f, g, o = (word + hidden @ weights.of_state.T).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
        if weights.projection is not None:
            hidden = hidden @ weights.projection.T
        outputs.append(hidden)
    return torch.stack(outputs, 1), (hidden, cell)


def _scan_gru(
    weights: _Weights, words: Tensor, start: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The new gate sees the state after its bias, so that the two biases stay apart."""
    from_words = words @ weights.of_input.T + weights.input_bias
    units = weights.of_state.shape[1]
    (hidden,) = start or (from_words.new_zeros(len(from_words), units),)
    outputs = []
    for word in from_words.unbind(1):
        word_r, word_z, word_n = word.chunk(3, -1)
        from_state = hidden @ weights.of_state.T + weights.state_bias
        state_r, state_z, state_n = from_state.chunk(3, -1)
        reset, update = (word_r + state_r).sigmoid(), (word_z + state_z).sigmoid()
        new = (word_n + reset * state_n).tanh()
        hidden = new + update * (hidden - new)
        outputs.append(hidden)
    return torch.stack(outputs, 1), (hidden,)
