"""The paper's text network: word vectors, a bidirectional LSTM of 128, an MLP of 512 and 512.

Liang et al. 2020, appendix C.3. Both directions of the LSTM run in one scan;
`glocal.core.lstm_scan` says why it is not torch's own.
"""

from collections import OrderedDict
from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.lstm_scan import lstm_scan
from glocal.core.modules import make_dropout
from glocal.datasets.texts import VOCABULARY_SIZE
from glocal.studies.user_functions import ModelRequest

HIDDEN = (512, 512)
VECTOR = 300
UNITS = 128


class WordVectors(nn.Module):
    """A vector for every word, in two halves: a split can keep half of every vector local."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.first = nn.Embedding(vocabulary, width - width // 2)
        self.second = nn.Embedding(vocabulary, width // 2)

    def forward(self, words: Tensor) -> Tensor:
        """Words (...) as vectors (..., width)."""
        return torch.cat([self.first(words), self.second(words)], -1)


def one_direction(inputs: int, units: int) -> nn.LSTM:
    """torch's LSTM with one bias of the gates i, f, g, o, where torch has two that are summed."""
    lstm = nn.LSTM(inputs, units, bias=False, device="meta").to_empty(device="cpu")
    lstm.register_parameter("gate_bias", nn.Parameter(torch.empty(4 * units)))
    for weight in lstm.parameters():
        nn.init.uniform_(weight, -1 / sqrt(units), 1 / sqrt(units))  # as torch's own
    return lstm


def last_states(directions: Iterable[nn.Module], x: Tensor, real: Tensor) -> Tensor:
    """The last states of reading texts forwards and backwards, as from a packed `nn.LSTM`.

    From vectors (2, rows, words, inputs) in both reading orders, to states (rows, 2 units). Padding
    comes first; `real` (rows, words) is false there.
    """
    names = ("weight_ih_l0", "weight_hh_l0", "gate_bias")
    own = list(directions)
    of_input, of_state, bias = (_stacked(own, name) for name in names)
    two, rows, words, _ = x.shape
    from_words = x.flatten(1, 2) @ of_input.transpose(1, 2) + bias[:, None]
    from_words = from_words.reshape(two, rows, words, -1)
    # the padding before a text leaves the state at zero
    states, _ = lstm_scan(from_words, of_state, real.expand(two, rows, words))
    return torch.cat([states[0, :, -1], states[1, :, -1]], -1)


def _stacked(directions: Iterable[nn.Module], name: str) -> Tensor:
    """A weight of both directions."""
    return torch.stack([getattr(direction, name) for direction in directions])


class MoodLstm(nn.Module):
    """Texts as word indices (rows, words), padded with 0 at the end, to logits (rows, classes)."""

    def __init__(
        self, classes: int, *, vocabulary: int, width: int, units: int, dropout: float | None
    ) -> None:
        super().__init__()
        self.words = WordVectors(vocabulary, width)
        self.blank = make_dropout(dropout)
        self.lstm = nn.ModuleDict()
        for name in ("forwards", "backwards"):
            self.lstm[name] = one_direction(width, units)
        sizes = (2 * units, *HIDDEN)
        parts: list[tuple[str, nn.Module]] = []
        for number, (before, after) in enumerate(zip(sizes, HIDDEN, strict=False), start=1):
            parts += [(f"layer{number}", nn.Linear(before, after)), (f"relu{number}", nn.ReLU())]
            parts += [(f"drop{number}", make_dropout(dropout))]
        parts += [(f"layer{len(HIDDEN) + 1}", nn.Linear(HIDDEN[-1], classes))]
        self.head = nn.Sequential(OrderedDict(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Read both orders with the padding first, so that each ends with a word."""
        positions = torch.arange(x.shape[1], device=x.device)
        length = (x > 0).sum(1, keepdim=True)
        from_start = positions - (x.shape[1] - length)  # negative at padding
        real = from_start >= 0
        forwards = x.gather(1, from_start.clamp(min=0))
        vectors = self.blank(self.words(torch.stack([forwards, x.flip(1)])))
        logits: Tensor = self.head(last_states(self.lstm.values(), vectors, real))
        return logits


def mood_lstm(
    classes: int = 5,
    *,
    vocabulary: int = VOCABULARY_SIZE,
    width: int = VECTOR,
    units: int = UNITS,
    dropout: float | None = None,
) -> MoodLstm:
    """The paper's mood predictor: 1,436,101 parameters, in six layers that a split can name.

    In order: words.first, words.second, lstm.forwards, lstm.backwards, head.layer1, head.layer2
    with head.layer3. The paper does not give the width of its word vectors. At a width of 300,
    cuts between these layers are near every fifth of the parameters.
    """
    if min(classes, vocabulary - 1, width - 1, units) < 1:
        raise InputError(
            f"model: mood_lstm cannot be built with {classes} classes, {vocabulary} words, "
            f"width {width} and {units} units; they must be at least 1, 2, 2 and 1"
        )
    return MoodLstm(classes, vocabulary=vocabulary, width=width, units=units, dropout=dropout)


def build_mood_lstm(request: ModelRequest) -> MoodLstm:
    """The network of a study."""
    return mood_lstm(request.classes, dropout=request.settings.dropout)
