"""Small runs of every algorithm in float64, one client at a time, and their numbers.

python -m tests.golden.runs --write      # once; the file is never written again

Only training itself uses the library's random numbers (sampled clients, the order of examples,
dropout). Data, hold-outs and initial weights are computed here.
"""

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import glocal
from glocal import algorithms
from glocal.core.data import ClientData, Examples
from glocal.core.files import format_json, read_rows
from glocal.datasets.federated import FederatedData

FILE = Path(__file__).with_name("numbers.json")
CLIENTS, SEEDS, ROUNDS = 5, (0, 1), 5
# training examples of each client; 4 more are for validation, 6 for the test
SIZES = (23, 14, 31, 9, 17)
WORDS, LENGTH = 20, 7
NUM_ENTRIES = 8  # entries of a tensor that are written


class Text(nn.Module):
    """A stock LSTM over words; its last output is classified."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, 5), nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.lstm(self.words(x))[0][:, -1])


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10)
    )


def cnn():
    first = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))


MODELS = {"mlp": (mlp, ["1"]), "cnn": (cnn, ["0", "1"]), "text": (Text, ["words", "lstm"])}
# name: the class of the algorithm and its settings, beside the task and SGD
ALGORITHMS = {
    "fedavg": ("FedAvg", lambda local: {}),
    "fedprox": ("FedProx", lambda local: {"mu": 0.3}),
    "lg_fedavg": ("LGFedAvg", lambda local: {"local": local}),
    "local_only": ("LocalOnly", lambda local: {}),
    "mtl": ("MTL", lambda local: {"lam": 0.2, "ridge": 0.01}),
    "apfl": ("APFL", lambda local: {"alpha": 0.4, "alpha_lr": 0.1}),
}


def initial_model(name, seed):
    """A model in float64 with weights that are drawn here, not by torch."""
    model, draw = MODELS[name][0]().double(), np.random.RandomState(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            numbers = draw.standard_normal(tuple(parameter.shape))
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 16
            parameter.copy_(torch.from_numpy(numbers) / math.sqrt(fan_in))
    return model


def digits():
    """Each client has mostly digits of two or three classes."""
    bundled = load_digits()
    order = np.argsort(bundled.target, kind="stable")[:: len(bundled.target) // 150]
    x = torch.from_numpy(bundled.images[order][:, None] / 16 - 0.3)
    return Examples(x, torch.from_numpy(bundled.target[order]).long())


def texts():
    draw = np.random.RandomState(7)
    x = torch.from_numpy(draw.randint(1, WORDS, (150, LENGTH)))
    return Examples(x, (x[:, 0] + x[:, -1]).remainder(3).long())


def federation(name):
    """Rows by hand: train, validation and test of every client, one after the other."""
    examples = texts() if name == "text" else digits()
    rows, start = {"train": [], "val": [], "test": []}, 0
    for size in SIZES:
        for part, length in (("train", size), ("val", 4), ("test", 6)):
            rows[part].append(np.arange(start, start + length))
            start += length
    return FederatedData(
        *(ClientData(examples, tuple(rows[part])) for part in ("train", "val", "test"))
    )


def run(algorithm, name, seed):
    """One run's numbers, under names that no renaming changes."""
    kind, settings = ALGORITHMS[algorithm]
    task = glocal.classification(initial_model(name, seed))
    sgd = glocal.SGD(lr=0.1, momentum=0.5)
    configured = getattr(algorithms, kind)(task, optimizer=sgd, **settings(MODELS[name][1]))
    with tempfile.TemporaryDirectory() as folder:
        result = glocal.fit(
            configured,
            federation(name),
            rounds=ROUNDS,
            clients_per_round=3,
            local_epochs=2,
            batch_size=5,
            seeds=[seed],
            evaluation=glocal.Evaluation(every=1),
            engine="looped",
            device="cpu",
            folder=folder,
            progress=False,
        )
        rows = read_rows(Path(folder) / "rows.jsonl")
    state = result.group().state
    shared, private = state.shared, state.private
    trees = {"shared": shared, "client 0": private.of(0), "client 4": private.of(4)}
    tensors = {
        f"{where}/{tensor.removeprefix('own/')}": numbers(value)
        for where, tree in trees.items()
        for tensor, value in sorted(tree.items())
    }
    return {
        "losses": [row["loss"] for row in rows],
        "validation": [row["validation"] for row in rows],
        "bytes": [row["bytes"] for row in rows] + [result.ledger.total.bytes],
        "paper's parameters": result.ledger.paper.parameters,
        "local test": result.local_test,
        "new test": result.new_test,
        "tensors": tensors,
    }


def numbers(tensor):
    """The L2 norm, the sum, and entries at fixed places."""
    flat = tensor.double().flatten()
    places = [(place * 7919) % flat.numel() for place in range(min(NUM_ENTRIES, flat.numel()))]
    return [float(flat.norm()), float(flat.sum()), *flat[places].tolist()]


def everything():
    """Every algorithm with every model and seed."""
    return {
        algorithm: {
            name: {str(seed): run(algorithm, name, seed) for seed in SEEDS} for name in MODELS
        }
        for algorithm in ALGORITHMS
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write and not FILE.exists():
        FILE.write_text(format_json(everything()) + "\n")


if __name__ == "__main__":
    main()
