"""What operators and owners read: a round, a run and a line of a device's journal, in words."""

from glocal.core.files import Json


def format_round(row: Json) -> str:
    """A round in a line."""
    loss = "" if row["loss"] is None else f"loss {row['loss']:.4f}, "
    lost = "".join(f"; dropped {name}: {why}" for name, why in row["dropped"].items())
    notes = "".join(f"; {name}: {note}" for name, note in row["notes"].items())
    away = f"; away: {', '.join(row['offline'])}" if row["offline"] else ""
    took = f"{row['seconds']:.1f} s, {row['bytes']:,} bytes so far"
    return (
        f"round {row['round'] + 1}: {loss}{len(row['clients'])} devices, {took}{lost}{notes}{away}"
    )


def format_live(live: Json) -> str:
    """What goes on now, in a line."""
    if not live:
        return "the run is being started"
    here = f" ({', '.join(live['connected'])} are there)" if live.get("connected") else ""
    refused = "".join(f"; refused {name}: {why}" for name, why in live.get("refused", {}).items())
    if live["state"] == "waiting for devices":
        return f"waiting for devices{here}{refused}"
    if live["state"] == "training":
        return f"round {live['round'] + 1} of {live['rounds']} is under way{here}{refused}"
    return "devices test their own models" if live["state"] == "testing" else str(live["state"])


def format_journal_entry(row: Json) -> str:
    """A line of a device's journal as its owner reads it."""
    trained = "bytes" in row
    sent = (
        f": {row['bytes']:,} bytes, tensors {', '.join(row['tensors'])}; it counts as {row['num_examples']}"
        if trained
        else ""
    )
    told = ", ".join(f"{name} {value:.4g}" for name, value in (row.get("metrics") or {}).items())
    metrics = f"; figures sent: {told}" if told else ""
    missed_rounds = f"; it was away for {row['missed_rounds']}" if "missed_rounds" in row else ""
    note = f"; the server is told: {row['note']}" if "note" in row else ""
    why = f": {row['reason']}" if "reason" in row else ""
    when = f"round {row['round'] + 1}" if trained else f"after {row['round']} rounds"
    return f"{row['run']}, {when}: {row['what']}{sent}{why}{metrics}{note}{missed_rounds}"
