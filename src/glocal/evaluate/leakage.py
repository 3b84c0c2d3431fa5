"""Attribute inference: fresh attackers, trained afterwards on frozen, noise-free representations.

The AUC of the training's own adversary is not enough: another attacker may infer what that
adversary cannot. So the best of several fresh attackers counts.
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
from glocal.core.metric_library import auc
from glocal.core.sampling import make_rng

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Scorer = Callable[[Floats], Floats]
_REPEATS = 200  # of the bootstrap


class AttackData(NamedTuple):
    """Some people's representations (rows, width) and protected attribute (rows,), 0 or 1."""

    h: Floats
    attribute: Labels


class LeakageEstimate(NamedTuple):
    """An attacker's ROC AUC with a 95 % interval (bootstrap over people); .5 is chance."""

    attacker: str
    auc: float
    low: float
    high: float


class AttackResult(NamedTuple):
    """An attacker's AUC, its bootstrap (repeats,), and the standard deviation of chance."""

    auc: float
    bootstrap: Floats
    chance_std: float


def attackers(seed: int) -> dict[str, Callable[[], Any]]:
    """Functions that make fresh attackers, by name: linear, trees, and a network.

    The network has no early stopping. With few people of a rare value, accuracy would stop it
    before it has learnt anything.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def logistic_regression() -> Any:
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))

    def gradient_boosting() -> Any:
        return HistGradientBoostingClassifier(max_leaf_nodes=15, random_state=seed)

    def mlp() -> Any:
        sizes, lr = (32, 32), 3e-3
        network = MLPClassifier(sizes, learning_rate_init=lr, max_iter=20, random_state=seed)
        return make_pipeline(StandardScaler(), network)

    return {
        "logistic regression": logistic_regression,
        "gradient boosting": gradient_boosting,
        "MLP": mlp,
    }


def train_attackers(train: AttackData, *, seed: int = 0) -> dict[str, Scorer]:
    """Trained attackers by name: functions from representations (rows, width) to scores (rows,).

    None of them if the attribute has one value only.
    """
    _check_attack_data(train, "the training data of an attacker")
    if not _has_both_values(train):
        return {}
    scorers: dict[str, Scorer] = {}
    with warnings.catch_warnings(), _one_thread():
        warnings.simplefilter("ignore")  # a network that has not converged is an attacker too
        for name, make in attackers(seed).items():
            scorers[name] = partial(_scores, make().fit(*train))
    return scorers


def estimate_leakage(
    train: AttackData, test: AttackData, *, seed: int = 0
) -> list[LeakageEstimate]:
    """Train all attackers on some people and test them on others.

    The list is empty if the attribute has one value only, in either group of people.
    """
    results = run_attacks(train_attackers(train, seed=seed), test, seed=seed)
    return [average_leakage(name, [result]) for name, result in results.items()]


def run_attacks(
    predictions: Mapping[str, Scorer], test: AttackData, *, seed: int = 0, client: int | None = None
) -> dict[str, AttackResult]:
    """The result of each trained attacker on these people, those of a client if it is given.

    There is no result if the attribute has one value only.
    """
    _check_attack_data(test, "the test data of an attacker")
    if not _has_both_values(test):
        return {}
    address = () if client is None else (client,)
    results: dict[str, AttackResult] = {}
    for name, scorer in predictions.items():
        generator = make_rng(seed, "bootstrap", *address)
        results[name] = _attack_result(scorer(test.h), test.attribute, generator)
    return results


def average_leakage(attacker: str, results: Sequence[AttackResult]) -> LeakageEstimate:
    """The mean AUC over clients and its interval; the bootstrap resamples people, not clients."""
    bootstrap = np.mean([result.bootstrap for result in results], axis=0)
    low, high = np.quantile(bootstrap, (0.025, 0.975))
    mean = fmean(result.auc for result in results)
    return LeakageEstimate(attacker, mean, float(low), float(high))


def beyond_chance(results: Sequence[AttackResult], *, comparisons: int) -> bool:
    """Whether the mean AUC over clients is above chance, with 95 % confidence.

    The level is corrected for the best of several comparisons (Bonferroni).
    """
    std = sqrt(sum(result.chance_std**2 for result in results)) / len(results)
    quantile = NormalDist().inv_cdf(1 - 0.05 / comparisons)
    return fmean(result.auc for result in results) > 0.5 + quantile * std


def best_auc(predictions: Mapping[str, Scorer], test: AttackData) -> float | None:
    """The best AUC of some attackers; None without attackers, or with one value only."""
    if not predictions or not _has_both_values(test):
        return None
    return max(auc(scorer(test.h), test.attribute) for scorer in predictions.values())


def strongest_attack(estimates: Sequence[LeakageEstimate]) -> LeakageEstimate | None:
    """The estimate with the highest AUC; None without any."""
    return max(estimates, key=lambda estimate: estimate.auc, default=None)


def _attack_result(scores: Floats, labels: Labels, generator: np.random.Generator) -> AttackResult:
    bootstrap = _bootstrap_auc(scores, labels, generator)
    return AttackResult(auc(scores, labels), bootstrap, _chance_std(labels))


def _has_both_values(data: AttackData) -> bool:
    return len({*data.attribute.tolist()}) > 1


def _scores(attacker: Any, h: Floats) -> Floats:
    with _one_thread():
        return np.asarray(attacker.predict_proba(h)[:, 1])


def _one_thread() -> AbstractContextManager[Any]:
    """One thread: so little work gains nothing from more, and on busy cores threads wait long."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1)
    return limits


def _check_attack_data(data: AttackData, what: str) -> None:
    if len(data.h) != len(data.attribute) or not {*data.attribute.tolist()} <= {0, 1}:
        raise InputError(f"leakage: {what} needs one attribute, 0 or 1, for every representation")


def _chance_std(labels: Labels) -> float:
    """The standard deviation of the AUC of scores independent of the labels.

    Mann and Whitney 1947.
    """
    rows, ones = len(labels), int(labels.sum())
    return sqrt((rows + 1) / (12 * ones * (rows - ones)))


def _bootstrap_auc(
    scores: npt.NDArray[np.floating[Any]], labels: Labels, generator: np.random.Generator
) -> Floats:
    """The AUC over resampled people, with the same number of either value (repeats,)."""
    zeros, ones = np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)
    aucs: list[float] = []
    for _ in range(_REPEATS):
        rows = np.concatenate([_resample(zeros, generator), _resample(ones, generator)])
        aucs.append(auc(scores[rows], labels[rows]))
    return np.array(aucs)


def _resample(rows: Labels, generator: np.random.Generator) -> Labels:
    """As many of these rows as there are, drawn with replacement."""
    return generator.choice(rows, len(rows))
