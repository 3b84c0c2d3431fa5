"""The effect of a last batch of one image at the released code's learning rate.

CIFAR-10, three classes per client, local training only: ten clients whose last batch has one
example, and ten whose last batch is full or nearly full; training loss by round.

python -m benchmarks.batch_of_one --out papers/liang2020/results/batch-of-one.json
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.simulation import Simulation
from glocal.datasets.fetch import no_progress
from glocal.studies.build import build_algorithm, build_components
from glocal.studies.registry import find_study
from glocal.studies.run import plans_of
from glocal.studies.settings import with_overrides


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = find_study("paper-cifar10").parts["released-3"].settings
    settings = with_overrides(
        settings, ["plan.seeds=1", f"plan.seed={options.seed}", 'run.device="cpu"']
    )
    parts = build_components(settings, no_progress)
    train, batch_size = parts.federations[0].train, settings.plan.batch_size
    last = train.sizes % batch_size
    one = np.flatnonzero(last == 1)
    full = np.flatnonzero((last == 0) | (last > 0.8 * batch_size))
    selected = [*one[:10], *full[:10]]
    chosen = replace(train, rows=tuple(train.rows[client] for client in selected))
    algorithm = build_algorithm(settings, settings.experiments["Local only"], parts)
    plan = replace(
        plans_of(settings)["Local only"],
        rounds=options.rounds,
        clients_per_round=chosen.num_clients,
    )
    engine = settings.run.options().engine_config()
    simulation = Simulation.of(
        algorithm, parts.params[0], train=chosen, plans=[plan], engine=engine
    )
    losses_by_round = {}
    for [(_, report)] in simulation.rounds():
        losses = report.losses.tolist()
        if (report.round_index + 1) % 20 == 0:
            row = {"a last batch of one": losses[:10], "a full last batch": losses[10:]}
            losses_by_round[report.round_index + 1] = row
            print(report.round_index + 1, *(f"{k}: {np.median(v):.2f}" for k, v in row.items()))
    simulation.executor.close()
    if options.out:
        command = (
            f"python -m benchmarks.batch_of_one --rounds {options.rounds} "
            f"--seed {options.seed} --out {options.out}"
        )
        result = {
            "command": command,
            "clients with a last batch of one, of 100": len(one),
            "training loss by round": losses_by_round,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
