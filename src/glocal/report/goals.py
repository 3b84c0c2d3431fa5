"""How soon each row of a part reaches the goal: as a table, and accuracy by round as a figure like the paper's."""

import math
from typing import NamedTuple

from glocal.report.comparison import row_names
from glocal.report.drawing import Drawing, panel, trace
from glocal.report.looks import COLOURS, Look, legend, line_sample
from glocal.report.numerals import PERCENT, size
from glocal.studies.findings import Findings
from glocal.studies.goals import Reached, goal_of, reached

GOAL_HEADS = ("Method", "Rounds", "Parameters sent", "Of those of the goal’s row", "On the wire")
_LOOKS = (
    Look(COLOURS[1], (6, 2), "s"),
    Look(COLOURS[0], (), "o"),
    Look(COLOURS[2], (2, 1.6), "^"),
    Look(COLOURS[3], (7, 2, 2, 2), "D"),
)


class Soon(NamedTuple):
    """A row's way to the goal; None where it never gets there. `share` is of the parameters of the row that sets the goal."""

    row: str
    way: Reached | None
    share: float


def goal_told(findings: Findings, part: str) -> str:
    """What the goal is."""
    aim, row = goal(findings, part), findings.study.parts[part].goal
    return (
        f"The goal is {PERCENT * aim:.1f} % on validation data: the best that {row} reaches, in the mean over seeds. Parameters by "
        "the paper’s count, until the mean over seeds is there."
    )


def goal(findings: Findings, part: str) -> float:
    """The goal of a part, a share; 0 where its row was not measured."""
    return goal_of((findings.case(part, findings.study.parts[part].goal) or {}).get("course", []))


def ways_to_goal(findings: Findings, part: str) -> list[Soon]:
    """Every row of a part that sends anything; none where there is no goal, or its row was not measured."""
    of, aim = findings.study.parts[part], goal(findings, part)
    if not of.goal or not aim or part not in findings.parts:
        return []
    first = reached((findings.case(part, of.goal) or {})["course"], aim)
    found = []
    for row in row_names(of):
        course = (findings.case(part, row) or {}).get("course", [])
        if first and any(point["parameters"] for point in course):
            way = reached(course, aim)
            found.append(Soon(row, way, way.parameters / first.parameters if way else math.inf))
    return found


def goal_cells(soon: Soon) -> tuple[str, ...]:
    """A row of the table."""
    if soon.way is None:
        return soon.row, "never", *("-",) * (len(GOAL_HEADS) - 2)
    sent = f"{soon.way.parameters:.2e}".replace("e+", "e")
    return soon.row, str(soon.way.rounds), sent, f"{PERCENT * soon.share:.1f} %", size(soon.way.bytes)


def draw_goal(findings: Findings) -> Drawing | None:
    """Accuracy by round of every row that sends anything, and the goal, of the last part that has one and was measured."""
    parts = [part for part in findings.study.parts if ways_to_goal(findings, part)]
    if not parts:
        return None
    part = "longer" if "longer" in parts else parts[-1]
    figure, axes = panel(3.6)
    looks = dict(zip((soon.row for soon in ways_to_goal(findings, part)), _LOOKS, strict=False))
    for row, look in looks.items():
        by_round: dict[int, list[float]] = {}
        for point in (findings.case(part, row) or {})["course"]:
            by_round.setdefault(point["round"], []).append(PERCENT * point["validation"])
        trace(
            axes, [float(number) for number in sorted(by_round)], [by_round[number] for number in sorted(by_round)], look, label=row
        )
    axes.axhline(PERCENT * goal(findings, part), color=COLOURS[7], linestyle=":", linewidth=1.4)
    axes.set(xlabel="round", ylabel="accuracy on validation data, %")
    about = findings.study.parts[part]
    caption = (
        f"Accuracy by round, {about.title}, protocol `{about.protocol}`, as in the paper’s figure but on validation data; the "
        "dotted line is the goal. Rows that go on from FedAvg have its rounds before their own. A line is the mean over seeds, its "
        "band reaches from the lowest to the highest."
    )
    return Drawing(figure, "Accuracy by round", caption, legend((line_sample(look), row) for row, look in looks.items()))
