"""Group fairness: rates of two groups of people and the differences between them, by fairlearn."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError

Labels = npt.NDArray[np.int64]


class GroupPredictions(NamedTuple):
    """Some people's classes, predicted classes, and protected attribute, 0 or 1; each (rows,)."""

    y: Labels
    prediction: Labels
    group: Labels


class GroupMetrics(NamedTuple):
    """One group: its number of people, its accuracy, and its shares of people predicted as class 1.

    The shares are of all (selection), of class 1 (true positive) and of class 0 (false positive).
    A share is None without such people, or with other than two classes.
    """

    group: int
    people: int
    accuracy: float
    selection_rate: float | None
    true_positive_rate: float | None
    false_positive_rate: float | None


class FairnessMetrics(NamedTuple):
    """Both groups and the differences between them, from 0 to 1; None for one that is undefined."""

    groups: list[GroupMetrics]
    demographic_parity_difference: float | None
    equalized_odds_difference: float | None


def require_fairlearn() -> None:
    """Refuse to start without fairlearn."""
    try:
        import fairlearn.metrics  # noqa: F401
    except ImportError as error:
        raise InputError(
            "audit: group metrics need fairlearn; install it with pip install 'glocal[fairness]'"
        ) from error


def fairness_metrics(predictions: GroupPredictions, *, classes: int = 2) -> FairnessMetrics:
    """Metrics of both groups; with other than two classes accuracy only.

    >>> y, group = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    >>> metrics = fairness_metrics(GroupPredictions(y, np.array([0, 1, 1, 1]), group))
    >>> metrics.demographic_parity_difference, metrics.equalized_odds_difference
    (0.5, 1.0)
    """
    from fairlearn.metrics import demographic_parity_difference, equalized_odds_difference

    groups = _by_group(predictions, classes) if len(predictions.y) else []
    selected = [group.selection_rate for group in groups]
    return FairnessMetrics(
        groups,
        _difference(demographic_parity_difference, predictions, selected, len(groups)),
        _difference(equalized_odds_difference, predictions, _error_rates(groups), len(groups)),
    )


def _error_rates(groups: list[GroupMetrics]) -> list[float | None]:
    rates: list[float | None] = []
    for group in groups:
        rates += [group.true_positive_rate, group.false_positive_rate]
    return rates


def _difference(
    difference: Callable[..., float],
    predictions: GroupPredictions,
    rates: list[float | None],
    groups: int,
) -> float | None:
    """A difference between two groups; None unless all of its rates are defined."""
    if groups != 2 or None in rates:
        return None
    features = _features(predictions)
    return float(difference(predictions.y, predictions.prediction, sensitive_features=features))


def _by_group(predictions: GroupPredictions, classes: int) -> list[GroupMetrics]:
    """The metrics of the groups that have people, in ascending order."""
    rows = _metric_frame(predictions, classes).by_group.to_dict("index")
    return [_group_metrics(predictions, group, rows[group]) for group in sorted(rows)]


def _metric_frame(predictions: GroupPredictions, classes: int) -> Any:
    """fairlearn's table of metrics, a row per group."""
    from fairlearn.metrics import MetricFrame

    return MetricFrame(
        metrics=_metric_functions(classes),
        y_true=predictions.y,
        y_pred=predictions.prediction,
        sensitive_features=_features(predictions),
    )


def _metric_functions(classes: int) -> dict[str, Callable[..., float]]:
    from fairlearn import metrics
    from sklearn.metrics import accuracy_score

    functions = {"people": metrics.count, "accuracy": accuracy_score}
    if classes == 2:
        functions["selection"] = metrics.selection_rate
        functions["true_positive"] = metrics.true_positive_rate
        functions["false_positive"] = metrics.false_positive_rate
    return functions


def _group_metrics(
    predictions: GroupPredictions, group: int, row: dict[str, float]
) -> GroupMetrics:
    """One row of the table; without such people fairlearn's rate is 0, and here None."""
    present = {*predictions.y[predictions.group == group].tolist()}
    true_positive = row.get("true_positive") if 1 in present else None
    false_positive = row.get("false_positive") if 0 in present else None
    return GroupMetrics(
        int(group),
        int(row["people"]),
        float(row["accuracy"]),
        _as_float(row.get("selection")),
        _as_float(true_positive),
        _as_float(false_positive),
    )


def _as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _features(predictions: GroupPredictions) -> dict[str, Labels]:
    """The attribute in the form that fairlearn accepts for a single person too."""
    return {"group": predictions.group}
