"""Run every study of the paper in small: one seed, few rounds, from training to its report.

    python papers/liang2020/short_runs.py             # all of them
    python papers/liang2020/short_runs.py paper-vqa   # some of them

A study whose data set is not on this machine is skipped.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from glocal.datasets import source_status
from glocal.report import draw_study, study_markdown, write_study_report
from glocal.studies import Settings, with_overrides
from glocal.studies.findings import read_findings
from glocal.studies.run import resolve
from glocal.studies.settings import ExperimentSettings
from glocal.studies.study import Study
from glocal.studies.study_parts import run_parts, write_study
from liang2020.studies import STUDIES

ROUNDS = 2
LIMIT = 40  # seconds that a study should take on two cores
ALL = ("plan.seeds=1", "plan.restarts=1", 'run.device="cpu"')
# what makes a study small: the parts that run, and changes of their settings
SMALL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "paper-mnist": (("paper-2", "released-3", "tuned-2"), ()),
    "paper-cifar10": (("paper-2", "mtl-10"), ("data.keep_clients=10",)),
    "paper-rotated": (("iid", "2-classes"), ()),
    "paper-adult": (("paper-iid", "tuned-noniid", "code-2"), ("plan.local_epochs=1",)),
    "few-labels": (("mnist",), ()),
    "paper-mood": (("14-people",), ()),
    "paper-vqa": (
        ("paper", "questions"),
        (
            "data.keep_clients=4",
            "plan.clients_per_round=2",
            "model.widths=[8, 8, 8, 8]",
            "model.hidden=[32, 32, 64, 32]",
        ),
    ),
}


def main(names: Sequence[str]) -> int:
    """Run the studies of these names, or all; the number of those that took too long."""
    slow = 0
    for name in names or STUDIES:
        study = STUDIES[name]
        missing = missing_data(study)
        if missing:
            print(f"{name}: skipped, the data set {missing} is not on this machine", flush=True)
            continue
        seconds = run_short(study)
        slow += seconds > LIMIT
        late = f", more than {LIMIT}" if seconds > LIMIT else ""
        print(f"{name}: {seconds:.0f} s{late}", flush=True)
    return slow


def missing_data(study: Study) -> str:
    """The data set that a study needs and this machine lacks; empty if there is none."""
    sources = {part.settings.data.source for part in study.parts.values()}
    absent = sorted(name for name in sources if source_status(name) == "not downloaded")
    return ", ".join(absent)


def run_short(study: Study) -> float:
    """Run some parts of a study in small and write its report; the seconds that it took."""
    started = time.perf_counter()
    parts, changes = SMALL[study.name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = write_study(study, folder, patterns=parts, changes=ALL)
        short = {part: shortened(of, changes) for part, of in settings.items()}
        for _ in run_parts(short, folder):
            pass
        findings = read_findings(folder)
        if set(findings.parts) != set(parts):
            raise SystemExit(f"{study.name}: only {', '.join(findings.parts)} found anything")
        study_markdown(findings)
        write_study_report(findings, folder)
        draw_study(findings, folder)
    return time.perf_counter() - started


def shortened(settings: Settings, changes: Sequence[str]) -> Settings:
    """The same with few rounds of few clients in every experiment."""
    small = with_overrides(settings, changes)
    clients = min(small.plan.clients_per_round, small.data.keep_clients or small.data.clients)
    experiments = {}
    for name, experiment in small.experiments.items():
        experiments[name] = short_experiment(experiment, clients)
    plan = replace(small.plan, rounds=ROUNDS)
    run = replace(small.run, validate_every=1)
    return resolve(replace(small, experiments=experiments, plan=plan, run=run))


def short_experiment(experiment: ExperimentSettings, clients: int) -> ExperimentSettings:
    """The same with few rounds, which go on from the last of those before."""
    join_plan, pretext = experiment.join_plan, experiment.pretext
    if join_plan is not None:
        epochs = min(join_plan.epochs, 1)
        join_plan = replace(join_plan, rounds=1, epochs=epochs)
    if pretext is not None:
        pretrain_epochs = min(pretext.pretrain_epochs, 1)
        pretext = replace(pretext, pretrain_epochs=pretrain_epochs)
    return replace(
        experiment,
        rounds=1 if experiment.start_from else ROUNDS,
        start_round=ROUNDS if experiment.start_from else None,
        clients_per_round=clients,
        join_plan=join_plan,
        pretext=pretext,
    )


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
