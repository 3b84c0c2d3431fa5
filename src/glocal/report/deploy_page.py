"""The page of a deployed run: losses, participation, each client's figures, and bytes."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from glocal.core.files import Json, read_json, read_rows
from glocal.report.drawing import (
    BACKGROUND,
    FOREGROUND,
    Drawing,
    colour_theme,
    figure_html,
    new_axes,
)
from glocal.report.formatting import pluralize, size
from glocal.report.page import section, write_page
from glocal.report.styles import legend, line_sample, nth_line_style
from glocal.report.tables import boxed_table
from glocal.studies.metric_format import MetricFormat

_PURPOSES = {
    "download": "shared part, to the clients",
    "upload": "shared part, from the clients",
    "evaluation": "shared part, to be tested with",
}


def write_deploy_report(folder: Path) -> Path:
    """Write folder/report.html from the files of a deployed run."""
    live, rows = read_json(folder / "live.json", dict), read_rows(folder / "rows.jsonl")
    result: Json = (
        read_json(folder / "result.json", dict) if (folder / "result.json").exists() else {}
    )
    with colour_theme(FOREGROUND, BACKGROUND):
        with_losses = [row for row in rows if row["losses"]]
        drawn = (
            figure_html(draw_losses(with_losses), "losses", kind="beside")
            if with_losses
            else "<p>No client shares its losses.</p>"
        )
        sections = [
            _notice(live),
            section("Loss by round", drawn),
            section("Clients", _clients(result)) if result else "",
            section("Bytes", _bytes(result["ledger"])) if result else "",
            section("Rounds", _rounds(rows)),
        ]
    return write_page(
        folder,
        title=f"{folder.parent.parent.name}: {folder.name}",
        summary=_summary(live, rows, result),
        sections=sections,
    )


def _notice(live: Json) -> str:
    if live["state"] == "done":
        return ""
    why = f": {live['reason']}" if "reason" in live else ""
    return (
        '<p class="notice"><b>This run is not finished.</b> It is '
        f"{escape(live['state'] + why)}.</p>"
    )


def _summary(live: Json, rows: Sequence[Json], result: Json) -> str:
    clients = {name for row in rows for name in row["clients"]}
    words = (
        f"{pluralize(len(clients), 'client')} trained together over "
        f"{pluralize(len(rows), 'round')} on Flower. "
    )
    if result and result["local_test"]:
        metric = MetricFormat.of_result(result)
        tested = sum(row["test"] is not None for row in result["clients"])
        words += (
            f"The {metric.name} of their own models on their own test data is "
            f"{metric.text(result['local_test']['mean'])} (the mean over the "
            f"{pluralize(tested, 'client')} whose owners consent). "
        )
    if result and result["privacy"]:
        privacy = result["privacy"]
        words += (
            f"Every upload was clipped to the norm {privacy['clip_norm']:g}, with noise of "
            f"{privacy['noise_multiplier']:g} times that. The privacy loss of a client after "
            f"{privacy['rounds']} rounds is epsilon {privacy['epsilon']:.2f} "
            f"at delta {privacy['delta']:g}. "
        )
    words += "Private parts never left the clients."
    return f"<p>{escape(words)}</p>"


def draw_losses(rows: Sequence[Json]) -> Drawing:
    """Each client's loss, round by round; a gap is a round in which it did not count."""
    figure, axes = new_axes()
    names = sorted({name for row in rows for name in row["losses"]})
    for place, name in enumerate(names):
        line_style = nth_line_style(place)
        values = [row["losses"].get(name, float("nan")) for row in rows]
        dashes = (0, line_style.dash) if line_style.dash else "solid"
        axes.plot(
            [row["round"] + 1 for row in rows],
            values,
            line_style.marker,
            color=line_style.colour,
            linestyle=dashes,
            linewidth=1.8,
            markersize=5,
        )
    axes.set(xlabel="round", ylabel="training loss")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    key = legend((line_sample(nth_line_style(place)), name) for place, name in enumerate(names))
    return Drawing(
        figure,
        "Training loss by round",
        "The mean training loss of each client whose owner shares it.",
        key,
    )


def _clients(result: Json) -> str:
    metric = MetricFormat.of_result(result)
    figures = (f"validation: {metric.label}", f"Local Test: {metric.label}")
    heads = ("rounds", "last round", "train", "test", *figures)
    head = (
        '<tr><th class="name" scope="col">client</th>'
        + "".join(f'<th scope="col">{words}</th>' for words in heads)
        + "</tr>"
    )
    dash = "A dash: the client does not share metrics, was not connected, or could not test."
    note = f"Local Test: each client’s own model on its own test data. {dash}"
    rows = [_client(row, metric) for row in result["clients"]]
    return f'{boxed_table(head, rows, "Clients")}\n<p class="note">{note}</p>'


def _client(row: Json, metric: MetricFormat) -> str:
    late = '<span class="small">joined later</span>' if row["new_client"] else ""
    scores = [metric.number(row[part]) for part in ("validation", "test")]
    last = None if row["last_round"] is None else row["last_round"] + 1
    cells = "".join(
        f"<td>{'–' if cell is None else cell}</td>"
        for cell in (row["rounds"], last, row["train_size"], row["test_size"], *scores)
    )
    return f'<tr><th class="name" scope="row">{escape(row["name"])}{late}</th>{cells}</tr>'


def _bytes(ledger: Json) -> str:
    head = '<tr><th class="name" scope="col">what</th><th scope="col">bytes</th></tr>'
    rows = [
        f'<tr><th class="name" scope="row">{words}</th><td>{size(ledger[part]["bytes"])}</td></tr>'
        for part, words in _PURPOSES.items()
    ]
    return boxed_table(head, rows, "Bytes")


def _rounds(rows: Sequence[Json]) -> str:
    heads = ("loss", "clients", "seconds")
    head = '<tr><th scope="col">round</th>' + "".join(
        f'<th scope="col">{words}</th>' for words in heads
    )
    return boxed_table(
        f'{head}<th class="name" scope="col">what happened</th></tr>', map(_round, rows), "Rounds"
    )


def _round(row: Json) -> str:
    loss = "–" if row["loss"] is None else f"{row['loss']:.4f}"
    cells = f"<td>{loss}</td><td>{len(row['clients'])}</td><td>{row['seconds']:.1f}</td>"
    return (
        f'<tr><th scope="row">{row["round"] + 1}</th>{cells}<td '
        f'class="name">{escape("; ".join(_events(row)))}</td></tr>'
    )


def _events(row: Json) -> Iterator[str]:
    yield from (f"dropped {name}: {why}" for name, why in row["dropped"].items())
    yield from (f"{name}: {note}" for name, note in row["notes"].items())
    if row["offline"]:
        yield f"away: {', '.join(row['offline'])}"
