"""Measures of a study whose classes have an order, and its baselines, on the very splits that its cases have."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.datasets.federated import Federation
from glocal.evaluate import guesses
from glocal.evaluate.bag_of_words import baselines
from glocal.evaluate.ordinal import judged, one_class_devices
from glocal.federate.fitting import Case, Options, evaluation_of
from glocal.federate.result import Result


@dataclass(frozen=True)
class OrdinalSettings:
    """Also the mean absolute error; all once more without devices of which a share `one_class` of examples is of one class.

    With `bag_of_words`, what the most frequent class and logistic regression on texts come to stands beside the cases.
    """

    one_class: float = 0.95
    bag_of_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.one_class <= 1:
            raise InputError(f"ordinal: one_class is {self.one_class}; a share above 0 and up to 1 was expected")


def require_ordinal(settings: OrdinalSettings, federation: Federation) -> None:
    """Refuse bags of words of what are no texts."""
    if settings.bag_of_words:
        federation.train.words.sum()


def measured(case: Case, results: Sequence[Result], options: Options, settings: OrdinalSettings) -> list[Json]:
    """For each seed of a case, how right and how far off its devices' models are on their own test data."""
    with closing(evaluation_of(case, options)) as evaluation:
        told = []
        for result, fed in zip(results, case.federations, strict=True):
            alike = one_class_devices(fed, settings.one_class)
            said = judged(guesses(evaluation, result.state, fed.test), fed.test, alike)
            told.append({**said._asdict(), "one_class_devices": len(alike)})
        return told


def compared(federation: Federation, settings: OrdinalSettings) -> dict[str, Json]:
    """Every baseline's figures on one deal of the data."""
    alike, found = one_class_devices(federation, settings.one_class), {}
    for name, (val, test) in baselines(federation).items():
        chosen = judged(val, federation.val, alike).accuracy
        found[name] = {"ordinal": judged(test, federation.test, alike)._asdict(), "validation": {"mean": None, "pooled": chosen}}
    return found
