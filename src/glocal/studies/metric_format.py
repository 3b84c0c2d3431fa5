"""How figures of a metric are written: its name, its direction, and per cent for fractions only."""

from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from glocal.core.files import Json
from glocal.core.metric import Metric
from glocal.federate.metrics_table import describe_undefined
from glocal.federate.options import Evaluation


class MetricFormat(NamedTuple):
    """A metric as tables and figures show it.

    >>> accuracy, rmse = MetricFormat("accuracy", is_fraction=True), MetricFormat("rmse")
    >>> accuracy.text(0.9125), rmse.text(0.9125), accuracy.label, rmse.label
    ('91.2 %', '0.9125', 'accuracy, %', 'rmse')
    """

    name: str
    higher_is_better: bool = True
    is_fraction: bool = False

    @classmethod
    def of(cls, metric: Metric) -> "MetricFormat":
        """That of a metric."""
        return cls(metric.name, metric.higher_is_better, metric.is_fraction)

    @classmethod
    def of_result(cls, result: Json, name: str | None = None) -> "MetricFormat":
        """That of a result's first metric, or of another one of it."""
        name = name or result["metric"]
        about = result["metrics"][name]
        return cls(name, about["higher_is_better"], about["is_fraction"])

    @property
    def scale(self) -> float:
        """What figures are multiplied by."""
        return 100.0 if self.is_fraction else 1.0

    @property
    def label(self) -> str:
        """The name with its unit, for axes and for the heads of tables."""
        return f"{self.name}, %" if self.is_fraction else self.name

    def number(self, value: float | None, digits: int = 1) -> str:
        """A figure without its unit; so many digits after the point of per cents."""
        if value is None:
            return "–"
        return f"{self.scale * value:.{digits}f}" if self.is_fraction else f"{value:.4g}"

    def text(self, value: float | None, digits: int = 1) -> str:
        """A figure with its unit."""
        unit = " %" if self.is_fraction and value is not None else ""
        return f"{self.number(value, digits)}{unit}"

    def mean_std(self, values: Sequence[float], digits: int = 1) -> str:
        """Mean and sample standard deviation, without a unit.

        >>> MetricFormat("accuracy", is_fraction=True).mean_std([0.5, 0.75])
        '62.5 ± 17.7'
        """
        if not values:
            return "–"
        mean = self.number(fmean(values), digits)
        if len(values) == 1:
            return mean
        spread = stdev(values)
        written = f"{self.scale * spread:.{digits}f}" if self.is_fraction else f"{spread:.2g}"
        return f"{mean} ± {written}"

    def signed(self, difference: float) -> str:
        """A difference with its sign, in points for fractions."""
        return f"{100 * difference:+.1f}" if self.is_fraction else f"{difference:+.3g}"

    def amount(self, difference: float) -> str:
        """A difference with its unit.

        >>> MetricFormat("f1", is_fraction=True).amount(0.01), MetricFormat("mae").amount(0.5)
        ('1.0 points', '0.5')
        """
        return f"{100 * difference:.1f} points" if self.is_fraction else f"{difference:.3g}"

    def best(self, values: Iterable[float]) -> float:
        """The best of some figures."""
        return max(values) if self.higher_is_better else min(values)

    def is_better(self, value: float, other: float) -> bool:
        """Whether one figure is better than another."""
        return value > other if self.higher_is_better else value < other


ACCURACY = MetricFormat("accuracy", is_fraction=True)
AUC = MetricFormat("AUC", is_fraction=True)


def new_test_of(result: Json) -> float | None:
    """New Test of a result: its first metric, of the ensemble that the task names."""
    figure: float | None = result["metrics"][result["metric"]]["new_test"]
    return figure


def undefined_metrics(results: Sequence[Json]) -> list[str]:
    """Which metrics are undefined for some clients of an experiment, from its seeds' results."""
    phrases: list[str] = []
    clients = [client for result in results for client in result["clients"]]
    tested = sum(client["test"] > 0 for client in clients)
    for name in results[0]["metrics"] if results else ():
        local_tests = [result["metrics"][name]["local_test"] for result in results]
        undefined = sum(figures["undefined"] for figures in local_tests)
        if undefined:
            phrases.append(f"{name}: {describe_undefined(undefined, tested, len(results))}")
    return phrases


def selection_metric(result: Json, evaluation: Evaluation) -> MetricFormat:
    """The metric that rounds are selected by: the result's first one where none is named."""
    _, _, name = evaluation.select.partition(" ")
    return MetricFormat.of_result(result, name or None)
