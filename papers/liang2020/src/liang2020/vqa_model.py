"""The paper's network for visual question answering (Liang et al. 2020, appendix C.3): two encoders and a small common part.

A picture goes through ResNet-18 (He et al. 2016) and a question through two layers of LSTM, a last layer each brings both to one
width, and two layers answer from their product. An example is one row of whole numbers: which picture, then the question's words.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glocal.core.errors import InputError, describe_error, suggest_name
from glocal.core.modules import make_dropout
from glocal.datasets.image_table import ImageTable
from glocal.studies.settings import ModelSettings
from glocal.studies.user_functions import ModelRequest
from liang2020.lstm import lstm_scan

WIDTHS = (64, 128, 256, 512)
SHARED = ("image.fc", "question.fc", "answer")
_SAID = 1000  # what ResNet puts out: the classes of ImageNet
_OFFICIAL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"


class Sizes(NamedTuple):
    """Widths of the network: of a word, of the LSTM, of what both channels are brought to, and of the first layer of the answer."""

    word: int = 512
    lstm: int = 512
    common: int = 1024
    first: int = 1000


PAPER = Sizes()


class Block(nn.Module):
    """Two convolutions and a way around them; names as torchvision has them, so that its weights can be loaded."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        around = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.downsample = nn.Sequential(*around) if stride != 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, height, width) on, half as high and wide with a stride of 2."""
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(
            self.bn2(self.conv2(inner)) + (self.downsample(x) if self.downsample else x)
        )


class ResNet(nn.Module):
    """ResNet-18, or the same with other widths; `fc` says 1,000 things of a picture.

    While training, a share `dropout` of what its convolutions see is left out.
    """

    def __init__(self, widths: Sequence[int] = WIDTHS, *, dropout: float | None = None) -> None:
        super().__init__()
        if len(widths) != 4 or min(widths) < 1:
            raise InputError(
                f"model: the widths are {list(widths)}; four were expected, such as {list(WIDTHS)}"
            )
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        before = widths[0]
        for number, width in enumerate(widths, start=1):
            blocks = [Block(before, width, 1 if number == 1 else 2), Block(width, width, 1)]
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
            before = width
        self.drop = make_dropout(dropout)
        self.fc = nn.Linear(before, _SAID)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def trunk(self, pictures: Tensor) -> Tensor:
        """What its convolutions see (rows, width) in pictures (rows, 3, height, width)."""
        x: Tensor = self.maxpool(torch.relu(self.bn1(self.conv1(pictures))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return x.mean((2, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        """What is said of pictures (rows, 1000)."""
        said: Tensor = self.fc(self.drop(self.trunk(pictures)))
        return said


class Trunk(nn.Module):
    """A ResNet's convolutions alone: the encoder, where it is frozen."""

    def __init__(self, resnet: ResNet) -> None:
        super().__init__()
        self.resnet = resnet

    def forward(self, pictures: Tensor) -> Tensor:
        """What they see (rows, width) in pictures (rows, 3, height, width)."""
        return self.resnet.trunk(pictures)


class Top(nn.Module):
    """What is left of ResNet where its convolutions are frozen and their features are looked up."""

    def __init__(self, width: int, *, dropout: float | None = None) -> None:
        super().__init__()
        self.drop = make_dropout(dropout)
        self.fc = nn.Linear(width, _SAID)

    def forward(self, features: Tensor) -> Tensor:
        """What is said of pictures (rows, 1000)."""
        said: Tensor = self.fc(self.drop(features))
        return said


class ImageChannel(nn.Module):
    """From the number of a picture (rows,) to what the answer needs of it (rows, common)."""

    def __init__(self, pictures: ImageTable, resnet: nn.Module, common: int) -> None:
        super().__init__()
        self.pictures, self.resnet, self.fc = pictures, resnet, nn.Linear(_SAID, common)

    def forward(self, numbers: Tensor) -> Tensor:
        """Between -1 and 1."""
        return torch.tanh(self.fc(self.resnet(self.pictures(numbers))))


class Lstm(nn.Module):
    """Two layers as in `nn.LSTM`, names too, but one that can be batched over devices.

    Words that are padding leave the states as they were.
    """

    def __init__(self, inputs: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        for name, tensor in nn.LSTM(inputs, hidden, layers).named_parameters():
            self.register_parameter(name, tensor)

    def forward(self, words: Tensor, real: Tensor) -> Tensor:
        """Hidden and cell states of all layers (rows, 2 * layers * hidden) after words (rows, length, width), where `real`."""
        states, x = [], words
        for layer in range(self.layers):
            inputs, recurrent, one, other = (
                getattr(self, f"{name}_l{layer}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            x, cell = lstm_scan(x @ inputs.T + (one + other), recurrent, real)
            states.append((x[:, -1], cell))
        return torch.cat([*(hidden for hidden, _ in states), *(cell for _, cell in states)], 1)


class QuestionChannel(nn.Module):
    """From the words of a question (rows, length), 0 where there is none, to what the answer needs of it (rows, common)."""

    def __init__(self, words: int, sizes: Sizes) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(words, sizes.word), Lstm(sizes.word, sizes.lstm)
        self.fc = nn.Linear(4 * sizes.lstm, sizes.common)

    def forward(self, words: Tensor) -> Tensor:
        """Between -1 and 1."""
        states = self.lstm(torch.tanh(self.words(words)), words > 0)
        return torch.tanh(self.fc(torch.tanh(states)))


class VqaNet(nn.Module):
    """Logits of answers (rows, answers) from rows (rows, 1 + length) of a picture's number and a question's words."""

    def __init__(self, image: ImageChannel, question: QuestionChannel, answer: nn.Module) -> None:
        super().__init__()
        self.image, self.question, self.answer = image, question, answer

    def forward(self, rows: Tensor) -> Tensor:
        """What both channels say is multiplied, number by number."""
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
    """The paper's network: with 64,437 words of 512 numbers 54,042,572 parameters and buffers, of which SHARED are 5,149,200.

    A share `dropout` of what a ResNet's convolutions see and of the answer's hidden units is left out while training.
    """
    if resnet is None:
        resnet = (
            ResNet(dropout=dropout)
            if len(pictures.shape) == 3
            else Top(pictures.shape[0], dropout=dropout)
        )
    answer = OrderedDict[str, nn.Module](
        drop1=make_dropout(dropout),
        fc1=nn.Linear(sizes.common, sizes.first),
        tanh1=nn.Tanh(),
        drop2=make_dropout(dropout),
        fc2=nn.Linear(sizes.first, answers),
    )
    image, question = ImageChannel(pictures, resnet, sizes.common), QuestionChannel(words, sizes)
    return VqaNet(image, question, nn.Sequential(answer))


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
    """Pretrained weights into a ResNet: "official" (torchvision's, downloaded), or a file, .safetensors or .pth, with its names.

    A file may lack `fc`, or have one of another width: that layer then stays as it is.
    """
    given, own = _read(source), resnet.state_dict()
    taken = {
        name: tensor
        for name, tensor in given.items()
        if not name.startswith("fc.") or _fits(tensor, own.get(name))
    }
    for name, tensor in own.items():
        if name.startswith("fc.") or name.endswith("num_batches_tracked"):
            taken.setdefault(name, tensor)
        if name not in taken:
            raise InputError(
                f"model: the weights {source} have no '{name}'; {suggest_name(name, given)}"
            )
        if not _plain(taken[name], tensor.dtype):
            raise InputError(
                f"model: '{name}' in {source} is not of plain, finite numbers; give weights that were trained"
            )
        if taken[name].shape != tensor.shape:
            raise InputError(
                f"model: '{name}' is {tuple(taken[name].shape)} in {source}, and {tuple(tensor.shape)} here; check model.widths"
            )
    if more := sorted(taken.keys() - own.keys()):
        raise InputError(
            f"model: the weights {source} have '{more[0]}', which ResNet-18 has not; give weights of ResNet-18"
        )
    resnet.load_state_dict(taken)


def _fits(given: Tensor, own: Tensor | None) -> bool:
    return own is not None and not given.is_nested and given.shape == own.shape


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether it is a dense tensor of numbers that are finite, also once they are of this type."""
    odd = (
        tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_complex()
        or tensor.layout != torch.strided
    )
    return not odd and bool(tensor.to(dtype).isfinite().all())


def _read(source: str) -> dict[str, Tensor]:
    """Its tensors by name; what else a checkpoint holds is left out, and they may be its `state_dict`."""
    loaded = _loaded(source)
    inner = loaded.get("state_dict")
    found = inner if isinstance(inner, Mapping) else loaded
    return {
        name: tensor
        for name, tensor in found.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


def _loaded(source: str) -> dict[Any, Any]:
    try:
        if source == "official":
            return dict(
                torch.hub.load_state_dict_from_url(_OFFICIAL, check_hash=True, map_location="cpu")
            )
        if Path(source).suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(source)
        return dict(torch.load(source, map_location="cpu", weights_only=True))
    except (
        Exception
    ) as error:  # whatever a network, a disk or a file that is something else may raise
        raise InputError(
            f"model: the weights {source} cannot be had ({describe_error(error)}); give a .safetensors or .pth file, or 'official'"
        ) from error
