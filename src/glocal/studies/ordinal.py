"""Metrics of a study whose classes have an order, and its baselines, on the same partitions."""

from contextlib import closing
from dataclasses import dataclass

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.task import Task
from glocal.datasets.federated import FederatedData
from glocal.evaluate import Evaluator, predict_classes
from glocal.evaluate.ordinal import one_class_clients, ordinal_metrics
from glocal.evaluate.text_baselines import baselines
from glocal.federate.result import Result
from glocal.federate.run import Run
from glocal.personalize.class_targets import count_classes


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


def require_ordinal(settings: OrdinalSettings, task: Task, federation: FederatedData) -> None:
    """Refuse targets that are no classes, and bags of words for data that are not texts."""
    if count_classes(task, federation.train.examples) is None:
        raise InputError(
            "ordinal: it counts by how many classes a prediction is off, and the targets are no "
            "class numbers; leave [ordinal] out"
        )
    if settings.bag_of_words:
        federation.train.text_lengths.sum()


@dataclass(frozen=True)
class OrdinalMetrics:
    """A callback that adds accuracy and mean absolute error of each client's model on its data."""

    settings: OrdinalSettings

    def on_end(self, run: Run, result: Result) -> None:
        """Add "ordinal" to each seed's result."""
        group = run.experiment.groups[0]
        for place, own in enumerate(result.groups):
            data = group.data_of(place)
            one_class = one_class_clients(data, self.settings.one_class_fraction)
            engine = run.options.engine_config()
            with closing(Evaluator(own.algorithm, engine=engine)) as evaluator:
                test = data.to(run.options.torch_device()).test
                predictions = predict_classes(evaluator, own.state, test)
            metrics = ordinal_metrics(predictions, data.test, one_class)
            own.extras["ordinal"] = {**metrics._asdict(), "one_class_clients": len(one_class)}


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
