"""What a last batch of one image does to a device at the released code's rate: CIFAR-10, three classes per device, local only.

Ten devices whose examples end in a batch of one, beside ten whose last batch is full or nearly so; training loss by round.

python -m benchmarks.batch_of_one --out docs/results/batch-of-one.json
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from glocal.datasets.fetch import no_progress
from glocal.engines import Executor
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.studies.build import build_algorithm, build_components
from glocal.studies.paper import PAPER
from glocal.studies.run import plans_of
from glocal.studies.settings import with_overrides


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = PAPER["paper-cifar10"].parts["released-3"].settings
    settings = with_overrides(
        settings, ["plan.seeds=1", f"plan.seed={given.seed}", 'run.device="cpu"']
    )
    parts = build_components(settings, no_progress)
    train, batch_size = parts.federations[0].train, settings.plan.batch_size
    ends = train.sizes % batch_size
    one, full = np.flatnonzero(ends == 1), np.flatnonzero((ends == 0) | (ends > 0.8 * batch_size))
    chosen = replace(train, rows=tuple(train.rows[device] for device in [*one[:10], *full[:10]]))
    algorithm = build_algorithm(settings, settings.experiments["Local only"], parts)
    plan = replace(
        plans_of(settings)["Local only"], rounds=given.rounds, clients_per_round=chosen.num_clients
    )
    executor = Executor(
        algorithm.client_update, engine=settings.run.engine_config(), num_calls=given.rounds
    )
    found = {}
    for moment in simulate_seeds(
        algorithm, [Seat(plan, chosen, initial_state(algorithm, parts.params[0], 1))], executor
    ):
        report = moment[0][1]
        losses = report.losses.tolist()
        if (report.round_index + 1) % 20 == 0:
            found[report.round_index + 1] = {
                "a last batch of one": losses[:10],
                "a full last batch": losses[10:],
            }
            print(
                report.round_index + 1,
                *(
                    f"{way}: {np.median(of):.2f}"
                    for way, of in found[report.round_index + 1].items()
                ),
            )
    executor.close()
    if given.out:
        command = f"python -m benchmarks.batch_of_one --rounds {given.rounds} --seed {given.seed} --out {given.out}"
        told = {
            "command": command,
            "devices with a last batch of one, of 100": len(one),
            "training loss by round": found,
        }
        given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
