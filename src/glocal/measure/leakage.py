"""What can be read from a representation: fresh attackers, trained afterwards on frozen, noise-free representations.

An adversary that was trained along says little: what hides from it may be plain to another. The best of several fresh ones counts.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.errors import InputError
from glocal.sampling import stream

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Guess = Callable[[Floats], Floats]
_REPEATS = 200  # of the bootstrap


class Seen(NamedTuple):
    """What an attacker sees of some people: representations (rows, width) and a protected attribute (rows,), 0 or 1."""

    h: Floats
    attribute: Labels


class Leak(NamedTuple):
    """How well an attacker reads the attribute: ROC AUC with a 95 % interval (bootstrap over people); .5 is nothing."""

    attacker: str
    auc: float
    low: float
    high: float


def attackers(seed: int) -> dict[str, Callable[[], Any]]:
    """Fresh attackers by name: linear, trees, and a network."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "gradient boosting": lambda: HistGradientBoostingClassifier(max_iter=100, random_state=seed),
        "MLP": lambda: make_pipeline(
            StandardScaler(), MLPClassifier((32, 32), max_iter=60, early_stopping=True, random_state=seed)
        ),
    }


def fresh(learnt_from: Seen, *, seed: int = 0) -> dict[str, Guess]:
    """Every attacker, trained on some people: from representations (rows, width) to scores (rows,); none without both values."""
    _require(learnt_from, "learns from")
    if len({*learnt_from.attribute.tolist()}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a network that has not converged is an attacker all the same
        fitted = {name: make().fit(*learnt_from) for name, make in attackers(seed).items()}
    return {name: partial(_scores, attacker) for name, attacker in fitted.items()}


def leaks(learnt_from: Seen, tested_on: Seen, *, seed: int = 0) -> list[Leak]:
    """Every attacker, trained on some people and tested on others; none where either group lacks one value of the attribute."""
    _require(tested_on, "is tested on")
    if len({*tested_on.attribute.tolist()}) < 2:
        return []
    found = []
    for name, guess in fresh(learnt_from, seed=seed).items():
        scores = guess(tested_on.h)
        found.append(Leak(name, auc(scores, tested_on.attribute), *_interval(scores, tested_on.attribute, seed)))
    return found


def best_auc(guesses: Mapping[str, Guess], tested_on: Seen) -> float | None:
    """What the best of some attackers reads from these people; None where nothing can be told."""
    if not guesses or len({*tested_on.attribute.tolist()}) < 2:
        return None
    return max(auc(guess(tested_on.h), tested_on.attribute) for guess in guesses.values())


def _scores(attacker: Any, h: Floats) -> Floats:
    return np.asarray(attacker.predict_proba(h)[:, 1])


def _require(seen: Seen, who: str) -> None:
    if len(seen.h) != len(seen.attribute) or not {*seen.attribute.tolist()} <= {0, 1}:
        raise InputError(f"leakage: what an attacker {who} needs one attribute, 0 or 1, for every representation")


def worst(found: Sequence[Leak]) -> Leak | None:
    """The attacker that reads most; None if there was none."""
    return max(found, key=lambda leak: leak.auc, default=None)


def auc(scores: npt.NDArray[np.floating[Any]], labels: Labels) -> float:
    """Area under the ROC curve: how often a 1 has a higher score than a 0, ties counting half.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    from scipy.stats import rankdata

    ones = int(labels.sum())
    above = float(rankdata(scores)[labels == 1].sum()) - ones * (ones + 1) / 2
    return above / (ones * (len(labels) - ones))


def _interval(scores: npt.NDArray[np.floating[Any]], labels: Labels, seed: int) -> tuple[float, float]:
    """Where the AUC lies with 95 % confidence, over people drawn anew, as many of either value as there are."""
    generator, sides = stream(seed, "bootstrap"), [np.flatnonzero(labels == value) for value in (0, 1)]
    drawn = []
    for _ in range(_REPEATS):
        rows = np.concatenate([generator.choice(side, len(side)) for side in sides])
        drawn.append(auc(scores[rows], labels[rows]))
    return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))
