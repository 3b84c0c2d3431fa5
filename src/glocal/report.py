"""The report of a run: one page of HTML with tables and figures that opens anywhere, offline."""

import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from glocal.errors import InputError
from glocal.keep import Json, read_json, read_rows, whole_or_not_at_all, write_text
from glocal.sampling import Integers
from glocal.studies.run import case_folder, read_results, read_settings
from glocal.studies.settings import CaseSettings, Settings

# each colour has a contrast of at least 3:1 on the light and on the dark page; dashes and markers tell lines apart without colour
_COLOURS = ("#2a7fc4", "#cf5b1f", "#12946c", "#b65fa0", "#9a7b12", "#6f6ad6", "#c2485f", "#6f7f8c")
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 2), (2, 1.6), (7, 2, 2, 2), (10, 3))
_MARKERS = {
    "o": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "M-3.5-3.5h7v7h-7z",
    "^": "M0-4.2L4 3.4H-4z",
    "D": "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "v": "M0 4.2L4-3.4H-4z",
    "P": "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
    "X": "M-4-2L-2-4L0-2L2-4L4-2L2 0L4 2L2 4L0 2L-2 4L-4 2L-2 0z",
}
# stand-ins that the page's own colours take the place of, so that a figure follows its theme
_INK, _PAPER = "#0a0b0c", "#fafbfc"
_WIDTH = 5.0  # inches; small enough for 10 pt to stay readable on a phone
_PERCENT = 100.0
_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "lines.scale_dashes": False,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "glocal",
}


class Look(NamedTuple):
    """How one case is drawn, the same in every figure."""

    colour: str
    dash: tuple[float, ...]
    marker: str


class Hatching(NamedTuple):
    """How a part of a bar is drawn: matplotlib's pattern, and the same as a path for the legend."""

    colour: str
    pattern: str
    strokes: str


_LOCAL, _NEW = Look(_COLOURS[0], (), "o"), Look(_COLOURS[1], (), "D")
_PURPOSES = {
    "download": Hatching(_COLOURS[0], "", ""),
    "upload": Hatching(_COLOURS[1], "///", "M2 12L14 0M10 12L22 0M18 12L30 0"),
    "evaluation": Hatching(_COLOURS[2], "|||", "M3 0v12M9 0v12M15 0v12M21 0v12M27 0v12"),
    "ensemble": Hatching(_COLOURS[3], "xxx", "M0 12L12 0M9 12L21 0M18 12L30 0M0 0L12 12M9 0L21 12M18 0L30 12"),
}


@dataclass(frozen=True)
class Record:
    """A case as its folder tells it: rows so far, and one result per seed once it has been tested."""

    name: str
    case: CaseSettings
    look: Look
    rows: list[Json]
    results: list[Json]

    @property
    def reached(self) -> int:
        """How many rounds are done, a warm start's included."""
        return max((row["round"] + 1 for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        """Whether the results are those of the last round."""
        return bool(self.results) and self.results[0]["rounds"] >= self.reached

    def figures(self, *address: str) -> list[float]:
        """One figure of each seed's result, such as ("local_test", "mean"), where it was measured."""
        return [float(value) for result in self.results if (value := _inside(result, address)) is not None]


@dataclass(frozen=True)
class Run:
    """Everything that a report tells; `counts` are the first seed's training examples (devices, classes)."""

    settings: Settings
    records: list[Record]
    counts: Integers | None

    @property
    def devices(self) -> int:
        """How many devices there are; data of the user's own may have others than the settings say."""
        if self.counts is not None:
            return len(self.counts)
        return next((len(record.results[0]["devices"]) for record in self.records if record.results), self.settings.data.devices)


class Drawing(NamedTuple):
    """A figure with its words; `key` is the legend, as HTML."""

    figure: Figure
    title: str
    caption: str
    key: str = ""


def write_report(folder: Path) -> Path:
    """Write folder/report.html from what the run has kept so far."""
    run = _read(folder)
    with _ink_and_paper(_INK, _PAPER):
        sections = [_notice(run), _results(run), _figures(run), _devices(run), _settings(run)]
    page = Template(files("glocal").joinpath("report_page.html").read_text(encoding="utf-8"))
    words = {"title": escape(run.settings.name), "summary": _summary(run), "sections": "\n".join(filter(None, sections))}
    write_text(folder / "report.html", page.substitute(words))
    return folder / "report.html"


def draw_classes(counts: npt.ArrayLike, path: Path) -> Path:
    """Draw who has which classes (devices, classes) into an .svg or .png file."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(f"draw: {path} is neither .svg nor .png; give the file one of these endings")
    table = np.asarray(counts, dtype=np.int64)
    if table.ndim != 2 or not table.size:
        raise InputError(f"draw: the counts have shape {table.shape}; a table (devices, classes) was expected")
    with _ink_and_paper("#1c2126", "#ffffff"), whole_or_not_at_all(path) as half:
        about: dict[str, None] = {"Date": None} if kind == "svg" else {"Software": None}
        _heat_map(table).savefig(half, format=kind, facecolor="#ffffff", dpi=200, metadata=about)
    return path


def _read(folder: Path) -> Run:
    settings, results, dealt = read_settings(folder), read_results(folder), folder / "federation.json"
    records = [
        Record(name, case, _look(place), read_rows(case_folder(folder, name) / "rows.jsonl"), results.get(name, []))
        for place, (name, case) in enumerate(settings.cases.items())
    ]
    return Run(settings, records, np.array(read_json(dealt)["train"], dtype=np.int64) if dealt.exists() else None)


def _look(place: int) -> Look:
    """No two alike among the first 280: the cycles' lengths have no common factor."""
    return Look(_COLOURS[place % len(_COLOURS)], _DASHES[place % len(_DASHES)], list(_MARKERS)[place % len(_MARKERS)])


def _inside(data: Json, address: Sequence[str]) -> Any:
    """What lies at an address of nested data; None where the way ends early."""
    found: Any = data
    for key in address:
        found = None if found is None else found[key]
    return found


@contextmanager
def _ink_and_paper(ink: str, paper: str) -> Iterator[None]:
    """Draw in these colours, whatever the user's own matplotlib settings say."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    coloured = {**dict.fromkeys(inked, ink), "hatch.color": paper, "lines.markeredgecolor": paper}
    with style.context(["default", _STYLE | coloured]), warnings.catch_warnings():
        # the page's fonts draw a name that matplotlib's own cannot
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _summary(run: Run) -> str:
    """One paragraph: the data, the model, and how it was trained."""
    plan, model = run.settings.plan, run.settings.model
    hidden = f" with hidden layers of {', '.join(map(str, model.hidden))}" if model.name == "mlp" else ""
    seeds = f"repeated with {plan.seeds} seeds" if plan.seeds > 1 else f"with the one seed {plan.seed}"
    rounds = max((_last_round(run.settings, record.case) for record in run.records), default=0)
    sentences = [
        _told_data(run),
        f"The model is {model.name}{hidden}.",
        _told_shares(run),
        f"The study compares {_several(len(run.records), 'case')} over up to {_several(rounds, 'round')},",
        f"{_several(plan.cohort, 'device')} taking part in each, {seeds}.",
    ]
    return f"<p>{escape(' '.join(filter(None, sentences)))}</p>"


def _told_data(run: Run) -> str:
    data, counts = run.settings.data, run.counts
    dealt = {
        "shards": f", each with at most {_several(data.classes_per_device, 'class')}",
        "dirichlet": f", each class in proportions drawn from Dirichlet({data.alpha:g})",
        "iid": ", in equal shares at random",
    }
    examples = "" if counts is None else f": {counts.sum():,} training examples of {_several(counts.shape[1], 'class')}"
    how = "" if ":" in data.source else dealt.get(data.partition, "")
    return f"The data are {data.source}{examples} on {_several(run.devices, 'device')}{how}."


def _told_shares(run: Run) -> str:
    """What part of its model each LG-FedAvg case shares; cases that share the same are named together."""
    shares: dict[str, list[str]] = {}
    for record in run.records:
        if record.case.algorithm == "lg_fedavg" and (share := _share(record, run.settings)):
            shares.setdefault(share, []).append(record.name)
    return " ".join(f"Shared in {', '.join(names)}: {share}." for share, names in shares.items())


def _share(record: Record, settings: Settings) -> str:
    """Worked out from what the paper's count grew by: M + cohort shared trees a round, and M local ones in the end."""
    counts = [row["paper_parameters"] for row in record.rows if row["seed"] == record.rows[0]["seed"]]
    if not record.finished or len(counts) < 2:
        return ""
    devices = len(record.results[0]["devices"])
    shared = (counts[-1] - counts[-2]) / (devices + settings.plan.cohort)
    whole = shared + (record.results[0]["ledger"]["paper"]["parameters"] - counts[-1]) / devices
    return f"{shared:,.0f} of {whole:,.0f} parameters ({_PERCENT * shared / max(1, whole):.0f} %)"


def _first_round(settings: Settings, case: CaseSettings) -> int:
    """The round that a case starts at; where it goes on from another case, that one's last unless it says which."""
    if case.after is None:
        return 0
    return _last_round(settings, settings.cases[case.after]) if case.after_round is None else case.after_round


def _last_round(settings: Settings, case: CaseSettings) -> int:
    return _first_round(settings, case) + (settings.plan.rounds if case.rounds is None else case.rounds)


def _several(count: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{count:,} {thing if count == 1 else plural}"


def _notice(run: Run) -> str:
    """Which cases are still to be finished, if any."""
    unfinished = [f"{escape(record.name)} ({_progress(run, record)})" for record in run.records if not record.finished]
    if not unfinished:
        return ""
    return f'<p class="notice"><b>This run is not finished.</b> Still open: {", ".join(unfinished)}.</p>'


def _progress(run: Run, record: Record) -> str:
    return f"round {record.reached} of {_last_round(run.settings, record.case)}" if record.rows else "not started"


class Column(NamedTuple):
    """A column of the main table: its heads, which figure of a result, how it is written, and which value is best."""

    group: str
    head: str
    address: tuple[str, ...]
    write: Callable[[Sequence[float]], str]
    best: Callable[[Sequence[float]], float]


def _columns() -> list[Column]:
    return [
        Column("Local Test, %", "mean", ("local_test", "mean"), _percent, max),
        Column("Local Test, %", "worst tenth", ("local_test", "worst_tenth"), _percent, max),
        *(Column("New Test, %", way, ("new_test", way), _percent, max) for way in ("logits", "votes", "weights")),
        Column("Sent", "bytes", ("ledger", "total", "bytes"), _bytes_of, min),
        Column("Sent", "paper’s count", ("ledger", "paper", "parameters"), _power_of_ten, min),
        Column("Devices", "never sampled", ("never_sampled",), _count, min),
    ]


def _percent(values: Sequence[float]) -> str:
    """Mean and sample standard deviation.

    >>> _percent([0.5, 0.75])
    '62.5 ± 17.7'
    """
    spread = f" ± {_PERCENT * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{_PERCENT * fmean(values):.1f}{spread}"


def _bytes_of(values: Sequence[float]) -> str:
    return _human(fmean(values))


def _human(size: float) -> str:
    """A number of bytes for people.

    >>> _human(37_214_880)
    '37.2 MB'
    """
    unit, name = _unit(size)
    return f"{size / unit:.{0 if unit == 1 else 1}f} {name}"


def _unit(size: float) -> tuple[int, str]:
    """The largest decimal unit that a number of bytes fills."""
    units = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1000, "kB"))
    return next((unit for unit in units if size >= unit[0]), (1, "B"))


def _power_of_ten(values: Sequence[float]) -> str:
    """Three digits and an exponent.

    >>> _power_of_ten([55_749_120_000])
    '5.57e10'
    """
    digits, exponent = f"{fmean(values):.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def _count(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}".removesuffix(".0")


def _results(run: Run) -> str:
    """The main table."""
    columns = _columns()
    best = [_best(run, column) for column in columns]
    rows = "\n".join(_table_row(run, record, columns, best) for record in run.records)
    table = f"<table>{_table_head(columns)}\n<tbody>\n{rows}\n</tbody></table>"
    return f'<section><h2>Results</h2>\n{_scrolling(table, "Results by case")}\n<p class="note">{_table_note(run)}</p></section>'


def _table_head(columns: Sequence[Column]) -> str:
    """Two rows: groups of columns, then the columns."""
    groups = [(group, len(list(same))) for group, same in groupby(column.group for column in columns)]
    names = "".join(f'<th rowspan="2" scope="col" class="name">{name}</th>' for name in ("Case", "Algorithm"))
    upper = "".join(f'<th colspan="{width}" scope="colgroup">{group}</th>' for group, width in groups)
    lower = "".join(f'<th scope="col">{column.head}</th>' for column in columns)
    return f"<thead><tr>{names}{upper}</tr>\n<tr>{lower}</tr></thead>"


def _best(run: Run, column: Column) -> str | None:
    """The best value as it is written; None where there is nothing to compare."""
    means = [fmean(values) for record in run.records if (values := record.figures(*column.address))]
    written = {column.write([mean]) for mean in means}
    return column.write([column.best(means)]) if len(written) > 1 else None


def _table_row(run: Run, record: Record, columns: Sequence[Column], best: Sequence[str | None]) -> str:
    case, name = record.case, escape(record.name)
    after = f'<span class="small">after {escape(case.after)}, round {_first_round(run.settings, case)}</span>' if case.after else ""
    progress = "" if record.finished else f'<span class="small">unfinished, {_progress(run, record)}</span>'
    head = f'{_mark(record.look)}<span class="long" title="{name}">{name}</span>{after}{progress}'
    cells = "".join(_cell(record, column, top) for column, top in zip(columns, best, strict=True))
    return f'<tr><th scope="row" class="name">{head}</th><td class="name">{escape(case.algorithm)}</td>{cells}</tr>'


def _cell(record: Record, column: Column, best: str | None) -> str:
    values = record.figures(*column.address)
    if not values:
        return "<td>–</td>"
    written = column.write(values)
    return f"<td><strong>{written}</strong></td>" if column.write([fmean(values)]) == best else f"<td>{written}</td>"


def _table_note(run: Run) -> str:
    seeds, select = run.settings.plan.seeds, run.settings.run.select
    when = {"last": "after its last round", "best": "at the round that was best on validation data"}.get(select, select)
    spread = f"± is the standard deviation over {seeds} seeds. " if seeds > 1 else ""
    return (
        f"Each case was tested {when}; the best value of a column is bold. Local Test: each device’s own model on its own test "
        "data, as the mean over devices and over the tenth of them that fare worst. New Test: the ensemble of all trained devices "
        f"on everyone’s test data, by averaged logits, majority vote or averaged weights. {spread}Sent: bytes as they cross the "
        "wire, evaluation and a warm start included; the paper’s count is in parameters, as if every device received in every "
        "round (Liang et al. 2020). Never sampled: devices that took part in no round of the case."
    )


def _scrolling(inner: str, label: str) -> str:
    """A box that scrolls by itself, also by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{inner}</div>'


def _mark(look: Look) -> str:
    """A piece of a case's line, with its marker."""
    dash = f' stroke-dasharray="{" ".join(f"{length:g}" for length in look.dash)}"' if look.dash else ""
    line = f'<path d="M0 6H30" fill="none" stroke="{look.colour}" stroke-width="2"{dash}/>'
    marker = f'<path transform="translate(15 6)" d="{_MARKERS[look.marker]}" fill="{look.colour}"/>'
    return f'<svg class="mark" viewBox="0 0 30 12" aria-hidden="true">{line}{marker}</svg>'


def _patch(hatching: Hatching) -> str:
    """A piece of a bar."""
    bar = f'<path d="M0 0h30v12H0z" fill="{hatching.colour}"/>'
    strokes = f'<path d="{hatching.strokes}" stroke="var(--card)" stroke-width="1.2" fill="none"/>' if hatching.strokes else ""
    return f'<svg class="mark" viewBox="0 0 30 12" aria-hidden="true">{bar}{strokes}</svg>'


def _figures(run: Run) -> str:
    """All figures that there are measurements for."""
    drawn = [drawing for draw in (_validation, _economy, _tests, _spread, _loss, _purposes) if (drawing := draw(run))]
    if not drawn:
        return "<section><h2>Figures</h2>\n<p>Nothing has been measured yet.</p></section>"
    shown = "\n".join(_shown(drawing, f"f{number}") for number, drawing in enumerate(drawn, start=1))
    return f'<section><h2>Figures</h2>\n<div class="figures">\n{shown}\n</div></section>'


def _shown(drawing: Drawing, name: str, *, kind: str = "plain") -> str:
    key = f'<ul class="key">{drawing.key}</ul>' if drawing.key else ""
    caption = f"<figcaption><b>{drawing.title}</b> {drawing.caption}</figcaption>"
    return f'<figure class="{kind}"><div>{_svg(drawing.figure, name, drawing.title)}{key}</div>{caption}</figure>'


def _svg(figure: Figure, name: str, label: str) -> str:
    """A figure as inline SVG: ids of its own, no metadata, and the page's colours in place of the stand-ins."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    _, _, drawn = buffer.getvalue().partition("<svg")
    _, _, inner = drawn.partition(">")
    inner = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", inner, flags=re.DOTALL)
    width, height = (72 * inches for inches in figure.get_size_inches())
    head = f'<svg class="plot" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:g} {height:g}">'
    return head + re.sub(r"<[^>]*>", lambda tag: _themed(tag.group(), name), inner).strip()


def _themed(tag: str, name: str) -> str:
    """One SVG tag; what a user has named stands between tags and is left alone."""
    owned = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", tag)
    return owned.replace(_INK, "currentColor").replace(_PAPER, "var(--card)")


def _panel(height: float = 3.4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _key(records: Sequence[Record]) -> str:
    return "".join(f"<li>{_mark(record.look)}{escape(record.name)}</li>" for record in records)


def _over_seeds(run: Run) -> str:
    many = f"A line is the mean over {run.settings.plan.seeds} seeds, its band reaches from the lowest seed to the highest."
    return many if run.settings.plan.seeds > 1 else "One seed was run."


class Curve(NamedTuple):
    """What was measured over the rounds: places on the x axis, and each place's values, one per seed."""

    places: list[float]
    values: list[list[float]]


def _curve(record: Record, field: str, place: Callable[[Sequence[Json]], float]) -> Curve:
    """The rounds in which a field was measured."""
    rounds: dict[int, list[Json]] = {}
    for row in record.rows:
        if row[field] is not None:
            rounds.setdefault(row["round"], []).append(row)
    rows = [rounds[number] for number in sorted(rounds)]
    return Curve([place(seeds) for seeds in rows], [[row[field] for row in seeds] for seeds in rows])


def _round_number(rows: Sequence[Json]) -> float:
    return float(rows[0]["round"] + 1)


def _bytes_so_far(rows: Sequence[Json]) -> float:
    return fmean(row["bytes"] for row in rows)


def _trace(axes: Axes, look: Look, curve: Curve, *, scale: float = 1.0) -> None:
    """The mean as a line with some markers, the seeds' range as a band."""
    low, mean, high = ([scale * of(values) for values in curve.values] for of in (min, fmean, max))
    axes.fill_between(curve.places, low, high, color=look.colour, alpha=0.16, linewidth=0)
    dashes = (0, look.dash) if look.dash else "solid"
    every = max(1, min(len(mean) // 2, 1 + len(mean) // 8))
    # lines that lie on each other show their markers in turn
    marked = (list(_MARKERS).index(look.marker) % every, every)
    axes.plot(curve.places, mean, look.marker, color=look.colour, linestyle=dashes, linewidth=1.8, markersize=5.5, markevery=marked)


def _validation(run: Run) -> Drawing | None:
    curves = [(record, _curve(record, "validation", _round_number)) for record in run.records]
    seen = [(record, curve) for record, curve in curves if curve.places]
    if not seen:
        return None
    figure, axes = _panel()
    for record, curve in seen:
        _trace(axes, record.look, curve, scale=_PERCENT)
    axes.set(xlabel="round", ylabel="validation accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    caption = (
        "How well the devices’ own models do on their own validation data, as training goes on: the mean over devices, measured "
        f"every {_several(run.settings.run.validate_every, 'round')}. {_over_seeds(run)}"
    )
    return Drawing(figure, "Validation accuracy by round", caption, _key([record for record, _ in seen]))


def _economy(run: Run) -> Drawing | None:
    """Validation accuracy against bytes; a case that sends nothing has no place on the axis and becomes a level line."""
    curves = [(record, _curve(record, "validation", _bytes_so_far)) for record in run.records]
    sending = [(record, curve) for record, curve in curves if any(curve.places)]
    silent = [(record, curve) for record, curve in curves if curve.places and not any(curve.places)]
    if not sending:
        return None
    figure, axes = _panel()
    for record, curve in sending:
        _trace(axes, record.look, curve, scale=_PERCENT)
    ends = _scale_bytes(axes, [place for _, curve in sending for place in curve.places if place])
    for record, curve in silent:
        _trace(axes, record.look, Curve(list(np.linspace(*ends, 9)), [curve.values[-1]] * 9), scale=_PERCENT)
    axes.set(xlabel="sent so far", ylabel="validation accuracy, %", xlim=ends)
    caption = "What accuracy costs: the same measurements against all bytes sent until then, evaluation included."
    if any(record.case.after for record, _ in sending):
        caption += " A case that goes on from another begins with what that one had sent."
    if silent:
        caption += " A case that sends nothing while it trains is a level line at its last value."
    shown = [record for record in run.records if record.rows]
    return Drawing(figure, "Validation accuracy by bytes sent", f"{caption} {_over_seeds(run)}", _key(shown))


def _scale_bytes(axes: Axes, places: Sequence[float]) -> tuple[float, float]:
    """An axis in bytes and its ends; logarithmic where the most is more than 20 times the least."""
    low, high = min(places), max(places)
    unit, _ = _unit(high)
    ticks: Locator = FixedLocator([unit * tick for tick in MaxNLocator(6).tick_values(0, high / unit)])
    ends = 0.0, 1.05 * high
    if high > 20 * low:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        ticks = LogLocator(subs=(1, 3) if high < 1000 * low else (1,))
        ends = low / 1.15, high * 1.15
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _human(size).replace(".0 ", " ")))
    return ends


def _rungs(records: Sequence[Record]) -> tuple[Figure, Axes]:
    """A panel with the cases as rungs, the first on top."""
    figure, axes = _panel(max(2.4, 1.0 + 0.46 * len(records)))
    axes.set_yticks(range(len(records)), [_short(record.name) for record in records])
    axes.set_ylim(len(records) - 0.45, -0.55)
    axes.margins(x=0.04)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _short(name: str) -> str:
    plain = " ".join(name.split())
    return plain if len(plain) <= 18 else plain[:17] + "…"


def _tests(run: Run) -> Drawing | None:
    records = [record for record in run.records if record.figures("local_test", "mean") or record.figures("new_test", "logits")]
    if not records:
        return None
    figure, axes = _rungs(records)
    for place, record in enumerate(records):
        _dot(axes, place - 0.12, record.figures("local_test", "mean"), _LOCAL)
        _dot(axes, place + 0.12, record.figures("new_test", "logits"), _NEW)
    axes.set(xlabel="accuracy, %")
    seeds = run.settings.plan.seeds
    bars = f" Marks are means over {seeds} seeds, bars reach one standard deviation to either side." if seeds > 1 else ""
    caption = (
        "Good for those who took part, and for newcomers? Local Test is each device’s own model on its own test data; New Test is "
        f"the ensemble of all trained devices (averaged logits) on everyone’s test data.{bars}"
    )
    key = f"<li>{_mark(_LOCAL)}Local Test</li><li>{_mark(_NEW)}New Test</li>"
    return Drawing(figure, "Local Test and New Test", caption, key)


def _dot(axes: Axes, place: float, values: Sequence[float], look: Look) -> None:
    """The mean over seeds, with its standard deviation."""
    if not values:
        return
    middle = _PERCENT * fmean(values)
    error = _PERCENT * stdev(values) if len(values) > 1 else 0.0
    axes.plot([middle - error, middle + error], [place, place], color=look.colour, linewidth=1.6)
    axes.plot(middle, place, color=look.colour, marker=look.marker, markersize=7.5)


def _spread(run: Run) -> Drawing | None:
    """Every device of the first seed as a point, over a box from the first quartile to the third."""
    records = [record for record in run.records if record.results and _accuracies(record)]
    if not records:
        return None
    figure, axes = _rungs(records)
    for place, record in enumerate(records):
        _box(axes, place, np.array(_accuracies(record)), record.look)
    axes.use_sticky_edges = False  # else points at 100 % are cut in half
    axes.set(xlabel="Local Test of one device, %")
    caption = (
        f"Who is left behind? One point for each device of seed {records[0].results[0]['seed']}: its own model on its own test "
        "data. The box holds the middle half of the devices, the line in it is the median."
    )
    return Drawing(figure, "Local Test over devices", caption)


def _accuracies(record: Record) -> list[float]:
    return [_PERCENT * device["local_test"] for device in record.results[0]["devices"] if device["local_test"] is not None]


def _box(axes: Axes, place: int, values: npt.NDArray[np.float64], look: Look) -> None:
    first, median, third = np.quantile(values, (0.25, 0.5, 0.75))
    axes.barh(place, third - first, left=first, height=0.62, color=look.colour, alpha=0.2)
    axes.plot([median, median], [place - 0.31, place + 0.31], color=look.colour, linewidth=2)
    # multiples of the golden ratio lie evenly apart, however many there are
    heights = place + 0.5 * (np.arange(len(values)) * 0.6180339887 % 1 - 0.5)
    axes.scatter(values, heights, s=20, color=look.colour, marker=look.marker, edgecolors=_PAPER, linewidths=0.5, alpha=0.85)


def _loss(run: Run) -> Drawing | None:
    curves = [(record, _curve(record, "loss", _round_number)) for record in run.records if record.rows]
    if not curves:
        return None
    step = 1 + max(len(curve.places) for _, curve in curves) // 200
    figure, axes = _panel()
    for record, curve in curves:
        _trace(axes, record.look, _thinned(curve, step))
    losses = [value for _, curve in curves for values in curve.values for value in values]
    if min(losses) > 0 and max(losses) > 20 * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="round", ylabel="training loss")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    smooth = f" Each point is the mean of {step} rounds." if step > 1 else ""
    caption = f"The mean loss of the devices that took part in a round, while they trained.{smooth} {_over_seeds(run)}"
    return Drawing(figure, "Training loss by round", caption, _key([record for record, _ in curves]))


def _thinned(curve: Curve, step: int) -> Curve:
    """Every so many rounds put together, seed by seed; a last round that some seed has not done yet is left out."""
    full = max(len(values) for values in curve.values)
    kept = [(place, values) for place, values in zip(*curve, strict=True) if len(values) == full]
    groups = [kept[start : start + step] for start in range(0, len(kept), step)]
    places = [fmean(place for place, _ in group) for group in groups]
    return Curve(places, [[fmean(seed) for seed in zip(*(values for _, values in group), strict=True)] for group in groups])


def _purposes(run: Run) -> Drawing | None:
    records = [record for record in run.records if record.results]
    if not records:
        return None
    figure, axes = _rungs(records)
    unit, name = _unit(max(fmean(record.figures("ledger", "total", "bytes")) for record in records))
    left = np.zeros(len(records))
    for purpose, hatching in _PURPOSES.items():
        width = np.array([fmean(record.figures("ledger", purpose, "bytes")) / unit for record in records])
        axes.barh(range(len(records)), width, left=left, height=0.58, color=hatching.colour, hatch=hatching.pattern, linewidth=0)
        left += width
    axes.set(xlabel=f"sent, {name}")
    caption = (
        "What the bytes were for: the shared part sent to the devices of each round (download) and back (upload), to devices that "
        "validate and test it (evaluation), and local parts sent once for the New Test (ensemble). As counted on the wire; the "
        "mean over seeds."
    )
    key = "".join(f"<li>{_patch(hatching)}{purpose}</li>" for purpose, hatching in _PURPOSES.items())
    return Drawing(figure, "Bytes by purpose", caption, key)


def _devices(run: Run) -> str:
    """Who has which classes, and each case's table of devices."""
    tables = [_device_table(record) for record in run.records if record.results]
    if run.counts is not None:
        tables.insert(0, _shown(_classes(run, run.counts), "classes", kind="beside"))
    return "\n".join(["<section><h2>Devices</h2>", *tables, "</section>"]) if tables else ""


def _classes(run: Run, counts: Integers) -> Drawing:
    held = np.count_nonzero(counts, axis=1)
    caption = (
        f"Training examples by device and class, as dealt to the {_several(len(counts), 'device')} of seed "
        f"{run.settings.plan.seed}: the stronger the colour, the more. Classes on one device: {_range(held)}; "
        f"training examples on one device: {_range(counts.sum(axis=1))}."
    )
    return Drawing(_heat_map(counts), "Who has which classes", caption)


def _range(values: Integers) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _heat_map(counts: Integers) -> Figure:
    """Devices from left to right, classes from the bottom up; the more examples, the stronger the colour."""
    highest = max(1, int(counts.max()))
    figure = Figure(figsize=(_WIDTH, 3.0), layout="constrained")
    axes, scale = figure.subplots(1, 2, width_ratios=(30, 1))
    axes.imshow(_tinted(counts.T / highest), aspect="auto", origin="lower", interpolation="none")
    axes.set(xlabel="device", ylabel="class")
    for axis, length in ((axes.xaxis, len(counts)), (axes.yaxis, counts.shape[1])):
        axis.set_major_locator(MaxNLocator(min(10, length), integer=True, steps=[1, 2, 5, 10]))
    scale.imshow(_tinted(np.linspace(0, 1, 64)[:, None]), aspect="auto", origin="lower", extent=(0, 1, 0, highest))
    scale.set(xticks=[], ylabel="examples")
    scale.yaxis.tick_right()
    scale.yaxis.set_label_position("right")
    scale.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    scale.spines[:].set_visible(False)
    for part in (axes, scale):
        part.grid(visible=False)
    return figure


def _tinted(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """One colour over the paper (..., 4): nothing where there is none, and little can still be told from none."""
    colour = [int(_COLOURS[0][place : place + 2], 16) / 255 for place in (1, 3, 5)]
    strength = np.where(shares > 0, 0.12 + 0.88 * shares, 0.0)
    return np.concatenate([np.broadcast_to(colour, (*shares.shape, 3)), strength[..., None]], axis=-1)


def _device_table(record: Record) -> str:
    result = record.results[0]
    heads = ("Device", "Training examples", "Validation examples", "Test examples", "Times sampled", "Local Test, %")
    head = "".join(f'<th scope="col">{words}</th>' for words in heads)
    rows = "\n".join(_device_row(device) for device in result["devices"])
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    summary = f'{_mark(record.look)}{escape(record.name)} <span class="note">seed {result["seed"]}</span>'
    return f"<details><summary>{summary}</summary>\n{_scrolling(table, f'Devices of {record.name}')}</details>"


def _device_row(device: Json) -> str:
    accuracy = "–" if device["local_test"] is None else f"{_PERCENT * device['local_test']:.1f}"
    cells = "".join(f"<td>{device[column]}</td>" for column in ("train", "val", "test", "sampled"))
    return f'<tr><th scope="row">{device["device"]}</th>{cells}<td>{accuracy}</td></tr>'


def _settings(run: Run) -> str:
    text = escape(json.dumps(run.settings.as_dict(), indent=2, ensure_ascii=False))
    box = _scrolling(f"<pre>{text}</pre>", "Settings")
    return f"<section><h2>Settings</h2>\n<details><summary>What this run was started with</summary>\n{box}</details></section>"
