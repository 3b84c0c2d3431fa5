"""Findings of a made-up study: what reports are tested on."""

from dataclasses import replace
from typing import Any

from glocal.studies.findings import Findings
from glocal.studies.settings import ExperimentSettings, Settings
from glocal.studies.study import PublishedRow, Score, Study, StudyPart

ABOUT = {
    "command": "glocal run paper",
    "version": "0.1.0",
    "machine": {"device": "a GPU", "torch": "2.11", "python": "3.12"},
}


def with_figures(findings: Findings, part: str, experiment: str, **changes: object) -> Findings:
    """The same, with other values of one experiment."""
    of = findings.parts[part]
    experiments = {**of["experiments"], experiment: {**of["experiments"][experiment], **changes}}
    return replace(findings, parts={**findings.parts, part: {**of, "experiments": experiments}})


def lines_of(text: str, title: str) -> dict[str, list[str]]:
    """The cells of a table of the text by the first one of each row."""
    _, _, after = text.partition(f"### {title}\n")
    rows = [
        line.strip("| ").split(" | ")
        for line in after.partition("\n### ")[0].splitlines()
        if line.startswith("|")
    ]
    return {cells[0]: cells[1:] for cells in rows}


# a study of more measures than are published; two of them are better if less
BOTTLENECKS = {width: (0.1, 1.0, 10.0) for width in (4, 16)}
CHOICES = {
    f"LG + Adv, bottleneck {width}, strength {strength:g}": f"width {width}, strength {strength:g}"
    for width, of in BOTTLENECKS.items()
    for strength in of
}
NAMES = tuple(CHOICES)
FAIR_SETTINGS = Settings(
    name="fair",
    experiments={name: ExperimentSettings("fedavg", rounds=2) for name in ("FedAvg", *NAMES)},
)
PUBLISHED = {
    "FedAvg": PublishedRow((Score(83.7, 3.1), Score(89.4, 1.9), Score(65.5, 1.6))),
    "LG": PublishedRow((Score(84.3, 2.4), Score(89.0, 2.2), Score(63.3, 3.7))),
    "LG + Adv": PublishedRow((Score(82.1, 1.0), Score(85.7, 1.7), Score(50.1, 1.3))),
}
FAIR = Study(
    name="fair",
    title="Adult",
    source="nobody 2026, table 0",
    statement="An adversary hides protected attributes.",
    parts={
        name: StudyPart(
            f"{name} data",
            "paper",
            FAIR_SETTINGS,
            PUBLISHED,
            candidates={"FedAvg": ("FedAvg",), "LG + Adv": NAMES},
            choices=CHOICES,
            leak_limits={"LG + Adv": 0.6},
        )
        for name in ("iid", "non-iid")
    },
    measures={
        "local": "Accuracy",
        "auc": "Income AUC",
        "adversary": "Adversary AUC",
        "fresh": "Fresh AUC",
    },
    lower_is_better=frozenset({"adversary", "fresh"}),
    caption="Figures.",
)


def fair_experiment(accuracy: float, read: float, adversary: float | None) -> dict[str, Any]:
    """Two seeds, one a point above and one a point below."""
    figures = {
        "local": accuracy,
        "auc": 0.88,
        "adversary": adversary,
        "fresh": read,
        "validation": accuracy,
        "validation_leak": read,
    }
    seeds = {
        key: [None if mean is None else round(mean + by, 6) for by in (0.01, -0.01)]
        for key, mean in figures.items()
    }
    return {**seeds, "paper_parameters": 10**9, "parameters": 10**8, "bytes": 4 * 10**8}


def fair_part() -> dict[str, Any]:
    """The stronger the adversary, the less is read and the less is known."""
    experiments = {"FedAvg": fair_experiment(0.84, 0.8, None)}
    for width, strengths in BOTTLENECKS.items():
        for place, strength in enumerate(strengths):
            read, accuracy = 0.75 - 0.1 * place + width / 1000, 0.84 - 0.01 * place
            experiments[f"LG + Adv, bottleneck {width}, strength {strength:g}"] = fair_experiment(
                accuracy, read, 0.52
            )
    return {"seconds": 1.0, "settings": FAIR_SETTINGS.as_dict(), "experiments": experiments}
