"""Run every study of the paper with one seed and few rounds, from training to its report.

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
from typing import NamedTuple

from glocal.datasets import source_status
from glocal.report import draw_study, study_markdown, write_study_report
from glocal.studies import Settings, with_overrides
from glocal.studies.findings import read_findings
from glocal.studies.run import resolve
from glocal.studies.settings import ExperimentSettings
from glocal.studies.study import Study
from glocal.studies.study_parts import run_parts, write_study
from liang2020.mood import FINE_TUNED
from liang2020.studies import STUDIES

ROUNDS = 2
LIMIT = 40  # seconds that a study should take on two cores
ALL = ("plan.seeds=1", "plan.restarts=1", 'run.device="cpu"')


class Short(NamedTuple):
    """What makes a study small: its parts, changes of settings, and experiments (all if none)."""

    parts: tuple[str, ...]
    changes: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()


SHORT = {
    "paper-mnist": Short(("paper-2", "released-3"), ("data.keep_clients=4",)),
    "paper-cifar10": Short(("tuned-2", "mtl-10"), ("data.keep_clients=4",)),
    "paper-rotated": Short(
        ("iid", "2-classes"),
        ("data.keep_clients=4", "new_client.train=300", "new_client.test=100"),
    ),
    "paper-adult": Short(
        ("paper-noniid",),
        ("plan.local_epochs=1", "data.clients=100", "data.keep_clients=3"),
        ("FedAvg", "LG + Adv"),
    ),
    "few-labels": Short(("mnist",), ("data.keep_clients=4",)),
    "paper-mood": Short(
        ("14-people",),
        ("data.keep_clients=2",),
        ("FedAvg", "head local, α = .2", "Local only", FINE_TUNED),
    ),
    "paper-vqa": Short(
        ("paper", "questions"),
        (
            "data.keep_clients=3",
            "plan.clients_per_round=2",
            "model.widths=[4, 4, 4, 4]",
            "model.hidden=[32, 32, 64, 32]",
        ),
    ),
}


def main(names: Sequence[str]) -> None:
    """Run the studies of these names, or all."""
    for name in names or STUDIES:
        study = STUDIES[name]
        missing = missing_data(study)
        if missing:
            print(f"{name}: skipped, the data set {missing} is not on this machine", flush=True)
            continue
        seconds = run_short(study)
        late = f", more than {LIMIT}" if seconds > LIMIT else ""
        print(f"{name}: {seconds:.0f} s{late}", flush=True)


def missing_data(study: Study) -> str:
    """The data set that a study needs and this machine lacks; empty if there is none."""
    sources = {part.settings.data.source for part in study.parts.values()}
    absent = sorted(name for name in sources if source_status(name) == "not downloaded")
    return ", ".join(absent)


def run_short(study: Study) -> float:
    """Run some parts of a study with few rounds and write its report; the seconds it took."""
    started = time.perf_counter()
    short = SHORT[study.name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = write_study(study, folder, patterns=short.parts, changes=ALL)
        small = {part: shortened(of_part, short) for part, of_part in settings.items()}
        for _ in run_parts(small, folder):
            pass
        findings = read_findings(folder)
        if set(findings.parts) != set(short.parts):
            raise SystemExit(f"{study.name}: only these parts have results: {[*findings.parts]}")
        study_markdown(findings)
        write_study_report(findings, folder)
        draw_study(findings, folder)
    return time.perf_counter() - started


def shortened(settings: Settings, short: Short) -> Settings:
    """The same with few rounds of few clients in every experiment."""
    small = with_overrides(settings, short.changes)
    clients = min(small.plan.clients_per_round, small.data.keep_clients or small.data.clients)
    experiments = {}
    for name, experiment in small.experiments.items():
        if not short.experiments or name in short.experiments:
            experiments[name] = short_experiment(experiment, clients)
    plan = replace(small.plan, rounds=ROUNDS)
    run = replace(small.run, validate_every=1)
    return resolve(replace(small, experiments=experiments, plan=plan, run=run))


def short_experiment(experiment: ExperimentSettings, clients: int) -> ExperimentSettings:
    """The same with few rounds; one that starts from another starts from its last round."""
    join_plan, pretext = experiment.join_plan, experiment.pretext
    if join_plan is not None:
        epochs = min(join_plan.epochs, 1)
        existing_clients = min(join_plan.existing_clients, 1)
        join_plan = replace(join_plan, rounds=1, epochs=epochs, existing_clients=existing_clients)
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
    main(sys.argv[1:])
