"""How predictions treat two groups of people: rates by group, and how far apart they are. Measured with fairlearn."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError

Labels = npt.NDArray[np.int64]


class Judged(NamedTuple):
    """Some people: their classes, the classes that were predicted, and a protected attribute, 0 or 1 (rows,) each."""

    y: Labels
    guess: Labels
    group: Labels


class Rates(NamedTuple):
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


class Treatment(NamedTuple):
    """Both groups, and the differences between them, from 0 to 1; None where one is not defined."""

    groups: list[Rates]
    demographic_parity_difference: float | None
    equalised_odds_difference: float | None


def require_fairlearn() -> None:
    """Refuse to begin without it."""
    try:
        import fairlearn.metrics  # noqa: F401
    except ImportError as error:
        raise InputError("audit: group metrics need fairlearn; install it with pip install 'glocal[fairness]'") from error


def treated(judged: Judged, *, classes: int = 2) -> Treatment:
    """How both groups are treated; with other than two classes there is accuracy only.

    >>> found = treated(Judged(np.array([0, 1, 0, 1]), np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1])))
    >>> found.demographic_parity_difference, found.equalised_odds_difference
    (0.5, 1.0)
    """
    from fairlearn.metrics import demographic_parity_difference, equalized_odds_difference

    groups = _by_group(judged, classes) if len(judged.y) else []
    selected = [rates.selection_rate for rates in groups]
    errors = [rate for rates in groups for rate in (rates.true_positive_rate, rates.false_positive_rate)]

    def apart(difference: Callable[..., float], rates: list[float | None]) -> float | None:
        defined = len(groups) == 2 and None not in rates
        return float(difference(judged.y, judged.guess, sensitive_features=_features(judged))) if defined else None

    return Treatment(groups, apart(demographic_parity_difference, selected), apart(equalized_odds_difference, errors))


def _by_group(judged: Judged, classes: int) -> list[Rates]:
    """The groups that have people, in ascending order."""
    from fairlearn.metrics import MetricFrame, count, false_positive_rate, selection_rate, true_positive_rate
    from sklearn.metrics import accuracy_score

    metrics = {"people": count, "accuracy": accuracy_score}
    if classes == 2:
        metrics |= {"selected": selection_rate, "found": true_positive_rate, "wronged": false_positive_rate}
    frame = MetricFrame(metrics=metrics, y_true=judged.y, y_pred=judged.guess, sensitive_features=_features(judged))
    found = {name: column.to_dict() for name, column in frame.by_group.items()}
    held = {group: {*judged.y[judged.group == group].tolist()} for group in found["people"]}

    def rate(name: str, group: int, needs: set[int]) -> float | None:
        # fairlearn has 0 for a rate of nobody
        return float(found[name][group]) if name in found and needs <= held[group] else None

    return [
        Rates(
            int(group),
            int(found["people"][group]),
            float(found["accuracy"][group]),
            rate("selected", group, set()),
            rate("found", group, {1}),
            rate("wronged", group, {0}),
        )
        for group in sorted(held)
    ]


def _features(judged: Judged) -> dict[str, Labels]:
    """The attribute as fairlearn takes it also where there is one person only."""
    return {"group": judged.group}
