"""The table of the two examples of groups: together and alone, mean over seeds, by client."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glocal import Experiment, Group, GroupResult, Options, Plan, Run

Results = dict[str, GroupResult]


def train_together(groups: Sequence[Group], plan: Plan, options: Options) -> Results:
    """The result of every group."""
    experiment = Experiment(tuple(groups), plan, seeds=(plan.seed,))
    return Run(experiment, options=options).to_end().by_group


def summarize(group: str, pairs: Sequence[tuple[GroupResult, GroupResult]]) -> dict[str, Any]:
    """One group's figures, from its results together and alone, seed by seed."""
    gains = [float(shared.local_spread.mean - own.local_spread.mean) for shared, own in pairs]
    as_good = sum(int((shared.by_client >= own.by_client).sum()) for shared, own in pairs)
    sent = [shared.ledger.total.bytes for shared, _ in pairs]
    return {
        "group": group,
        "together": [round(shared.local_spread.mean, 4) for shared, _ in pairs],
        "alone": [round(own.local_spread.mean, 4) for _, own in pairs],
        "gain": round(float(np.mean(gains)), 4),
        "gain_standard_error": round(float(np.std(gains, ddof=1) / len(gains) ** 0.5), 4)
        if len(gains) > 1
        else None,
        "at_least_as_good": as_good,
        "clients": sum(shared.num_clients for shared, _ in pairs),
        "bytes": round(float(np.mean(sent))),
    }


def report(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """For the terminal, and into a file if one is named; clients are counted over all seeds."""
    print(f"{'group':<10}  {'together':>8}  {'alone':>8}  {'at least as good':>16}  {'sent':>12}")
    for row in rows:
        tests = "  ".join(f"{np.mean(row[way]):>8.1%}" for way in ("together", "alone"))
        as_good = f"{row['at_least_as_good']} of {row['clients']}"
        print(f"{row['group']:<10}  {tests}  {as_good:>16}  {row['bytes'] / 1e6:>9,.1f} MB")
    if out:
        out.write_text(
            json.dumps({"command": f"python {' '.join(sys.argv)}", "groups": rows}, indent=1) + "\n"
        )
