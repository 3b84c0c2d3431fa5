"""The numbers that the paper prints, from published.csv."""

import csv
from collections.abc import Mapping
from importlib.resources import files

from glocal.studies.study import PublishedRow, Score


def published(table: str, classes: int) -> dict[str, PublishedRow]:
    """The rows that the paper prints for one split, by experiment."""
    text = files("liang2020").joinpath("published.csv").read_text(encoding="utf-8")
    rows = [
        row
        for row in csv.DictReader(text.splitlines())
        if row["table"] == table and row["classes"] == str(classes)
    ]
    return {row["experiment"]: _row(row) for row in rows}


def _row(row: Mapping[str, str]) -> PublishedRow:
    scores = tuple(
        Score(float(row[key]), float(row[f"{key}_std"]))
        for key in ("first", "second", "third")
        if row[key]
    )
    if not row["parameters"]:
        return PublishedRow(scores)
    return PublishedRow(scores, float(row["parameters"]), int(row["exponent"] or 0))
