"""How predictions treat two groups of people: rates by group, and how far apart they are. Measured with fairlearn."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError

Labels = npt.NDArray[np.int64]


class GroupPredictions(NamedTuple):
    """Some people: their classes, the classes that were predicted, and a protected attribute, 0 or 1 (rows,) each."""

    y: Labels
    prediction: Labels
    group: Labels


class GroupMetrics(NamedTuple):
    """One group: its people, the share that is predicted rightly, and the shares that are predicted to be of class 1.

    Those are of all (selection), of people of class 1 (true positive) and of class 0 (false positive); None where there are no such
    people, or other classes than these two.
    """

    group: int
    people: int
    accuracy: float
    selection_rate: float | None
    true_positive_rate: float | None
    false_positive_rate: float | None


class FairnessMetrics(NamedTuple):
    """Both groups, and the differences between them, from 0 to 1; None where one is not defined."""

    groups: list[GroupMetrics]
    demographic_parity_difference: float | None
    equalized_odds_difference: float | None


def require_fairlearn() -> None:
    """Refuse to begin without it."""
    try:
        import fairlearn.metrics  # noqa: F401
    except ImportError as error:
        raise InputError(
            "audit: group metrics need fairlearn; install it with pip install 'glocal[fairness]'"
        ) from error


def fairness_metrics(predictions: GroupPredictions, *, classes: int = 2) -> FairnessMetrics:
    """How both groups are treated; with other than two classes there is accuracy only.

    >>> found = fairness_metrics(GroupPredictions(np.array([0, 1, 0, 1]), np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1])))
    >>> found.demographic_parity_difference, found.equalized_odds_difference
    (0.5, 1.0)
    """
    from fairlearn.metrics import demographic_parity_difference, equalized_odds_difference

    groups = _by_group(predictions, classes) if len(predictions.y) else []
    selected = [rates.selection_rate for rates in groups]
    errors = [
        rate for rates in groups for rate in (rates.true_positive_rate, rates.false_positive_rate)
    ]

    def apart(difference: Callable[..., float], rates: list[float | None]) -> float | None:
        defined = len(groups) == 2 and None not in rates
        return (
            float(
                difference(
                    predictions.y, predictions.prediction, sensitive_features=_features(predictions)
                )
            )
            if defined
            else None
        )

    return FairnessMetrics(
        groups,
        apart(demographic_parity_difference, selected),
        apart(equalized_odds_difference, errors),
    )


def _by_group(predictions: GroupPredictions, classes: int) -> list[GroupMetrics]:
    """The groups that have people, in ascending order."""
    from fairlearn.metrics import (
        MetricFrame,
        count,
        false_positive_rate,
        selection_rate,
        true_positive_rate,
    )
    from sklearn.metrics import accuracy_score

    metrics = {"people": count, "accuracy": accuracy_score}
    if classes == 2:
        metrics |= {
            "selected": selection_rate,
            "found": true_positive_rate,
            "wronged": false_positive_rate,
        }
    frame = MetricFrame(
        metrics=metrics,
        y_true=predictions.y,
        y_pred=predictions.prediction,
        sensitive_features=_features(predictions),
    )
    found = {name: column.to_dict() for name, column in frame.by_group.items()}
    held = {
        group: {*predictions.y[predictions.group == group].tolist()} for group in found["people"]
    }

    def rate(name: str, group: int, needs: set[int]) -> float | None:
        # fairlearn has 0 for a rate of nobody
        return float(found[name][group]) if name in found and needs <= held[group] else None

    return [
        GroupMetrics(
            int(group),
            int(found["people"][group]),
            float(found["accuracy"][group]),
            rate("selected", group, set()),
            rate("found", group, {1}),
            rate("wronged", group, {0}),
        )
        for group in sorted(held)
    ]


def _features(predictions: GroupPredictions) -> dict[str, Labels]:
    """The attribute as fairlearn takes it also where there is one person only."""
    return {"group": predictions.group}
