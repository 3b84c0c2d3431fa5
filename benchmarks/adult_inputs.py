"""What fresh attackers read of race and sex from Adult's inputs themselves, and from the true label alone: bounds for any code.

python -m benchmarks.adult_inputs --out docs/results/adult-inputs.json
"""

import argparse
import json
from pathlib import Path

import numpy as np

from glocal.core.data import Examples
from glocal.datasets import SOURCES, load
from glocal.evaluate.leakage import AttackData, best_auc, train_attackers


def read(train: Examples, test: Examples, what: str, attribute: int) -> float:
    """The AUC in percent of the best attacker that has learnt from the training half, on the test half."""
    told = [
        (part.x if what == "inputs" else part.y[:, None]).double().numpy() for part in (train, test)
    ]
    seen = [
        AttackData(h, part.group[:, attribute].numpy())
        for h, part in zip(told, (train, test), strict=True)
    ]
    return round(100 * best_auc(train_attackers(seen[0]), seen[1]), 1)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    train, test, *_ = load("adult")
    names = [*SOURCES["adult"].attributes]
    found = {
        what: {name: read(train, test, what, place) for place, name in enumerate(names)}
        for what in ("inputs", "label")
    }
    majority = round(100 * float(np.bincount(test.y.numpy()).max()) / len(test.y), 2)
    print(found, majority)
    if given.out:
        command = f"python -m benchmarks.adult_inputs --out {given.out}"
        given.out.write_text(
            json.dumps(
                {"command": command, "AUC, %": found, "majority class, %": majority}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
