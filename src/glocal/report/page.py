"""The page: a summary in words, then sections of tables and figures, put into page.html."""

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from glocal.core.files import write_text
from glocal.datasets import SOURCES
from glocal.report.audits import AUDITS_NOTE, audits_table
from glocal.report.classes import draw_partition
from glocal.report.curves import draw_loss, draw_validation, draw_validation_by_bytes
from glocal.report.dot_plots import draw_bytes_by_purpose, draw_clients, draw_tests
from glocal.report.drawing import BACKGROUND, FOREGROUND, colour_theme, figure_html
from glocal.report.formatting import PERCENT, pluralize
from glocal.report.groups import draw_groups, groups_note, groups_table
from glocal.report.new_clients import NEW_CLIENTS_NOTE, new_clients_table
from glocal.report.run_data import ExperimentRecord, RunData, read_run
from glocal.report.tables import client_table, results_note, results_table, scrolling


def write_report(folder: Path) -> Path:
    """Write folder/report.html from the files of a run."""
    run = read_run(folder)
    with colour_theme(FOREGROUND, BACKGROUND):
        sections = [
            _notice(run),
            _results(run),
            _groups(run),
            _new_clients(run),
            _audits(run),
            _figures(run),
            _clients(run),
            _settings(run),
        ]
    return write_page(folder, title=run.settings.name, summary=_summary(run), sections=sections)


def write_page(folder: Path, *, title: str, summary: str, sections: Iterable[str]) -> Path:
    """Write folder/report.html: a title as text, the rest as HTML; empty sections are left out."""
    page = Template(files("glocal.report").joinpath("page.html").read_text(encoding="utf-8"))
    words = {
        "title": escape(title),
        "summary": summary,
        "sections": "\n".join(filter(None, sections)),
    }
    write_text(folder / "report.html", page.substitute(words))
    return folder / "report.html"


def section(title: str, inner: str) -> str:
    """A part of the page under a heading."""
    return f"<section><h2>{title}</h2>\n{inner}</section>"


def figure_grid(figures: Iterable[str]) -> str:
    """Figures side by side, where there is room."""
    return '<div class="figures">\n{}\n</div>'.format("\n".join(figures))


def _summary(run: RunData) -> str:
    """One paragraph: the data, the model, and how it was trained."""
    plan, model = run.settings.plan, run.settings.model
    hidden = (
        f" with hidden layers of {', '.join(map(str, model.hidden))}" if model.name == "mlp" else ""
    )
    seeds = f"repeated with {plan.seeds} seeds" if plan.seeds > 1 else f"with one seed, {plan.seed}"
    rounds = max((run.plan(record).total_rounds for record in run.records), default=0)
    sentences = [
        _data_text(run),
        f"The model is {model.name}{hidden}.",
        _shares_text(run)
        if not run.settings.groups
        else "",  # it is computed for a constant clients_per_round
        f"The study compares {pluralize(len(run.records), 'experiment')} over up to "
        f"{pluralize(rounds, 'round')},",
        f"with {pluralize(plan.clients_per_round, 'client')} per round, {seeds}.",
    ]
    return f"<p>{escape(' '.join(filter(None, sentences)))}</p>"


def _data_text(run: RunData) -> str:
    data, counts = run.settings.data, run.counts
    partitions = {
        "shards": f", each with at most {pluralize(data.classes_per_client, 'class')}",
        "dirichlet": f", each class in proportions drawn from Dirichlet({data.alpha:g})",
        "iid": ", in equal shares at random",
    }
    examples = (
        ""
        if counts is None
        else f": {counts.sum():,} training examples of {pluralize(counts.shape[1], 'class')}"
    )
    partition = "" if ":" in data.source else partitions.get(data.partition, "")
    return f"The data are {data.source}{examples} on {pluralize(run.clients, 'client')}{partition}."


def _shares_text(run: RunData) -> str:
    """What part of its model each experiment shares, if not all; equal ones are named together."""
    shares: dict[str, list[str]] = {}
    for record in run.records:
        if share := _share(record, run.plan(record).clients_per_round):
            shares.setdefault(share, []).append(record.name)
    return " ".join(f"Shared in {', '.join(names)}: {share}." for share, names in shares.items())


def _share(record: ExperimentRecord, clients_per_round: int) -> str:
    """The part of a model that is sent; nothing where all or none of it is.

    It follows from the growth of the paper's count: M + clients_per_round shared trees a round, and
    M whole models in the end.
    """
    counts = [
        row["paper_parameters"] for row in record.rows if row["seed"] == record.rows[0]["seed"]
    ]
    if not record.finished or len(counts) < 2:
        return ""
    clients = len(record.results[0]["clients"])
    shared = (counts[-1] - counts[-2]) / (clients + clients_per_round)
    whole = (record.results[0]["ledger"]["paper"]["parameters"] - counts[-1]) / clients or shared
    if not 0 < shared < whole:
        return ""
    return f"{shared:,.0f} of {whole:,.0f} parameters ({PERCENT * shared / max(1, whole):.0f} %)"


def _notice(run: RunData) -> str:
    """Which experiments are still to be finished, if any."""
    unfinished = [
        f"{escape(record.name)} ({run.progress(record)})"
        for record in run.records
        if not record.finished
    ]
    if not unfinished:
        return ""
    return (
        '<p class="notice"><b>This run is not finished.</b> Unfinished experiments: '
        f"{', '.join(unfinished)}.</p>"
    )


def _results(run: RunData) -> str:
    return section("Results", f'{results_table(run)}\n<p class="note">{results_note(run)}</p>')


def _groups(run: RunData) -> str:
    """The metric of groups that joined, left and drifted; nothing where there are none."""
    if not (drawn := draw_groups(run)):
        return ""
    figures = figure_grid(
        figure_html(drawing, f"g{number}") for number, drawing in enumerate(drawn, start=1)
    )
    note = f'<p class="note">{groups_note(run)}</p>'
    title = f"<h3>{run.metric.name.capitalize()} and forgetting</h3>"
    table = f"{title}\n{groups_table(run)}\n{note}"
    return section("Groups over time", f"{figures}\n{table}")


def _new_clients(run: RunData) -> str:
    table = new_clients_table(run)
    return (
        section("The new client", f'{table}\n<p class="note">{NEW_CLIENTS_NOTE}</p>')
        if table
        else ""
    )


def _audits(run: RunData) -> str:
    source = SOURCES.get(run.settings.data.source)
    table = audits_table(run, [*source.attributes] if source else [])
    return (
        section("What representations reveal", f'{table}\n<p class="note">{AUDITS_NOTE}</p>')
        if table
        else ""
    )


def _figures(run: RunData) -> str:
    """All figures that there are measurements for."""
    draws = (
        draw_validation,
        draw_validation_by_bytes,
        draw_tests,
        draw_clients,
        draw_loss,
        draw_bytes_by_purpose,
    )
    drawn = [drawing for draw in draws if (drawing := draw(run))]
    if not drawn:
        return section("Figures", "<p>Nothing has been measured yet.</p>")
    return section(
        "Figures",
        figure_grid(
            figure_html(drawing, f"f{number}") for number, drawing in enumerate(drawn, start=1)
        ),
    )


def _clients(run: RunData) -> str:
    """Who has which classes, and each experiment's table of clients."""
    classes = (
        ""
        if run.counts is None
        else figure_html(
            draw_partition(run.counts, run.settings.plan.seed), "classes", kind="beside"
        )
    )
    tables = "\n".join(client_table(each, run.metric) for each in run.records if each.results)
    columns = (
        "By experiment and client: the numbers of training, validation and test examples, the "
        f"number of rounds in which it took part, and the {run.metric.name} of its own model on "
        "its own test data."
    )
    note = f'<p class="note">{columns}</p>\n' if tables else ""
    return section("Clients", classes + note + tables) if classes or tables else ""


def _settings(run: RunData) -> str:
    text = escape(json.dumps(run.settings.as_dict(), indent=2, ensure_ascii=False))
    box = scrolling(f"<pre>{text}</pre>", "Settings")
    return section(
        "Settings", f"<details><summary>All settings of this run</summary>\n{box}</details>"
    )
