"""Handwritten digits on three kinds of device under one shared head: full images, images of half the side, a small CNN.

Every device has a few images only. As in the paper, LG-FedAvg goes on from FedAvg: first the devices of each kind average whole
models among themselves, the later kinds under the head of the first, so that one head fits all encoders. From then on each device
keeps its own encoder; the head, which all of them train, is all that is sent.

python examples/kinds_mnist.py                        # MNIST, a minute or two on two cores
python examples/kinds_mnist.py --warm 0               # all from scratch, nothing but the head is ever sent
python examples/kinds_mnist.py --source digits        # the 8x8 digits that come with scikit-learn, in seconds
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from kinds_table import report, summed_up
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import glocal
from glocal.core.data import ClientData
from glocal.datasets.federated import FederatedData

FEATURES, CLASSES = 256, 10
OPTIMISER = glocal.sgd(0.05, momentum=0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="mnist", choices=["mnist", "digits"])
    parser.add_argument("--clients", type=int, default=10, help="of each kind")
    parser.add_argument("--images", type=int, default=30, help="on each device")
    parser.add_argument(
        "--warm", type=int, default=40, help="rounds of FedAvg within each kind; 0 for none"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of all kinds together")
    parser.add_argument("--seeds", type=int, default=1, help="how often everything is repeated")
    parser.add_argument("--out", type=Path, help="a .json file for the figures")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


def few_images(given: argparse.Namespace, seed: int) -> FederatedData:
    """So many images for each device of all kinds, dealt out at random; a fifth of them is for validation."""
    loaded = glocal.load(given.source)
    clients = 3 * given.clients
    chosen = glocal.make_rng(seed, "images").permutation(len(loaded.train.y))[
        : clients * given.images
    ]
    return glocal.partition(
        loaded._replace(train=loaded.train.take(chosen)),
        glocal.iid(clients),
        validation=0.2,
        seed=seed,
    )


def share(everybody: FederatedData, place: int, see: Callable[[Tensor], Tensor]) -> FederatedData:
    """One kind's third of the devices, and how they see the images."""

    def part(holdings: ClientData) -> ClientData:
        third = holdings.num_clients // 3
        return ClientData(
            seen[id(holdings.examples)], holdings.rows[place * third : (place + 1) * third]
        )

    parts = (everybody.train, everybody.val, everybody.test)
    seen = {id(each.examples): each.examples._replace(x=see(each.examples.x)) for each in parts}
    return FederatedData(*map(part, parts))


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
    """An encoder of its own, and the head: the last three layers of the paper's network for MNIST."""
    model = nn.Sequential()
    model.add_module("encoder", encoder)
    head = nn.Sequential(
        nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )
    model.add_module("head", head)
    return model


def together(model: nn.Module) -> glocal.Algorithm:
    split = glocal.Split.of(model, local="encoder")
    return glocal.lg_fedavg(glocal.cross_entropy(model), OPTIMISER, split=split)


def alone(model: nn.Module) -> glocal.Algorithm:
    return glocal.local_only(glocal.cross_entropy(model), OPTIMISER)


def kinds(
    given: argparse.Namespace, algorithm: Callable[[nn.Module], glocal.Algorithm], seed: int
) -> list[glocal.Kind]:
    """The same devices and first weights, whatever the algorithm."""
    torch.manual_seed(seed)
    everybody = few_images(given, seed)
    side = everybody.train.examples.x.shape[-1]
    half = lambda x: avg_pool2d(x, 2)  # noqa: E731
    parts = [
        (f"MLP-{side}x{side}", network(mlp(side**2)), share(everybody, 0, lambda x: x)),
        (f"MLP-{side // 2}x{side // 2}", network(mlp((side // 2) ** 2)), share(everybody, 1, half)),
        ("CNN", network(cnn(side)), share(everybody, 2, lambda x: x)),
    ]
    return [
        glocal.Kind(name, algorithm(model), model, federation) for name, model, federation in parts
    ]


def trained(
    given: argparse.Namespace, seed: int
) -> tuple[dict[str, glocal.Result], dict[str, glocal.Result]]:
    """All kinds together, and every device alone for as many rounds."""
    options = glocal.Options(engine=given.engine)
    plan = glocal.Plan(rounds=given.rounds, clients_per_round=3 * given.clients, seed=seed)
    ready = kinds(given, together, seed)
    if given.warm:
        ready = glocal.warm_kinds(
            ready,
            OPTIMISER,
            replace(plan, rounds=given.warm, clients_per_round=given.clients),
            options=options,
        )
    shared = glocal.fit_kinds(ready, replace(plan, first_round=given.warm), options=options)
    own = glocal.fit_kinds(
        kinds(given, alone, seed), replace(plan, rounds=given.warm + given.rounds), options=options
    )
    return shared, own


def main() -> None:
    given = arguments()
    pairs = [trained(given, seed) for seed in range(given.seeds)]
    rows = [
        summed_up(name, [(shared[name], own[name]) for shared, own in pairs])
        for name in pairs[0][0]
    ]
    report(rows, given.out)


if __name__ == "__main__":
    main()
