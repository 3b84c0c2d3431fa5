"""Hospitals that measure different columns, under one shared head: breast-cancer data.

The data come with scikit-learn. Of each of ten properties of cell nuclei there are the mean, the
error and the worst value. One group of hospitals has all thirty columns, one has no errors, one no
worst values. As in the paper, LG-FedAvg starts from FedAvg, here within each group; from then on
every hospital keeps its own encoder, and only the head is sent. A hospital has about nineteen
patients, so one partition says little: the table is the mean over several.

python examples/groups_tabular.py
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from groups_table import Results, report, summarize, train_together
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
OPTIMIZER = glocal.SGD(lr=0.1, momentum=0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hospitals", type=int, default=10, help="of each group")
    parser.add_argument(
        "--warm", type=int, default=30, help="rounds of FedAvg within each group; 0 for none"
    )
    parser.add_argument("--rounds", type=int, default=10, help="rounds of all groups together")
    parser.add_argument("--partitions", type=int, default=10, help="of the patients, one a seed")
    parser.add_argument("--out", type=Path, help="a .json file for the figures")
    parser.add_argument("--engine", default="auto")
    return parser.parse_args()


def network(start: Tensor, columns: Sequence[int]) -> nn.Module:
    """An encoder that normalises its columns first, and the head; shared columns start the same."""
    layer = nn.Linear(len(columns), FEATURES)
    with torch.no_grad():
        layer.weight.copy_(start[:, columns] * (start.shape[1] / len(columns)) ** 0.5)
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.BatchNorm1d(len(columns)), layer, nn.ReLU()))
    model.add_module("head", nn.Linear(FEATURES, CLASSES))
    return model


def together(model: nn.Module) -> glocal.Algorithm:
    task = glocal.classification(model)
    return glocal.LGFedAvg(task, optimizer=OPTIMIZER, local="encoder")


def alone(model: nn.Module) -> glocal.Algorithm:
    return glocal.LocalOnly(glocal.classification(model), optimizer=OPTIMIZER)


def groups_of(
    algorithm: Callable[[nn.Module], glocal.Algorithm], *, hospitals: int, seed: int
) -> list[glocal.Group]:
    """The same hospitals, patients and initial weights, whatever the algorithm; half are tests."""
    torch.manual_seed(seed)
    start = nn.Linear(30, FEATURES).weight.detach()
    x, y = load_breast_cancer(return_X_y=True)
    patients = np.array_split(
        glocal.make_rng(seed, "patients").permutation(len(y)), len(COLUMNS) * hospitals
    )
    result = []
    for number, (name, columns) in enumerate(COLUMNS.items()):
        own = patients[number * hospitals : (number + 1) * hospitals]
        pairs = [(x[rows][:, columns], y[rows]) for rows in own]
        data = glocal.FederatedData.from_tensors(pairs, test=0.5, validation=0.2, seed=seed)
        model = network(start, columns)
        result.append(glocal.Group(algorithm(model), (data,), name))
    return result


def train(options: argparse.Namespace, seed: int) -> tuple[Results, Results]:
    """All groups together, and every hospital alone for as many rounds."""
    run = glocal.Options(engine=options.engine)
    everybody = len(COLUMNS) * options.hospitals
    plan = glocal.Plan(rounds=options.rounds, clients_per_round=everybody, seed=seed)
    start = groups_of(together, hospitals=options.hospitals, seed=seed)
    own = groups_of(alone, hospitals=options.hospitals, seed=seed)
    if options.warm:
        warm_up = replace(plan, rounds=options.warm, clients_per_round=options.hospitals)
        start = glocal.warm_start_groups(start, OPTIMIZER, warm_up, options=run)
    shared = train_together(start, replace(plan, first_round=options.warm), run)
    whole = replace(plan, rounds=options.warm + options.rounds)
    return shared, train_together(own, whole, run)


def main() -> None:
    options = arguments()
    pairs = [train(options, seed) for seed in range(options.partitions)]
    rows = []
    for name in COLUMNS:
        rows.append(summarize(name, [(shared[name], own[name]) for shared, own in pairs]))
    report(rows, options.out)


if __name__ == "__main__":
    main()
