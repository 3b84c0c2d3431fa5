"""The page of an audit: leakage of the attribute, group fairness, and both per client."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from glocal.core.files import Json, read_json, require_format
from glocal.report.audit_text import (
    CHANCE_AUC,
    CLIENTS_NOTE,
    KNOWLEDGE,
    LEAKS_NOTE,
    attacker_data_text,
    audit_headline,
    audit_summary,
    best_leak,
    differences,
    metric_of,
    with_interval,
)
from glocal.report.drawing import (
    BACKGROUND,
    FOREGROUND,
    Drawing,
    colour_theme,
    figure_html,
    new_axes,
)
from glocal.report.formatting import PERCENT, pluralize
from glocal.report.page import section, write_page
from glocal.report.styles import COLOURS, MARKERS, LineStyle, legend, line_sample
from glocal.report.tables import boxed_table, scrolling
from glocal.studies.metric_format import AUC

_OPEN = 20  # with more clients, the table is folded
_RATES = {
    "selection_rate": "selected, %",
    "true_positive_rate": "true positives, %",
    "false_positive_rate": "false positives, %",
}
_DIFFERENCES = {
    "demographic_parity_difference": "parity difference",
    "equalized_odds_difference": "odds difference",
}


def read_audit(path: Path) -> Json:
    """The metrics of an audit, from its file."""
    return require_format(read_json(path, dict), path)


def write_audit_report(folder: Path) -> Path:
    """Write folder/report.html from folder/audit.json."""
    report = read_audit(folder / "audit.json")
    with colour_theme(FOREGROUND, BACKGROUND):
        sections = [_leaks(report), _groups(report), _clients(report), _command(report)]
    headline = f'<p class="notice">{escape(audit_headline(report))}</p>'
    summary = f"{headline}\n<p>{escape(audit_summary(report))}</p>"
    return write_page(
        folder,
        title=f"{report['experiment']}: audit of {report['attribute']}",
        summary=summary,
        sections=sections,
    )


def _leaks(report: Json) -> str:
    drawn = figure_html(draw_leaks(report), "leaks", kind="beside")
    return section(
        "What representations reveal", f"{drawn}\n{_leak_table(report)}\n{_note(LEAKS_NOTE)}"
    )


def draw_leaks(report: Json) -> Drawing:
    """Every attacker's AUC with its interval, one row per knowledge, and the line of chance."""
    rows, known = report["leaks"], attacker_data_text(report)
    styles = {attacker: _line_style(place) for place, attacker in enumerate(_attackers(rows))}
    figure, axes = _new_dot_plot([words for words, _ in known])
    for row in rows:
        offset = [*styles].index(row["attacker"]) - (len(styles) - 1) / 2
        position = [words for words, _ in known].index(KNOWLEDGE[row["knowledge"]])
        _dot(axes, position + 0.2 * offset, row, styles[row["attacker"]])
    items = "".join(f"<li>{escape(f'{words}: {what}')}</li>" for words, what in known)
    caption = (
        "Bars are 95 % intervals, the dashed line is guessing. What attackers "
        f"know:<ul>{items}</ul>"
    )
    key = legend((line_sample(line_style), name) for name, line_style in styles.items())
    return Drawing(figure, f"Attribute inference: {escape(report['attribute'])}", caption, key)


def _new_dot_plot(names: Sequence[str]) -> tuple[Figure, Axes]:
    figure, axes = new_axes(0.9 + 0.75 * len(names))
    axes.axvline(CHANCE_AUC, color=FOREGROUND, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.06)
    axes.set(xlabel="AUC, %")
    return figure, axes


def _dot(axes: Axes, place: float, row: Json, line_style: LineStyle) -> None:
    axes.plot(
        [PERCENT * row["low"], PERCENT * row["high"]],
        [place, place],
        color=line_style.colour,
        linewidth=1.8,
    )
    axes.plot(
        PERCENT * row["auc"],
        place,
        color=line_style.colour,
        marker=line_style.marker,
        markersize=7.5,
    )


def _line_style(place: int) -> LineStyle:
    return LineStyle(COLOURS[place % len(COLOURS)], (), MARKERS[place % len(MARKERS)])


def _attackers(rows: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(row["attacker"] for row in rows))


def _leak_table(report: Json) -> str:
    best = best_leak(report)

    def cell(attacker: str, knowledge: str) -> str:
        rows = [
            row
            for row in report["leaks"]
            if row["attacker"] == attacker and row["knowledge"] == knowledge
        ]
        written = with_interval(rows[0]) if rows else "–"
        return f"<strong>{written}</strong>" if best in rows else written

    heads = ["attacker", *(f"{words}: AUC, %" for words in KNOWLEDGE.values())]
    body = [
        [escape(attacker), *(cell(attacker, each) for each in KNOWLEDGE)]
        for attacker in _attackers(report["leaks"])
    ]
    return _table(heads, body, "What attackers read")


def _groups(report: Json) -> str:
    rates, metric = _RATES if report["classes"] == 2 else {}, metric_of(report)
    heads = [escape(report["attribute"]), "people", metric.label, *rates.values()]
    body = [
        [
            escape(report["values"][row["group"]]),
            f"{row['people']:,}",
            metric.number(row["figure"]),
            *(AUC.number(row[rate]) for rate in rates),
        ]
        for row in report["groups"]
    ]
    words = "\n".join(
        f"<p><b>{escape(name)}</b> {escape(meaning)}</p>" for name, meaning in differences(report)
    )
    selected = " Selected: predicted to be of class 1." if report["classes"] == 2 else ""
    note = _note(f"Each client’s own model on its own test data, all clients together.{selected}")
    return section("How groups are treated", f"{_table(heads, body, 'Groups')}\n{note}\n{words}")


def _clients(report: Json) -> str:
    """A row for every client, folded away where they are many."""
    differ, metric = _DIFFERENCES if report["classes"] == 2 else {}, metric_of(report)
    heads = [
        "client",
        *(escape(f"{report['attribute']} = {value}") for value in report["values"]),
        metric.label,
        *differ.values(),
        "best attacker: AUC, %",
    ]
    body: list[list[str]] = []
    for row in report["clients"]:
        people = [f"{count:,}" for count in row["people"]]
        rates = [AUC.number(row[key]) for key in (*differ, "leak")]
        body.append([str(row["client"]), *people, metric.number(row["figure"]), *rates])
    summary = f"<summary>{pluralize(len(body), 'client')}</summary>"
    opening = "<details open>" if len(body) <= _OPEN else "<details>"
    folded = f"{opening}{summary}\n{_table(heads, body, 'Clients')}</details>"
    return section("Clients", f"{folded}\n{_note(CLIENTS_NOTE)}")


def _command(report: Json) -> str:
    return section("Command", scrolling(f"<pre>{escape(report['command'])}</pre>", "Command"))


def _table(heads: Sequence[str], body: Sequence[Sequence[str]], label: str) -> str:
    """The first column is a row's name; cells are HTML."""
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads[1:])
    rows = (
        '<tr><th class="name" '
        f'scope="row">{first}</th>{"".join(f"<td>{c}</td>" for c in rest)}</tr>'
        for first, *rest in body
    )
    return boxed_table(
        f'<tr><th class="name" scope="col">{heads[0]}</th>{columns}</tr>', rows, label
    )


def _note(words: str) -> str:
    return f'<p class="note">{escape(words)}</p>'
