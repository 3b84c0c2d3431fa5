"""Handwritten digits on three groups of clients under one shared head.

The groups have full images, images of half the side, and a small CNN. Every client has a few images
only. As in the paper, LG-FedAvg starts from FedAvg: first the clients of each group average
whole models among themselves, the later groups under the head of the first, so that one head fits
all encoders. From then on each client keeps its own encoder; only the head is sent.

python examples/groups_mnist.py                  # MNIST, a minute or two on two cores
python examples/groups_mnist.py --warm 0         # from scratch, only the head is ever sent
python examples/groups_mnist.py --source digits  # the 8x8 digits of scikit-learn, in seconds
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from groups_table import Results, report, summarize, train_together
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import glocal
from glocal.core.data import ClientData
from glocal.datasets.federated import FederatedData

FEATURES, CLASSES = 256, 10
OPTIMIZER = glocal.SGD(lr=0.05, momentum=0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--clients", type=int, default=10, help="of each group")
    parser.add_argument("--images", type=int, default=30, help="on each client")
    parser.add_argument(
        "--warm", type=int, default=40, help="rounds of FedAvg within each group; 0 for none"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of all groups together")
    parser.add_argument("--seeds", type=int, default=1, help="how often everything is repeated")
    parser.add_argument("--out", type=Path, help="a .json file for the figures")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


def few_images(options: argparse.Namespace, seed: int) -> FederatedData:
    """A few images for each client of all groups, at random; a fifth of them is for validation."""
    dataset = glocal.load_dataset(options.source)
    clients = 3 * options.clients
    order = glocal.make_rng(seed, "images").permutation(dataset.train.num_rows)
    few = dataset._replace(train=dataset.train.take(order[: clients * options.images]))
    return glocal.FederatedData.partition(few, glocal.iid(clients), validation=0.2, seed=seed)


def third(
    data: FederatedData, number: int, preprocess: Callable[[Tensor], Tensor]
) -> FederatedData:
    """One group's third of the clients, with their images preprocessed."""
    splits = (data.train, data.val, data.test)
    stores = {id(split.examples): split.examples for split in splits}
    preprocessed = {
        name: examples._replace(x=preprocess(examples.x)) for name, examples in stores.items()
    }

    def own(split: ClientData) -> ClientData:
        size = split.num_clients // 3
        rows = split.rows[number * size : (number + 1) * size]
        return ClientData(preprocessed[id(split.examples)], rows)

    return FederatedData(*map(own, splits))


def mlp(pixels: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, FEATURES), nn.ReLU())


def cnn(side: int) -> nn.Module:
    filters = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(
        *filters, nn.Flatten(), nn.Linear(16 * (side // 4) ** 2, FEATURES), nn.ReLU()
    )


def network(encoder: nn.Module) -> nn.Module:
    """An encoder, and the head: the last three layers of the paper's network for MNIST."""
    model = nn.Sequential()
    model.add_module("encoder", encoder)
    head = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )
    model.add_module("head", head)
    return model


def together(model: nn.Module) -> glocal.Algorithm:
    task = glocal.classification(model)
    return glocal.LGFedAvg(task, optimizer=OPTIMIZER, local="encoder")


def alone(model: nn.Module) -> glocal.Algorithm:
    return glocal.LocalOnly(glocal.classification(model), optimizer=OPTIMIZER)


def groups_of(
    options: argparse.Namespace, algorithm: Callable[[nn.Module], glocal.Algorithm], seed: int
) -> list[glocal.Group]:
    """The same clients and initial weights, whatever the algorithm."""
    torch.manual_seed(seed)
    data = few_images(options, seed)
    side = data.train.examples.x.shape[-1]
    half = side // 2
    parts = [
        (f"MLP-{side}x{side}", network(mlp(side**2)), third(data, 0, unchanged)),
        (f"MLP-{half}x{half}", network(mlp(half**2)), third(data, 1, halved)),
        ("CNN", network(cnn(side)), third(data, 2, unchanged)),
    ]
    return [glocal.Group(algorithm(model), (own,), name) for name, model, own in parts]


def unchanged(images: Tensor) -> Tensor:
    return images


def halved(images: Tensor) -> Tensor:
    return avg_pool2d(images, 2)


def train(options: argparse.Namespace, seed: int) -> tuple[Results, Results]:
    """All groups together, and every client alone for as many rounds."""
    run = glocal.Options(engine=options.engine)
    plan = glocal.Plan(rounds=options.rounds, clients_per_round=3 * options.clients, seed=seed)
    start = groups_of(options, together, seed)
    if options.warm:
        warm_up = replace(plan, rounds=options.warm, clients_per_round=options.clients)
        start = glocal.warm_start_groups(start, OPTIMIZER, warm_up, options=run)
    shared = train_together(start, replace(plan, first_round=options.warm), run)
    whole = replace(plan, rounds=options.warm + options.rounds)
    return shared, train_together(groups_of(options, alone, seed), whole, run)


def main() -> None:
    options = arguments()
    pairs = [train(options, seed) for seed in range(options.seeds)]
    rows = []
    for name in pairs[0][0]:
        rows.append(summarize(name, [(shared[name], own[name]) for shared, own in pairs]))
    report(rows, options.out)


if __name__ == "__main__":
    main()
