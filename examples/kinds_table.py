"""The table of the two examples of kinds: together and alone, mean over seeds, client by client."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glocal import Result


def summarize(kind: str, pairs: Sequence[tuple[Result, Result]]) -> dict[str, Any]:
    """One kind's figures, from its results together and alone, seed by seed."""
    gains = [float(shared.local_spread.mean - own.local_spread.mean) for shared, own in pairs]
    as_good = sum(int((shared.accuracies >= own.accuracies).sum()) for shared, own in pairs)
    sent = [shared.ledger.total.bytes for shared, _ in pairs]
    return {
        "kind": kind,
        "together": [round(shared.local_spread.mean, 4) for shared, _ in pairs],
        "alone": [round(own.local_spread.mean, 4) for _, own in pairs],
        "gain": round(float(np.mean(gains)), 4),
        "gain_standard_error": round(float(np.std(gains, ddof=1) / len(gains) ** 0.5), 4)
        if len(gains) > 1
        else None,
        "at_least_as_good": as_good,
        "clients": sum(len(shared.times_sampled) for shared, _ in pairs),
        "bytes": round(float(np.mean(sent))),
    }


def report(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """For the terminal, and into a file if one is named; clients are counted over all seeds."""
    print(f"{'kind':<10}  {'together':>8}  {'alone':>8}  {'at least as good':>16}  {'sent':>12}")
    for row in rows:
        tests = "  ".join(f"{np.mean(row[way]):>8.1%}" for way in ("together", "alone"))
        as_good = f"{row['at_least_as_good']} of {row['clients']}"
        print(f"{row['kind']:<10}  {tests}  {as_good:>16}  {row['bytes'] / 1e6:>9,.1f} MB")
    if out:
        out.write_text(
            json.dumps({"command": f"python {' '.join(sys.argv)}", "kinds": rows}, indent=1) + "\n"
        )
