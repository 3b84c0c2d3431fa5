"""How well fresh attackers infer race and sex from Adult's inputs, and from the true label alone.

These are bounds for any representation.

python -m benchmarks.adult_inputs --out papers/liang2020/results/adult-inputs.json
"""

import argparse
import json
from pathlib import Path

import numpy as np

from glocal.core.data import Examples
from glocal.datasets import SOURCES, load_dataset
from glocal.evaluate.leakage import AttackData, best_auc, train_attackers


def attack_auc(train: Examples, test: Examples, source: str, attribute: int) -> float:
    """The best attacker's AUC in percent: trained on the training half, tested on the test half."""
    halves = []
    for part in (train, test):
        inputs = part.x if source == "inputs" else part.y[:, None]
        halves.append(AttackData(inputs.double().numpy(), part.group[:, attribute].numpy()))
    return round(100 * best_auc(train_attackers(halves[0]), halves[1]), 1)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    train, test, *_ = load_dataset("adult")
    names = [*SOURCES["adult"].attributes]
    auc: dict[str, dict[str, float]] = {"inputs": {}, "label": {}}
    for source, by_attribute in auc.items():
        for column, name in enumerate(names):
            by_attribute[name] = attack_auc(train, test, source, column)
    majority = round(100 * float(np.bincount(test.y.numpy()).max()) / test.num_rows, 2)
    print(auc, majority)
    if options.out:
        command = f"python -m benchmarks.adult_inputs --out {options.out}"
        options.out.write_text(
            json.dumps({"command": command, "AUC, %": auc, "majority class, %": majority}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
