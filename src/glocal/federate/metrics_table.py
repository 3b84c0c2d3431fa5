"""The table of a result: one row per seed, client, split and metric."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple, overload

from glocal.core.checks import require_choice
from glocal.core.errors import InputError, suggest_name
from glocal.core.metric import Metric

SPLITS = ("validation", "test", "new")


class MetricRow(NamedTuple):
    """One figure; `value` is None where it is undefined, `client` is None for all together.

    `group` is empty where all clients have one model. The split "new" is New Test: all models as an
    ensemble on everybody's test data.

    >>> MetricRow(seed=0, client="ulm", split="test", metric="accuracy", value=0.9).value
    0.9
    """

    seed: int
    client: int | str | None
    split: str
    metric: str
    value: float | None
    group: str = ""


@dataclass(frozen=True)
class MetricsTable(Sequence[MetricRow]):
    """The rows, and the metrics that they are about.

    >>> table = MetricsTable((MetricRow(0, "ulm", "test", "mae", 2.0),), ())
    >>> table.mean("mae"), len(table), table
    (2.0, 1, MetricsTable(1 rows: mae))
    """

    rows: tuple[MetricRow, ...]
    metrics: tuple[Metric, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[MetricRow]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> MetricRow: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[MetricRow, ...]: ...

    def __getitem__(self, index: int | slice) -> MetricRow | tuple[MetricRow, ...]:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"MetricsTable({len(self.rows)} rows: {', '.join(self.names)})"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in MetricRow._fields)
        body = "".join(map(_html_row, self.rows[:60]))
        more = len(self.rows) - 60
        note = f"<p>and {more} more rows; to_pandas() has them all</p>" if more > 0 else ""
        return f"<table><tr>{head}</tr>{body}</table>{note}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        declared = [metric.name for metric in self.metrics]
        return tuple(dict.fromkeys([*declared, *(row.metric for row in self.rows)]))

    def where(self, **columns: Any) -> "MetricsTable":
        """The rows with these values: `where(split="test", client="ulm")`, for example."""
        for name in columns:
            if name not in MetricRow._fields:
                known = suggest_name(name, MetricRow._fields)
                raise InputError(f"metrics: there is no column '{name}'; {known}")
        if "split" in columns:
            require_choice("metrics: split", columns["split"], SPLITS)
        rows = [row for row in self.rows if _matches(row, columns)]
        return MetricsTable(tuple(rows), self.metrics)

    def mean(self, metric: str | None = None, split: str = "test") -> float | None:
        """The mean over clients and seeds of the figures that are defined; None without any."""
        rows = self.where(metric=self._known(metric), split=split)
        values = [row.value for row in rows if row.value is not None]
        return sum(values) / len(values) if values else None

    def undefined(self, metric: str | None = None, split: str = "test") -> int:
        """For how many rows a metric is undefined."""
        rows = self.where(metric=self._known(metric), split=split)
        return sum(row.value is None for row in rows)

    def to_pandas(self) -> Any:
        """The rows as a pandas table; it needs pandas."""
        try:
            import pandas
        except ImportError as error:
            raise InputError(
                "metrics: to_pandas() needs pandas, which is not installed; "
                "pip install 'glocal[pandas]'"
            ) from error
        return pandas.DataFrame(self.rows, columns=list(MetricRow._fields))

    def _known(self, metric: str | None) -> str:
        if metric is not None:
            require_choice("metrics: metric", metric, self.names)
        if metric is None and not self.names:
            raise InputError("metrics: the table is empty; no client has data of this split")
        return self.names[0] if metric is None else metric


def _matches(row: MetricRow, columns: dict[str, Any]) -> bool:
    return all(getattr(row, name) == value for name, value in columns.items())


def _html_row(row: MetricRow) -> str:
    cells = []
    for name, value in row._asdict().items():
        if name == "value":
            text = "undefined" if value is None else f"{value:.4g}"
        else:
            text = "" if value is None else escape(str(value))
        cells.append(f"<td>{text}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def describe_undefined(undefined: int, tested: int, seeds: int = 1) -> str:
    """For how many of the clients that were tested a metric is undefined, over all seeds.

    >>> describe_undefined(7, 100), describe_undefined(14, 200, seeds=2)
    ('7 of 100 clients undefined', '14 of 200 clients over 2 seeds undefined')
    """
    over = f" over {seeds} seeds" if seeds > 1 else ""
    return f"{undefined:,} of {tested:,} clients{over} undefined"


def describe_value_of(metric: Metric, value: float | None) -> str:
    """A figure as people read it.

    >>> describe_value_of(Metric("hits", per_example=max, is_fraction=True), 0.5)
    '50.0 %'
    """
    if value is None:
        return "undefined"
    return f"{100 * value:.1f} %" if metric.is_fraction else f"{value:.4g}"
