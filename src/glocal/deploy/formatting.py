"""One-line texts for operators and owners: a round, a run, an entry of a client's journal."""

from collections.abc import Iterator, Mapping, Sequence

from glocal.core.files import Json


def format_round(row: Json) -> str:
    """A round in one line."""
    loss = "" if row["loss"] is None else f"loss {row['loss']:.4f}, "
    line = (
        f"round {row['round'] + 1}: {loss}{len(row['clients'])} clients, "
        f"{row['seconds']:.1f} s, {row['bytes']:,} bytes so far"
    )
    for name, reason in row["dropped"].items():
        line += f"; dropped {name}: {reason}"
    for name, note in row["notes"].items():
        line += f"; {name}: {note}"
    if row["offline"]:
        line += f"; offline: {', '.join(row['offline'])}"
    return line


def describe_missed(rows: Sequence[Json]) -> str:
    """The rounds that a client missed, and how the mean loss changed in them; "" for none."""
    if not rows:
        return ""
    first, last = rows[0]["round"] + 1, rows[-1]["round"] + 1
    rounds = f"round {first}" if len(rows) == 1 else f"{len(rows)} rounds, {first} to {last}"
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    if not losses:
        return rounds
    return f"{rounds}; the mean loss went from {losses[0]:.3f} to {losses[-1]:.3f}"


def format_live(live: Json) -> str:
    """A run's current state in one line."""
    if not live:
        return "starting the run"
    details = f" (connected: {', '.join(live['connected'])})" if live.get("connected") else ""
    for name, reason in live.get("refused", {}).items():
        details += f"; refused {name}: {reason}"
    if live["state"] == "waiting for clients":
        return f"waiting for clients{details}"
    if live["state"] == "training":
        return f"round {live['round'] + 1} of {live['rounds']} in progress{details}"
    if live["state"] == "evaluating":
        return "clients evaluate their own models"
    return str(live["state"])


def format_journal_entry(row: Json) -> str:
    """An entry of a client's journal in one line."""
    trained = "bytes" in row
    moment = f"round {row['round'] + 1}" if trained else f"after {row['round']} rounds"
    line = f"{row['run']}, {moment}: {row['event']}"
    if trained:
        tensors = ", ".join(row["tensors"])
        line += f": {row['bytes']:,} bytes, tensors {tensors}; weight {row['num_examples']}"
    if "reason" in row:
        line += f": {row['reason']}"
    metrics = row.get("metrics") or {}
    if metrics:
        line += f"; metrics sent: {', '.join(_format_metrics(metrics))}"
    if "note" in row:
        line += f"; note to the server: {row['note']}"
    if "missed_rounds" in row:
        line += f"; it was offline for {row['missed_rounds']}"
    return line


def _format_metrics(metrics: Mapping[str, object]) -> Iterator[str]:
    """Metrics by name; of a sum the mean, and those of a part of the data with its name."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from (f"{name} {text}" for text in _format_metrics(value))
        elif isinstance(value, list):
            total, weight = value
            yield f"{name} {total / weight if weight else 0:.4g}"
        else:
            yield f"{name} {value:.4g}"
