"""The paper's text network (Liang et al. 2020, appendix C.3): word vectors, a bidirectional LSTM of 128, an MLP of 512 and 512.

Both directions are read in one; see `lstm.read` for why this is not torch's own.
"""

from collections import OrderedDict
from math import sqrt

import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.modules import make_dropout
from glocal.datasets.texts import VOCABULARY_SIZE
from glocal.studies.user_functions import ModelRequest
from liang2020.lstm import lstm_scan

HIDDEN = (512, 512)
VECTOR = 300
UNITS = 128


class WordVectors(nn.Module):
    """A vector for every word, in two halves: so that a split can keep half of every vector on the device."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.first = nn.Embedding(vocabulary, width - width // 2)
        self.second = nn.Embedding(vocabulary, width // 2)

    def forward(self, words: Tensor) -> Tensor:
        """Words (...) as vectors (..., width)."""
        return torch.cat([self.first(words), self.second(words)], -1)


class Direction(nn.Module):
    """The weights of one direction: inputs and state to the four gates i, f, g, o, in torch's order, with one bias."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.of_input = nn.Parameter(torch.empty(4 * units, inputs))
        self.of_state = nn.Parameter(torch.empty(4 * units, units))
        self.bias = nn.Parameter(torch.empty(4 * units))
        for weight in self.parameters():
            nn.init.uniform_(weight, -1 / sqrt(units), 1 / sqrt(units))  # as torch's own


class BiLstm(nn.Module):
    """Read a text forwards and backwards: the two last states, as a packed `nn.LSTM` gives them (Hochreiter, Schmidhuber 1997)."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.forwards = Direction(inputs, units)
        self.backwards = Direction(inputs, units)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Vectors (2, rows, words, inputs) in either order, padding first, and which are real (rows, words): to (rows, 2 units)."""
        sides = (self.forwards, self.backwards)
        of_input, of_state, bias = (
            torch.stack([getattr(side, name) for side in sides])
            for name in ("of_input", "of_state", "bias")
        )
        two, rows, words, _ = x.shape
        asked = (x.flatten(1, 2) @ of_input.transpose(1, 2) + bias[:, None]).reshape(
            two, rows, words, -1
        )
        # before a text there is padding, in which the state stays empty
        states, _ = lstm_scan(asked, of_state, real.expand(two, rows, words))
        return torch.cat([states[0, :, -1], states[1, :, -1]], -1)


class MoodLstm(nn.Module):
    """Texts as numbers of words (rows, words), 0 for padding at their end, to a score for each class (rows, classes)."""

    def __init__(
        self, classes: int, *, vocabulary: int, width: int, units: int, dropout: float | None
    ) -> None:
        super().__init__()
        self.words = WordVectors(vocabulary, width)
        self.blank = make_dropout(dropout)
        self.lstm = BiLstm(width, units)
        sizes = (2 * units, *HIDDEN)
        parts: list[tuple[str, nn.Module]] = []
        for number, (before, after) in enumerate(zip(sizes, HIDDEN, strict=False), start=1):
            parts += [(f"layer{number}", nn.Linear(before, after)), (f"relu{number}", nn.ReLU())]
            parts += [(f"drop{number}", make_dropout(dropout))]
        parts += [(f"layer{len(HIDDEN) + 1}", nn.Linear(HIDDEN[-1], classes))]
        self.head = nn.Sequential(OrderedDict(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Both reading orders with padding first, so that each ends with its last word."""
        places = torch.arange(x.shape[1], device=x.device)
        length = (x > 0).sum(1, keepdim=True)
        from_start = places - (x.shape[1] - length)  # negative where there is padding
        real = from_start >= 0
        forwards = x.gather(1, from_start.clamp(min=0))
        vectors = self.blank(self.words(torch.stack([forwards, x.flip(1)])))
        scores: Tensor = self.head(self.lstm(vectors, real))
        return scores


def mood_lstm(
    classes: int = 5,
    *,
    vocabulary: int = VOCABULARY_SIZE,
    width: int = VECTOR,
    units: int = UNITS,
    dropout: float | None = None,
) -> MoodLstm:
    """The paper's mood predictor: 1,436,101 parameters, in six layers that a split can name.

    In order: words.first, words.second, lstm.forwards, lstm.backwards, head.layer1, head.layer2 with head.layer3. The paper does
    not tell the width of its word vectors; with 300 numbers these layers can be cut near every fifth of the parameters.
    """
    if min(classes, vocabulary - 1, width - 1, units) < 1:
        raise InputError(
            f"model: mood_lstm of {classes} classes, {vocabulary} words, width {width}, {units} units cannot be built"
        )
    return MoodLstm(classes, vocabulary=vocabulary, width=width, units=units, dropout=dropout)


def build_mood_lstm(request: ModelRequest) -> MoodLstm:
    """The network of a study."""
    return mood_lstm(request.classes, dropout=request.settings.dropout)
