"""Measures of a study whose classes have an order, and its baselines, on the very splits that its cases have."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.datasets.federated import FederatedData
from glocal.evaluate import predict_classes
from glocal.evaluate.ordinal import one_class_clients, ordinal_metrics
from glocal.evaluate.text_baselines import baselines
from glocal.federate.fitting import Case, Options, build_evaluation
from glocal.federate.result import Result


@dataclass(frozen=True)
class OrdinalSettings:
    """Also the mean absolute error; all once more without devices of which a share `one_class_fraction` of examples is of one class.

    With `bag_of_words`, what the most frequent class and logistic regression on texts come to stands beside the cases.
    """

    one_class_fraction: float = 0.95
    bag_of_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.one_class_fraction <= 1:
            raise InputError(
                f"ordinal: one_class is {self.one_class_fraction}; a share above 0 and up to 1 was expected"
            )


def require_ordinal(settings: OrdinalSettings, federation: FederatedData) -> None:
    """Refuse bags of words of what are no texts."""
    if settings.bag_of_words:
        federation.train.text_lengths.sum()


def measure_ordinal(
    experiment: Case, results: Sequence[Result], options: Options, settings: OrdinalSettings
) -> list[Json]:
    """For each seed of a case, how right and how far off its devices' models are on their own test data."""
    with closing(build_evaluation(experiment, options)) as evaluation:
        told = []
        for result, fed in zip(results, experiment.federations, strict=True):
            alike = one_class_clients(fed, settings.one_class_fraction)
            said = ordinal_metrics(
                predict_classes(evaluation, result.state, fed.test), fed.test, alike
            )
            told.append({**said._asdict(), "one_class_clients": len(alike)})
        return told


def baseline_metrics(federation: FederatedData, settings: OrdinalSettings) -> dict[str, Json]:
    """Every baseline's figures on one deal of the data."""
    alike, found = one_class_clients(federation, settings.one_class_fraction), {}
    for name, (val, test) in baselines(federation).items():
        chosen = ordinal_metrics(val, federation.val, alike).accuracy
        found[name] = {
            "ordinal": ordinal_metrics(test, federation.test, alike)._asdict(),
            "validation": {"mean": None, "pooled": chosen},
        }
    return found
