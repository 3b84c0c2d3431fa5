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
from glocal.core.sampling import stream

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


class Reading(NamedTuple):
    """An attacker's AUC on some people and on the same people drawn anew (repeats,), and the deviation of a guesser's AUC."""

    auc: float
    drawn: Floats
    chance: float


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
        "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "gradient boosting": lambda: HistGradientBoostingClassifier(max_leaf_nodes=15, random_state=seed),
        "MLP": lambda: make_pipeline(
            StandardScaler(), MLPClassifier((32, 32), learning_rate_init=3e-3, max_iter=20, random_state=seed)
        ),
    }


def fresh(learnt_from: Seen, *, seed: int = 0) -> dict[str, Guess]:
    """Every attacker, trained on some people: from representations (rows, width) to scores (rows,); none without both values."""
    _require(learnt_from, "learns from")
    if len({*learnt_from.attribute.tolist()}) < 2:
        return {}
    with warnings.catch_warnings(), _one_thread():
        warnings.simplefilter("ignore")  # a network that has not converged is an attacker all the same
        fitted = {name: make().fit(*learnt_from) for name, make in attackers(seed).items()}
    return {name: partial(_scores, attacker) for name, attacker in fitted.items()}


def leaks(learnt_from: Seen, tested_on: Seen, *, seed: int = 0) -> list[Leak]:
    """Every attacker, trained on some people and tested on others; none where either group lacks one value of the attribute."""
    found = readings(fresh(learnt_from, seed=seed), tested_on, seed=seed)
    return [averaged(name, [reading]) for name, reading in found.items()]


def readings(guesses: Mapping[str, Guess], tested_on: Seen, *, seed: int = 0, device: int | None = None) -> dict[str, Reading]:
    """What each of some attackers reads from these people, those of a device if it is given; none where nothing can be told."""
    _require(tested_on, "is tested on")
    if len({*tested_on.attribute.tolist()}) < 2:
        return {}
    labels, address = tested_on.attribute, () if device is None else (device,)
    chance = _chance(int(labels.sum()), len(labels))
    scores = {name: guess(tested_on.h) for name, guess in guesses.items()}
    return {
        name: Reading(auc(score, labels), _drawn(score, labels, stream(seed, "bootstrap", *address)), chance)
        for name, score in scores.items()
    }


def averaged(attacker: str, found: Sequence[Reading]) -> Leak:
    """The mean over devices, with the interval of that mean: the people of each are drawn anew, the devices stay."""
    drawn = np.mean([reading.drawn for reading in found], axis=0)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Leak(attacker, fmean(reading.auc for reading in found), float(low), float(high))


def beyond_chance(found: Sequence[Reading], *, tries: int) -> bool:
    """Whether the mean over devices is too high for a guesser, with 95 % confidence for the best of so many tries (Bonferroni)."""
    deviation = sqrt(sum(reading.chance**2 for reading in found)) / len(found)
    return fmean(reading.auc for reading in found) > 0.5 + NormalDist().inv_cdf(1 - 0.05 / tries) * deviation


def best_auc(guesses: Mapping[str, Guess], tested_on: Seen) -> float | None:
    """What the best of some attackers reads from these people; None where nothing can be told."""
    if not guesses or len({*tested_on.attribute.tolist()}) < 2:
        return None
    return max(auc(guess(tested_on.h), tested_on.attribute) for guess in guesses.values())


def _scores(attacker: Any, h: Floats) -> Floats:
    with _one_thread():
        return np.asarray(attacker.predict_proba(h)[:, 1])


def _one_thread() -> AbstractContextManager[Any]:
    """So little work gains nothing from more threads; where the cores are busy, these would wait for each other without end."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits


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


def _chance(ones: int, rows: int) -> float:
    """The standard deviation of the AUC of scores that have nothing to do with the labels (Mann and Whitney 1947)."""
    return sqrt((rows + 1) / (12 * ones * (rows - ones)))


def _drawn(scores: npt.NDArray[np.floating[Any]], labels: Labels, generator: np.random.Generator) -> Floats:
    """The AUC over people drawn anew, as many of either value as there are (repeats,)."""
    sides, found = [np.flatnonzero(labels == value) for value in (0, 1)], []
    for _ in range(_REPEATS):
        rows = np.concatenate([generator.choice(side, len(side)) for side in sides])
        found.append(auc(scores[rows], labels[rows]))
    return np.array(found)
