"""One-line texts for operators and owners: a round, a run, an entry of a client's journal."""

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
        line += "; metrics sent: "
        line += ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    if "note" in row:
        line += f"; note to the server: {row['note']}"
    if "missed_rounds" in row:
        line += f"; it was offline for {row['missed_rounds']}"
    return line
