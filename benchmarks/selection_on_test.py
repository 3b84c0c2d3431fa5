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
from glocal.federate.fitting import Case, move_to_device, warm_start_params

from glocal.core.modules import predictor
from glocal.core.trees import Params
from glocal.datasets.fetch import no_progress
from glocal.engines import Executor
from glocal.evaluate import Evaluator, local_tests
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.studies.build import build_algorithm, build_components
from glocal.studies.registry import find_study
from glocal.studies.run import plans_of, resolve
from glocal.studies.settings import ExperimentSettings, Settings, with_overrides
from glocal.wire import Ledger


def measure(
    settings: Settings, name: str, starts: tuple[Params, ...] | None = None
) -> tuple[dict[str, float], tuple[Params, ...]]:
    """Local Test in percent, by way to select the round, and the trained models.

    The ways: the last round, the best common round on test data, and every client's own best round.
    """
    parts = build_components(settings, no_progress)
    algorithm, plan = (
        build_algorithm(settings, settings.experiments[name], parts),
        plans_of(settings)[name],
    )
    ledgers = tuple(Ledger() for _ in parts.seeds)
    experiment = move_to_device(
        Case(
            algorithm,
            parts.model,
            plan,
            parts.seeds,
            starts or parts.params,
            parts.federations,
            ledgers,
        ),
        settings.run,
    )
    executor = Executor(
        algorithm.client_update, engine=settings.run.engine_config(), num_calls=plan.rounds
    )
    evaluation = Evaluator(algorithm, predictor(parts.model), engine=settings.run.engine_config())
    states = [initial_state(algorithm, params, len(parts.seeds)) for params in experiment.params]
    seats = [
        Seat(plan, fed.train, state)
        for plan, fed, state in zip(experiment.plans(), experiment.federations, states, strict=True)
    ]
    tests, accuracies = [fed.test for fed in experiment.federations], []
    for moment in simulate_seeds(algorithm, seats, executor):
        states = [state for state, _ in moment]
        if algorithm.name != "fedavg":
            accuracies.append(local_tests(evaluation, states, tests))
    executor.close()
    evaluation.close()
    models = (
        tuple(warm_start_params(algorithm, state) for state in states) if states[0].shared else ()
    )
    return _summarize(np.array(accuracies)) if accuracies else {}, models


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
                starts = measure(first, "FedAvg")[1]
            rows[name], _ = measure(settings, name, starts)
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
