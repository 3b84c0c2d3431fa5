"""Metrics of a study whose classes have an order, and its baselines, on the same partitions."""

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
from glocal.federate.result import SeedResult


@dataclass(frozen=True)
class OrdinalSettings:
    """Also measure the mean absolute error; and all metrics without one-class clients.

    These have a fraction `one_class_fraction` of their examples in one class. With `bag_of_words`,
    the most frequent class and logistic regression on bags of words are baselines.
    """

    one_class_fraction: float = 0.95
    bag_of_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.one_class_fraction <= 1:
            raise InputError(
                f"ordinal: one_class_fraction is {self.one_class_fraction}; "
                "a number above 0 and up to 1 was expected"
            )


def require_ordinal(settings: OrdinalSettings, federation: FederatedData) -> None:
    """Refuse bags of words for data that are not texts."""
    if settings.bag_of_words:
        federation.train.text_lengths.sum()


def measure_ordinal(
    experiment: Case, results: Sequence[SeedResult], options: Options, settings: OrdinalSettings
) -> list[Json]:
    """Accuracy and mean absolute error of the clients' own models on their test data, per seed."""
    with closing(build_evaluation(experiment, options)) as evaluation:
        rows = []
        for result, fed in zip(results, experiment.federations, strict=True):
            one_class = one_class_clients(fed, settings.one_class_fraction)
            predictions = predict_classes(evaluation, result.state, fed.test)
            metrics = ordinal_metrics(predictions, fed.test, one_class)
            rows.append({**metrics._asdict(), "one_class_clients": len(one_class)})
        return rows


def baseline_metrics(federation: FederatedData, settings: OrdinalSettings) -> dict[str, Json]:
    """The metrics of every baseline on one partition of the data."""
    one_class = one_class_clients(federation, settings.one_class_fraction)
    metrics: dict[str, Json] = {}
    for name, (val, test) in baselines(federation).items():
        validation = ordinal_metrics(val, federation.val, one_class).accuracy
        metrics[name] = {
            "ordinal": ordinal_metrics(test, federation.test, one_class)._asdict(),
            "validation": {"mean": None, "pooled": validation},
        }
    return metrics
