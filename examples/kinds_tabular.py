"""Hospitals that measure different columns, under one shared head: the breast-cancer data that come with scikit-learn.

Of each of ten properties of cell nuclei there are the mean, the error and the worst value. One kind of hospital has all thirty
columns, one has no errors, one no worst values. As in the paper, LG-FedAvg goes on from FedAvg, here within each kind; from then
on every hospital keeps its own encoder, and only the head is sent. A hospital has about nineteen patients, so one dealing says
little: the table is the mean over several.

python examples/kinds_tabular.py
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from kinds_table import report, summed_up
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import glocal

MEANS, ERRORS, WORST = range(10), range(10, 20), range(20, 30)
COLUMNS = {
    "all": [*MEANS, *ERRORS, *WORST],
    "no-errors": [*MEANS, *WORST],
    "no-worst": [*MEANS, *ERRORS],
}
FEATURES, CLASSES = 16, 2
OPTIMISER = glocal.sgd(0.1, momentum=0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hospitals", type=int, default=10, help="of each kind")
    parser.add_argument(
        "--warm", type=int, default=30, help="rounds of FedAvg within each kind; 0 for none"
    )
    parser.add_argument("--rounds", type=int, default=10, help="rounds of all kinds together")
    parser.add_argument(
        "--dealings", type=int, default=10, help="how often patients are dealt out anew"
    )
    parser.add_argument("--out", type=Path, help="a .json file for the figures")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


def network(start: Tensor, columns: Sequence[int]) -> nn.Module:
    """An encoder of the given columns, which learns their units first; and the head. What kinds have in common starts the same."""
    layer = nn.Linear(len(columns), FEATURES)
    with torch.no_grad():
        layer.weight.copy_(start[:, columns] * (start.shape[1] / len(columns)) ** 0.5)
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.BatchNorm1d(len(columns)), layer, nn.ReLU()))
    model.add_module("head", nn.Linear(FEATURES, CLASSES))
    return model


def together(model: nn.Module) -> glocal.Algorithm:
    return glocal.lg_fedavg(
        glocal.cross_entropy(model), OPTIMISER, split=glocal.Split.of(model, local="encoder")
    )


def alone(model: nn.Module) -> glocal.Algorithm:
    return glocal.local_only(glocal.cross_entropy(model), OPTIMISER)


def kinds(
    algorithm: Callable[[nn.Module], glocal.Algorithm], *, hospitals: int, seed: int
) -> list[glocal.Kind]:
    """The same hospitals, patients and first weights, whatever the algorithm; half of the patients are for the test."""
    torch.manual_seed(seed)
    start = nn.Linear(30, FEATURES).weight.detach()
    x, y = load_breast_cancer(return_X_y=True)
    patients = np.array_split(
        glocal.make_rng(seed, "patients").permutation(len(y)), len(COLUMNS) * hospitals
    )
    made = []
    for place, (name, columns) in enumerate(COLUMNS.items()):
        own = patients[place * hospitals : (place + 1) * hospitals]
        federation = glocal.from_tensors(
            [(x[rows][:, columns], y[rows]) for rows in own], test=0.5, validation=0.2, seed=seed
        )
        model = network(start, columns)
        made.append(glocal.Kind(name, algorithm(model), model, federation))
    return made


def trained(
    given: argparse.Namespace, seed: int
) -> tuple[dict[str, glocal.Result], dict[str, glocal.Result]]:
    """All kinds together, and every hospital alone for as many rounds."""
    options = glocal.Options(engine=given.engine)
    plan = glocal.Plan(
        rounds=given.rounds, clients_per_round=len(COLUMNS) * given.hospitals, seed=seed
    )
    ready, own = (kinds(way, hospitals=given.hospitals, seed=seed) for way in (together, alone))
    if given.warm:
        ready = glocal.warm_kinds(
            ready,
            OPTIMISER,
            replace(plan, rounds=given.warm, clients_per_round=given.hospitals),
            options=options,
        )
    shared = glocal.fit_kinds(ready, replace(plan, first_round=given.warm), options=options)
    return shared, glocal.fit_kinds(
        own, replace(plan, rounds=given.warm + given.rounds), options=options
    )


def main() -> None:
    given = arguments()
    pairs = [trained(given, seed) for seed in range(given.dealings)]
    rows = [
        summed_up(name, [(shared[name], own[name]) for shared, own in pairs]) for name in COLUMNS
    ]
    report(rows, given.out)


if __name__ == "__main__":
    main()
