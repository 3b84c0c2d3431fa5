"""How soon a goal is reached: a case's accuracy on validation data by round, and what it had sent by then."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from glocal.keep import Json, read_rows
from glocal.studies.run import case_folder, read_settings

_PERCENT = 100


class Reached(NamedTuple):
    """When a seed's accuracy was first at the goal: rounds done, parameters by the paper's count, and bytes on the wire."""

    rounds: int
    parameters: int
    bytes: int


def course(folder: Path, name: str) -> list[Json]:
    """Every validated round of a case, seed by seed, those of the case that it goes on from before its own."""
    case = read_settings(folder).cases[name]
    before = [row for row in course(folder, case.after) if row["round"] <= (case.after_round or 0)] if case.after else []
    rows = [row for row in read_rows(case_folder(folder, name) / "rows.jsonl") if row.get("validation") is not None]
    return before + [
        {
            "seed": row["seed"],
            "round": row["round"] + 1,
            "validation": round(row["validation"], 6),
            "parameters": row["paper_parameters"],
            "bytes": row["bytes"],
        }
        for row in rows
    ]


def goal_of(rows: Sequence[Json]) -> float:
    """The whole percent that every seed of a course reaches in some round; a share.

    >>> goal_of([{"seed": 0, "validation": 0.415}, {"seed": 0, "validation": 0.4}, {"seed": 1, "validation": 0.42}])
    0.41
    >>> goal_of([{"seed": 0, "validation": 0.29}])
    0.29
    """
    best: dict[int, float] = {}
    for row in rows:
        best[row["seed"]] = max(best.get(row["seed"], 0.0), row["validation"])
    whole = math.floor(round(_PERCENT * min(best.values(), default=0.0), 6))  # 100 * 0.29 is 28.999999999999996
    return whole / _PERCENT


def reached(rows: Sequence[Json], goal: float) -> Mapping[int, Reached | None]:
    """When each seed of a course first is at the goal; None where it never is."""
    found: dict[int, Reached | None] = {}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        found.setdefault(row["seed"], None)
        if found[row["seed"]] is None and row["validation"] >= goal:
            found[row["seed"]] = Reached(row["round"], row["parameters"], row["bytes"])
    return found
