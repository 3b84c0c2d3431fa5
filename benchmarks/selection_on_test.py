"""The effect on Local Test if every client selects its round *on its test data*.

The paper's released code does so; no study of ours does. CIFAR-10, for local training only and for
LG-FedAvg from round 1000 on.

python -m benchmarks.selection_on_test --device cuda \\
    --out papers/liang2020/results/selection-on-test.json
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import numpy as np

from glocal.core.trees import Params
from glocal.datasets.fetch import no_progress
from glocal.evaluate import Evaluator, local_tests
from glocal.federate.experiment import Experiment, Group
from glocal.federate.fit import warm_start_params
from glocal.federate.options import Evaluation
from glocal.federate.run import Run
from glocal.studies.build import build_algorithm, build_components
from glocal.studies.registry import find_study
from glocal.studies.run import plans_of, resolve
from glocal.studies.settings import ExperimentSettings, Settings, with_overrides


def measure(
    settings: Settings, name: str, starts: tuple[Params, ...] | None = None
) -> dict[str, float]:
    """Local Test in percent, by way to select the round.

    The ways: the last round, the best common round on test data, and every client's own best round.
    """
    run = start(settings, name, starts)
    options = run.options
    placed = run.experiment.to(options.torch_device())
    tests = [data.test for data in placed.groups[0].data]
    evaluator = Evaluator(run.experiment.algorithm, engine=options.engine_config())
    accuracies = []
    for _ in run:
        states = [state.group() for state in run.progress.states]
        accuracies.append(local_tests(evaluator, states, tests))
    evaluator.close()
    return _summarize(np.array(accuracies))


def trained_models(settings: Settings, name: str) -> tuple[Params, ...]:
    """What others start from, for each seed."""
    run = start(settings, name)
    for _ in run:
        pass
    algorithm = run.experiment.algorithm
    return tuple(warm_start_params(algorithm, state.group()) for state in run.progress.states)


def start(settings: Settings, name: str, starts: tuple[Params, ...] | None = None) -> Run:
    """The run of an experiment, without validation before its end."""
    parts = build_components(settings, no_progress)
    algorithm = build_algorithm(settings, settings.experiments[name], parts)
    plan = plans_of(settings)[name]
    group = Group(algorithm, parts.federations, params=starts or parts.params)
    evaluation = Evaluation(every=plan.rounds, new_test=False)
    experiment = Experiment((group,), plan, seeds=parts.seeds, evaluation=evaluation)
    return Run(experiment, options=settings.run.options())


def _summarize(accuracies: np.ndarray) -> dict[str, float]:
    """From accuracies (rounds, seeds, clients) to percent."""
    common = accuracies.mean(2)
    ways = {
        "last round": common[-1],
        "best round on test data": common.max(0),
        "each client's own best": accuracies.max(0).mean(1),
    }
    return {way: round(100 * fmean(values.tolist()), 2) for way, values in ways.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", nargs="+", default=["2", "5", "10"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--experiments", nargs="+", default=["Local only", "LG 1000+100"])
    parser.add_argument("--set", nargs="*", default=[], help="override settings, for a small trial")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows_by_classes = {}
    for classes in options.classes:
        part = find_study("paper-cifar10").parts[f"released-{classes}"]
        settings = with_overrides(
            part.settings,
            [f"plan.seeds={options.seeds}", f'run.device="{options.device}"', *options.set],
        )
        settings = resolve(with_overrides(settings, ["experiments.FedAvg.rounds=1800"]))
        rows = {}
        for name in options.experiments:
            starts = None
            if settings.experiments[name].start_from:
                first = Settings(
                    **{
                        **vars(settings),
                        "experiments": {"FedAvg": ExperimentSettings("fedavg", rounds=1000)},
                    }
                )
                starts = trained_models(first, "FedAvg")
            rows[name] = measure(settings, name, starts)
            published = part.published[name].scores[0].mean
            print(f"{classes} classes, {name}: {rows[name]}, published {published}", flush=True)
            rows[name] = {**rows[name], "published": published}
        rows_by_classes[classes] = rows
    if options.out:
        command = (
            f"python -m benchmarks.selection_on_test --seeds {options.seeds} "
            f"--device {options.device} --out {options.out}"
        )
        options.out.write_text(
            json.dumps({"command": command, "classes per client": rows_by_classes}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
