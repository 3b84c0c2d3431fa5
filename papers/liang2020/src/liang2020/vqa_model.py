"""The network for visual question answering (Liang et al. 2020, appendix C.3).

A picture goes through ResNet-18 (He et al. 2016) and a question through a two-layer LSTM. A last
linear layer in each of these two channels brings both to one width, and two layers predict the
answer from their product. An example is a row of integers: the number of its picture, then the
question's words.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glocal.core.errors import InputError, describe_error, suggest_name
from glocal.core.lstm_scan import lstm_scan
from glocal.core.modules import make_dropout
from glocal.datasets.image_table import ImageTable
from glocal.studies.settings import ModelSettings
from glocal.studies.user_functions import ModelRequest

WIDTHS = (64, 128, 256, 512)
SHARED = ("image.fc", "question.fc", "answer")
_RESNET_OUTPUTS = 1000  # the classes of ImageNet
_OFFICIAL_URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"


class Sizes(NamedTuple):
    """Widths of a word, the LSTM, both channels' outputs, and the answer's first layer."""

    word: int = 512
    lstm: int = 512
    common: int = 1024
    first: int = 1000


PAPER = Sizes()


class Block(nn.Module):
    """Two convolutions with a skip connection.

    Names are torchvision's, so that its weights can be loaded.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        skip = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.downsample = nn.Sequential(*skip) if stride != 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """From and to (rows, channels, height, width); a stride of 2 halves height and width."""
        inner = torch.relu(self.bn1(self.conv1(x)))
        skipped = self.downsample(x) if self.downsample else x
        return torch.relu(self.bn2(self.conv2(inner)) + skipped)


class ResNet(nn.Module):
    """ResNet-18, or the same with other widths.

    In training, dropout acts on the features that its convolutions return.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, *, dropout: float | None = None) -> None:
        super().__init__()
        _require_widths(widths)
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        before = widths[0]
        for number, width in enumerate(widths, start=1):
            stride = 1 if number == 1 else 2
            blocks = [Block(before, width, stride), Block(width, width, 1)]
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
            before = width
        self.drop = make_dropout(dropout)
        self.fc = nn.Linear(before, _RESNET_OUTPUTS)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def trunk(self, pictures: Tensor) -> Tensor:
        """The convolutions' features (rows, width) of pictures (rows, 3, height, width)."""
        x: Tensor = self.maxpool(torch.relu(self.bn1(self.conv1(pictures))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        """The outputs (rows, 1000) for pictures (rows, 3, height, width)."""
        outputs: Tensor = self.fc(self.drop(self.trunk(pictures)))
        return outputs


def _require_widths(widths: Sequence[int]) -> None:
    if len(widths) != 4 or min(widths) < 1:
        raise InputError(
            f"model: the widths are {list(widths)}; four were expected, such as {list(WIDTHS)}"
        )


class Trunk(nn.Module):
    """A ResNet's convolutions alone, as a frozen encoder."""

    def __init__(self, resnet: ResNet) -> None:
        super().__init__()
        self.resnet = resnet

    def forward(self, pictures: Tensor) -> Tensor:
        """The features (rows, width) of pictures (rows, 3, height, width)."""
        return self.resnet.trunk(pictures)


class Top(nn.Module):
    """The last layer of a ResNet whose frozen convolutions' features are looked up."""

    def __init__(self, width: int, *, dropout: float | None = None) -> None:
        super().__init__()
        self.drop = make_dropout(dropout)
        self.fc = nn.Linear(width, _RESNET_OUTPUTS)

    def forward(self, features: Tensor) -> Tensor:
        """The outputs (rows, 1000) for features (rows, width)."""
        outputs: Tensor = self.fc(self.drop(features))
        return outputs


class ImageChannel(nn.Module):
    """From the numbers of pictures (rows,) to vectors (rows, common)."""

    def __init__(self, pictures: ImageTable, resnet: nn.Module, common: int) -> None:
        super().__init__()
        self.pictures = pictures
        self.resnet = resnet
        self.fc = nn.Linear(_RESNET_OUTPUTS, common)

    def forward(self, numbers: Tensor) -> Tensor:
        """Vectors with values between -1 and 1."""
        return torch.tanh(self.fc(self.resnet(self.pictures(numbers))))


def last_states(lstm: nn.LSTM, words: Tensor, real: Tensor) -> Tensor:
    """The last hidden and cell states of all layers (rows, 2 * layers * hidden).

    `words` are vectors (rows, length, width). Where `real` (rows, length) is false, there is
    padding, which does not change the states.
    """
    x, hidden_states, cells = words, [], []
    for layer in range(lstm.num_layers):
        weight_ih, weight_hh, bias_ih, bias_hh = _layer_params(lstm, layer)
        x, cell = lstm_scan(x @ weight_ih.T + (bias_ih + bias_hh), weight_hh, real)
        hidden_states.append(x[:, -1])
        cells.append(cell)
    return torch.cat([*hidden_states, *cells], 1)


def _layer_params(lstm: nn.LSTM, layer: int) -> list[Tensor]:
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [getattr(lstm, f"{name}_l{layer}") for name in names]


class QuestionChannel(nn.Module):
    """From the words of questions (rows, length), 0 where there is none, to (rows, common)."""

    def __init__(self, words: int, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(words, sizes.word)
        self.lstm = nn.LSTM(sizes.word, sizes.lstm, 2)
        self.fc = nn.Linear(4 * sizes.lstm, sizes.common)

    def forward(self, words: Tensor) -> Tensor:
        """Vectors with values between -1 and 1."""
        states = last_states(self.lstm, torch.tanh(self.words(words)), words > 0)
        return torch.tanh(self.fc(torch.tanh(states)))


class VqaNet(nn.Module):
    """Logits of answers (rows, answers), from a picture's number and a question's words.

    These are the columns of its input (rows, 1 + length).
    """

    def __init__(self, image: ImageChannel, question: QuestionChannel, answer: nn.Module) -> None:
        super().__init__()
        self.image, self.question, self.answer = image, question, answer

    def forward(self, rows: Tensor) -> Tensor:
        """The answer's layers get the element-wise product of both channels."""
        logits: Tensor = self.answer(self.image(rows[:, 0]) * self.question(rows[:, 1:]))
        return logits


def vqa_net(
    pictures: ImageTable,
    *,
    words: int,
    answers: int = 1000,
    sizes: Sizes = PAPER,
    resnet: nn.Module | None = None,
    dropout: float | None = None,
) -> VqaNet:
    """The paper's network.

    With 64,437 words it has 54,042,572 parameters and buffers, 5,149,200 of them in SHARED. In
    training, dropout acts on the features of the ResNet's convolutions and on the inputs of the
    answer's two layers. Without a `resnet` it is ResNet-18, or its last layer alone if the table
    has features.
    """
    if resnet is None:
        resnet = _default_resnet(pictures, dropout)
    answer = OrderedDict[str, nn.Module](
        drop1=make_dropout(dropout),
        fc1=nn.Linear(sizes.common, sizes.first),
        tanh1=nn.Tanh(),
        drop2=make_dropout(dropout),
        fc2=nn.Linear(sizes.first, answers),
    )
    image, question = ImageChannel(pictures, resnet, sizes.common), QuestionChannel(words, sizes)
    return VqaNet(image, question, nn.Sequential(answer))


def _default_resnet(pictures: ImageTable, dropout: float | None) -> nn.Module:
    if len(pictures.shape) == 3:
        return ResNet(dropout=dropout)
    return Top(pictures.shape[0], dropout=dropout)


def build_vqa_net(request: ModelRequest) -> VqaNet:
    """The network for the questions of a study; the caller seeds torch's generator."""
    settings, questions = request.settings, request.questions
    if questions is None:
        raise InputError(
            "model: build_vqa_net answers questions about pictures; "
            "let data.source be vqav2, easy_vqa or questions of your own"
        )
    if len(settings.hidden) != len(Sizes._fields) or min(settings.hidden) < 1:
        widths = ", ".join(Sizes._fields)
        raise InputError(
            f"model: the hidden widths of build_vqa_net are {list(settings.hidden)}; "
            f"four from 1 on were expected: {widths}"
        )
    resnet = _build_resnet(settings) if len(questions.pictures.shape) == 3 else None
    return vqa_net(
        questions.pictures,
        words=len(questions.words),
        answers=request.classes,
        sizes=Sizes(*settings.hidden),
        resnet=resnet,
        dropout=settings.dropout,
    )


def frozen_resnet(request: ModelRequest) -> Trunk:
    """The convolutions of the study's ResNet, for model.encoder: they are not trained."""
    return Trunk(_build_resnet(replace(request.settings, dropout=None)))


def _build_resnet(settings: ModelSettings) -> ResNet:
    widths = WIDTHS if settings.widths is None else settings.widths
    resnet = ResNet(widths, dropout=settings.dropout)
    if settings.weights is not None:
        load_weights(resnet, settings.weights)
    return resnet


def load_weights(resnet: ResNet, source: str) -> None:
    """Load pretrained weights into a ResNet.

    `source` is "official", for torchvision's, which are downloaded, or a .safetensors or .pth file
    with torchvision's names. If a file has no `fc`, or one of another width, that layer keeps its
    weights.
    """
    given, own = _read_weights(source), resnet.state_dict()
    new = _without_other_fc(given, own)
    for name, tensor in own.items():
        if name.startswith("fc.") or name.endswith("num_batches_tracked"):
            new.setdefault(name, tensor)
        if name not in new:
            raise InputError(
                f"model: the weights {source} have no '{name}'; {suggest_name(name, given)}"
            )
        _require_fit(new[name], tensor, name, source)
    unknown = sorted(new.keys() - own.keys())
    if unknown:
        raise InputError(
            f"model: the weights {source} have '{unknown[0]}', which ResNet-18 has not; "
            "give weights of ResNet-18"
        )
    resnet.load_state_dict(new)


def _without_other_fc(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without a last layer of another width."""
    return {
        name: tensor
        for name, tensor in given.items()
        if not name.startswith("fc.") or _same_shape(tensor, own.get(name))
    }


def _require_fit(given: Tensor, own: Tensor, name: str, source: str) -> None:
    if not _is_plain(given, own.dtype):
        raise InputError(
            f"model: '{name}' in {source} is not of plain, finite numbers; "
            "give weights that were trained"
        )
    if given.shape != own.shape:
        raise InputError(
            f"model: '{name}' is {tuple(given.shape)} in {source}, and {tuple(own.shape)} here; "
            "check model.widths"
        )


def _same_shape(given: Tensor, own: Tensor | None) -> bool:
    return own is not None and not given.is_nested and given.shape == own.shape


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a dense tensor of real numbers that are finite when converted to this type."""
    is_other = (
        tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_complex()
        or tensor.layout != torch.strided
    )
    return not is_other and bool(tensor.to(dtype).isfinite().all())


def _read_weights(source: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, or of its `state_dict`, by name; anything else is dropped."""
    loaded = _load(source)
    inner = loaded.get("state_dict")
    entries = inner if isinstance(inner, Mapping) else loaded
    return {
        name: tensor
        for name, tensor in entries.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


def _load(source: str) -> dict[Any, Any]:
    try:
        return _load_file(source)
    except Exception as error:  # a network, a disk or an unexpected file may raise anything
        raise InputError(
            f"model: the weights {source} cannot be read ({describe_error(error)}); "
            "give a .safetensors or .pth file, or 'official'"
        ) from error


def _load_file(source: str) -> dict[Any, Any]:
    if source == "official":
        state = torch.hub.load_state_dict_from_url(
            _OFFICIAL_URL, check_hash=True, map_location="cpu"
        )
        return dict(state)
    if Path(source).suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(source)
    return dict(torch.load(source, map_location="cpu", weights_only=True))
