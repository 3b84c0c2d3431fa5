"""What can be read from a representation: fresh attackers, trained afterwards on frozen, noise-free representations.

An adversary that was trained along says little: what hides from it may be plain to another. The best of several fresh ones counts.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import sqrt
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError
from glocal.core.sampling import make_rng

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Scorer = Callable[[Floats], Floats]
_REPEATS = 200  # of the bootstrap


class AttackData(NamedTuple):
    """What an attacker sees of some people: representations (rows, width) and a protected attribute (rows,), 0 or 1."""

    h: Floats
    attribute: Labels


class LeakageEstimate(NamedTuple):
    """How well an attacker reads the attribute: ROC AUC with a 95 % interval (bootstrap over people); .5 is nothing."""

    attacker: str
    auc: float
    low: float
    high: float


class AttackResult(NamedTuple):
    """An attacker's AUC on some people and on the same people drawn anew (repeats,), and the deviation of a guesser's AUC."""

    auc: float
    bootstrap: Floats
    chance_std: float


def attackers(seed: int) -> dict[str, Callable[[], Any]]:
    """Fresh attackers by name: linear, trees, and a network.

    The network never stops early: by its accuracy on few people of a rare value it would stop before it has learnt anything.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "logistic regression": lambda: make_pipeline(
            StandardScaler(), LogisticRegression(max_iter=1000)
        ),
        "gradient boosting": lambda: HistGradientBoostingClassifier(
            max_leaf_nodes=15, random_state=seed
        ),
        "MLP": lambda: make_pipeline(
            StandardScaler(),
            MLPClassifier((32, 32), learning_rate_init=3e-3, max_iter=20, random_state=seed),
        ),
    }


def train_attackers(train: AttackData, *, seed: int = 0) -> dict[str, Scorer]:
    """Every attacker, trained on some people: from representations (rows, width) to scores (rows,); none without both values."""
    _check_attack_data(train, "learns from")
    if len({*train.attribute.tolist()}) < 2:
        return {}
    with warnings.catch_warnings(), _one_thread():
        warnings.simplefilter(
            "ignore"
        )  # a network that has not converged is an attacker all the same
        fitted = {name: make().fit(*train) for name, make in attackers(seed).items()}
    return {name: partial(_scores, attacker) for name, attacker in fitted.items()}


def estimate_leakage(
    train: AttackData, test: AttackData, *, seed: int = 0
) -> list[LeakageEstimate]:
    """Every attacker, trained on some people and tested on others; none where either group lacks one value of the attribute."""
    found = run_attacks(train_attackers(train, seed=seed), test, seed=seed)
    return [average_leakage(name, [reading]) for name, reading in found.items()]


def run_attacks(
    predictions: Mapping[str, Scorer], test: AttackData, *, seed: int = 0, client: int | None = None
) -> dict[str, AttackResult]:
    """What each of some attackers reads from these people, those of a device if it is given; none where nothing can be told."""
    _check_attack_data(test, "is tested on")
    if len({*test.attribute.tolist()}) < 2:
        return {}
    labels, address = test.attribute, () if client is None else (client,)
    chance_std = _chance_std(int(labels.sum()), len(labels))
    scores = {name: guess(test.h) for name, guess in predictions.items()}
    return {
        name: AttackResult(
            auc(score, labels),
            _bootstrap_auc(score, labels, make_rng(seed, "bootstrap", *address)),
            chance_std,
        )
        for name, score in scores.items()
    }


def average_leakage(attacker: str, found: Sequence[AttackResult]) -> LeakageEstimate:
    """The mean over devices, with the interval of that mean: the people of each are drawn anew, the devices stay."""
    bootstrap = np.mean([reading.bootstrap for reading in found], axis=0)
    low, high = np.quantile(bootstrap, (0.025, 0.975))
    return LeakageEstimate(
        attacker, fmean(reading.auc for reading in found), float(low), float(high)
    )


def beyond_chance(found: Sequence[AttackResult], *, comparisons: int) -> bool:
    """Whether the mean over devices is too high for a guesser, with 95 % confidence for the best of so many tries (Bonferroni)."""
    deviation = sqrt(sum(reading.chance_std**2 for reading in found)) / len(found)
    return (
        fmean(reading.auc for reading in found)
        > 0.5 + NormalDist().inv_cdf(1 - 0.05 / comparisons) * deviation
    )


def best_auc(predictions: Mapping[str, Scorer], test: AttackData) -> float | None:
    """What the best of some attackers reads from these people; None where nothing can be told."""
    if not predictions or len({*test.attribute.tolist()}) < 2:
        return None
    return max(auc(guess(test.h), test.attribute) for guess in predictions.values())


def _scores(attacker: Any, h: Floats) -> Floats:
    with _one_thread():
        return np.asarray(attacker.predict_proba(h)[:, 1])


def _one_thread() -> AbstractContextManager[Any]:
    """So little work gains nothing from more threads; where the cores are busy, these would wait for each other without end."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits


def _check_attack_data(data: AttackData, who: str) -> None:
    if len(data.h) != len(data.attribute) or not {*data.attribute.tolist()} <= {0, 1}:
        raise InputError(
            f"leakage: what an attacker {who} needs one attribute, 0 or 1, for every representation"
        )


def strongest_attack(found: Sequence[LeakageEstimate]) -> LeakageEstimate | None:
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


def _chance_std(ones: int, rows: int) -> float:
    """The standard deviation of the AUC of scores that have nothing to do with the labels (Mann and Whitney 1947)."""
    return sqrt((rows + 1) / (12 * ones * (rows - ones)))


def _bootstrap_auc(
    scores: npt.NDArray[np.floating[Any]], labels: Labels, generator: np.random.Generator
) -> Floats:
    """The AUC over people drawn anew, as many of either value as there are (repeats,)."""
    sides, found = [np.flatnonzero(labels == value) for value in (0, 1)], []
    for _ in range(_REPEATS):
        rows = np.concatenate([generator.choice(side, len(side)) for side in sides])
        found.append(auc(scores[rows], labels[rows]))
    return np.array(found)
