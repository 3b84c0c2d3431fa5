"""Table 1 of the main text: CIFAR-10 with two classes per client."""

from glocal.report.comparison import (
    ComparisonTable,
    Row,
    comparison_row,
    row_names,
    rows_of,
    side_by_side,
)
from glocal.studies.findings import Findings
from glocal.studies.study import Score

MTL_PARTS = {"mtl-10": "MTL, M = 10", "mtl-100": "MTL, M = 100"}
_ROWS = ("FedAvg", "Local only", *MTL_PARTS.values(), "LG 1200+100", "LG 1800+100")
_PROTOCOLS = ("paper", "released", "tuned")
# what the main text prints of Local Test where the appendix prints something else
_LOCAL_TEST = {"LG 1200+100": Score(91.07, 0.50)}
_NOTE = (
    "The paper prints two numbers for LG 1200+100 on Local Test: "
    "91.07 ± 0.50 here, 90.77 ± 0.50 in the appendix."
)


def table_1(findings: Findings) -> ComparisonTable | None:
    """The table with every protocol that was run; None where nothing of it was measured."""
    columns = {protocol: _rows(findings, f"{protocol}-2") for protocol in _PROTOCOLS}
    for part, name in MTL_PARTS.items():
        columns["paper"] += [row._replace(name=name) for row in rows_of(findings, part)]
    measured = {}
    for protocol, rows in columns.items():
        if any(row.measured for row in rows):
            measured[protocol] = rows
    if not measured:
        return None
    table = side_by_side("Table 1 of the main text", findings.study, measured)
    in_order = {name: table.rows[name] for name in _ROWS if name in table.rows}
    return table._replace(rows=in_order, note=_NOTE)


def _rows(findings: Findings, part: str) -> list[Row]:
    """The rows of a part beside what Table 1 prints of them."""
    about = findings.study.parts[part]
    published = dict(about.published)
    for name, local in _LOCAL_TEST.items():
        scores = (local, *published[name].scores[1:])
        published[name] = published[name]._replace(scores=scores)
    return [comparison_row(findings, part, name, published.get(name)) for name in row_names(about)]
