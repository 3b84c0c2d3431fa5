"""Seven tasks of every kind, tiny: a model, its task, and the data of a few clients.

Studies in the tests name these functions too, as "tests.support.tasks:function".
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import glocal
from glocal import FederatedData
from tests.support.world import seeded

SIZES = (11, 17, 9, 14)  # the last batch is smaller, and no two clients have as many
PAD = -100
POEM = (
    "what the hammer what the chain\nin what furnace was thy brain",
    "tyger tyger burning bright\nin the forests of the night",
    "when the stars threw down their spears\nand watered heaven with their tears",
    "did he smile his work to see\ndid he who made the lamb make thee",
)
ALPHABET = " " + "".join(sorted({*"".join(POEM)} - {" ", "\n"}))
POSITIONS, WORDS = 7, 9


def inputs(shape, seed=0):
    """Random numbers (rows, ...) for every client."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *shape, generator=generator) for size in SIZES]


def named(clients):
    return FederatedData.from_tensors(
        dict(zip(("ulm", "bonn", "köln", "jena"), clients, strict=True)), test=0.3, validation=0.2
    )


# ---- numbers: scikit-learn's diabetes data, a client per decade of age


def diabetes_frame():
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame.iloc[::6]
    decade = (frame["age"] // 10).clip(3, 6).astype(int)
    frame = (frame - frame.mean()) / frame.std()
    return frame.assign(decade=[f"{each}0s" for each in decade])


def diabetes_data():
    return FederatedData.from_dataframe(
        diabetes_frame(), client="decade", target="target", validation=0.2
    )


def regressor():
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 1))


# ---- several labels


def label_data():
    clients = inputs((6,))
    return named([(x, (x[:, :3] + x[:, 3:] > 0).float()) for x in clients])


def labeller():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


# ---- the next character, with positions at the end of a line that do not count


def character_windows(text):
    """Windows (rows, positions) of a poem's lines, and the characters after each position."""
    x, y = [], []
    for line in text.split("\n"):
        numbers = [ALPHABET.index(letter) for letter in line]
        for start in range(0, len(numbers) - 1, POSITIONS - 2):
            window = numbers[start : start + POSITIONS + 1]
            missing = POSITIONS + 1 - len(window)
            x.append(window[:-1] + [0] * missing)
            y.append(window[1:] + [PAD] * missing)
    return torch.tensor(x), torch.tensor(y)


def character_data():
    return named([character_windows(text) for text in POEM])


class NextCharacter(nn.Module):
    """A stock LSTM over characters: logits (rows, positions, characters)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 5)
        self.lstm = nn.LSTM(5, 8, batch_first=True)
        self.head = nn.Linear(8, len(ALPHABET))

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0])


# ---- inputs by name


def dict_data():
    clients = inputs((4,))
    return named([({"left": x[:, :2], "right": x[:, 2:]}, (x[:, 0] > 0).long()) for x in clients])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(2, 5)
        self.right = nn.Linear(2, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.relu(self.left(x["left"]) + self.right(x["right"])))


# ---- an object as output


class Output(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


class WithOutput(nn.Module):
    """Takes its inputs by name, and returns an object, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, *, features):
        hidden = torch.tanh(self.body(features))
        return Output(hidden, self.head(hidden))


def logits_of(model, x):
    return model(features=x).logits


def class_data():
    return named([(x, x[:, :3].argmax(1)) for x in inputs((4,))])


# ---- a stock transformer over words


class Reader(nn.Module):
    """Stock encoder layers over words (rows, positions), and a head on their mean."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)).mean(1))


def word_data():
    clients = [(5 * x).long().abs() % WORDS for x in inputs((5,))]
    return named([(x, (x[:, 0] > 2).long()) for x in clients])


# ---- no targets


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 2)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def unlabelled_data():
    return named([x + x.flip(1) for x in inputs((6,))])


# ---- the tasks of the models


def multilabel(model):
    return glocal.multilabel(model, metrics=("label_accuracy", "auroc"))


def classification(model):
    return glocal.classification(model, metrics=("accuracy", "auroc"))


def of_objects(model):
    return glocal.classification(model, metrics=("accuracy", "top_2"), forward=logits_of)


def reconstruction(model):
    return glocal.Task(model, nn.MSELoss(), metrics=["rmse", "mae"])


class KnownTask(NamedTuple):
    """A task to try: what it is made of, the local side of LG-FedAvg, and the selection."""

    model: Callable[[], nn.Module]
    task: Callable[[nn.Module], glocal.Task]
    data: Callable[[], FederatedData]
    local: str
    select: str
    has_classes: bool = False

    def algorithm(self, dtype=torch.float32, **settings):
        """LG-FedAvg on the task, with a model in this type."""
        task = self.task(seeded(self.model).to(dtype))
        return glocal.LGFedAvg(task, local=self.local, optimizer=glocal.SGD(lr=0.05), **settings)


TASKS = {
    "regression": KnownTask(regressor, glocal.regression, diabetes_data, "0", "min mae"),
    "multilabel": KnownTask(labeller, multilabel, label_data, "0", "max auroc"),
    "next character": KnownTask(
        NextCharacter, glocal.tokens, character_data, "embedding", "min perplexity"
    ),
    "dict inputs": KnownTask(
        TwoInputs, classification, dict_data, "left", "max accuracy", has_classes=True
    ),
    "object output": KnownTask(
        WithOutput, of_objects, class_data, "body", "min loss", has_classes=True
    ),
    "transformer": KnownTask(
        Reader, classification, word_data, "embedding", "max accuracy", has_classes=True
    ),
    "autoencoder": KnownTask(Autoencoder, reconstruction, unlabelled_data, "encoder", "min rmse"),
}
