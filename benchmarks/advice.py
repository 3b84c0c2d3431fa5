"""The advisor's split and its cost, compared with a full sweep: CIFAR-10, LeNet-5, 100 clients.

The sweep is the paper's protocol: 1800 rounds of FedAvg, then 100 rounds of every split from there;
rounds are selected on validation data. The advisor starts from the same random model and uses
neither the sweep nor test data. Local Test is that of the sweep.

python -m benchmarks.advice --device cuda --classes 2 10 --seeds 1 --out docs/results/advice.json
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import command, describe
from glocal.algorithms import LGFedAvg
from glocal.core.sampling import Plan
from glocal.datasets.fetch import no_progress
from glocal.federate.experiment import Experiment, Group
from glocal.federate.fit import warm_start_params
from glocal.federate.group_result import GroupResult
from glocal.federate.run import Run
from glocal.personalize.advisor import Advice, AdvisorConfig, advise
from glocal.personalize.advisor.candidates import make_candidates
from glocal.personalize.advisor.search import choose_candidate
from glocal.studies.build import Components, build_algorithm, build_components
from glocal.studies.registry import find_study
from glocal.studies.settings import ExperimentSettings, Settings, with_overrides
from glocal.wire import Ledger


def run_sweep(
    settings: Settings, parts: Components, rounds: tuple[int, int]
) -> tuple[dict[str, list[GroupResult]], dict[str, float]]:
    """Every split after FedAvg, and the seconds of each experiment."""
    fedavg, splits = rounds
    first = build_algorithm(settings, ExperimentSettings("fedavg"), parts)
    sizes = settings.plan
    plan = Plan(fedavg, sizes.clients_per_round, sizes.local_epochs, sizes.batch_size)
    group = Group(first, parts.federations, params=parts.params)
    evaluation = settings.run.evaluation()
    start = Experiment((group,), plan, seeds=parts.seeds, evaluation=evaluation)
    results, seconds = {}, {}
    results["FedAvg"], seconds["FedAvg"] = run_timed(start, settings)
    warm = tuple(warm_start_params(result.algorithm, result.state) for result in results["FedAvg"])
    plan = replace(plan, rounds=splits, first_round=fedavg)
    for candidate in make_candidates(parts.model):
        split = candidate.split
        algorithm = LGFedAvg(
            first.task,
            local=sorted(split.local),
            shared=sorted(split.shared),
            optimizer=first.optimizer,
        )
        group = Group(algorithm, parts.federations, params=warm)
        after = replace(start, groups=(group,), plan=plan)
        results[candidate.name], seconds[candidate.name] = run_timed(after, settings)
        local = [_percent(result.local_test) for result in results[candidate.name]]
        print(f"  {candidate.name}: {local}", flush=True)
    return results, seconds


def run_timed(experiment: Experiment, settings: Settings) -> tuple[list[GroupResult], float]:
    """The result of each seed, and the seconds of all."""
    started = time.perf_counter()
    result = Run(experiment, options=settings.run.options()).to_end()
    return list(result.groups), time.perf_counter() - started


def _percent(accuracy: float | None) -> float:
    return round(100 * (accuracy or 0), 2)


def run_advisor(settings: Settings, seed: int, rounds: int) -> Advice:
    """The advisor's result on the same clients."""
    one_seed = with_overrides(settings, ["plan.seeds=1", f"plan.seed={seed}"])
    parts = build_components(one_seed, no_progress)
    algorithm = build_algorithm(one_seed, ExperimentSettings("fedavg"), parts)
    sizes = one_seed.plan
    plan = Plan(rounds, sizes.clients_per_round, sizes.local_epochs, sizes.batch_size, seed)
    return advise(
        algorithm,
        parts.federations[0],
        plan,
        config=AdvisorConfig(),
        options=one_seed.run.options(),
    )


def compare(
    sweep: dict[str, list[GroupResult]], seconds: dict[str, float], place: int, advice: Advice
) -> dict[str, object]:
    """One seed: the advisor's choice beside the sweep, and its cost as a share of the sweep's."""
    results = {name: by_seed[place] for name, by_seed in sweep.items()}
    local = {
        name: _percent(result.local_test) for name, result in results.items() if name != "FedAvg"
    }
    cost = advice.as_dict()["cost"]
    ours = {
        "bytes": cost["ledger"]["total"]["bytes"],
        "bytes, validation apart": _training(advice.cost.ledger),
        "updates": cost["updates"],
        "seconds": round(advice.seconds, 2),
    }
    whole = {
        "bytes": sum(result.ledger.total.bytes for result in results.values()),
        "bytes, validation apart": sum(_training(result.ledger) for result in results.values()),
        "updates": sum(
            result.plan.rounds * result.plan.clients_per_round for result in results.values()
        ),
        "seconds": round(sum(seconds.values()) / len(sweep["FedAvg"]), 2),
    }
    best = max(local, key=lambda name: local[name])
    rows = advice.rows
    sent_fraction = {row.candidate.name: row.sent_fraction for row in rows}
    predicted_error = {row.candidate.name: row.predicted_error for row in rows}
    cheaper = (
        choose_candidate(advice.equally_good, sent_fraction, predicted_error, "bytes")
        if advice.ran_halving
        else advice.choice.name
    )
    return {
        "seed": results["FedAvg"].plan.seed,
        "local test": local,
        "best": best,
        "choice": advice.choice.name,
        "gap": round(local[best] - local[advice.choice.name], 2),
        "choice, bytes preferred": cheaper,
        "gap, bytes preferred": round(local[best] - local[cheaper], 2),
        "advisor": ours,
        "sweep": whole,
        "share": {name: round(ours[name] / whole[name], 4) for name in ours},
        "advice": advice.as_dict(),
    }


def _training(ledger: Ledger) -> int:
    return ledger.download.bytes + ledger.upload.bytes


def main() -> None:
    """Run sweep and advisor, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", nargs="+", default=["2", "10"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--rounds",
        type=int,
        nargs=2,
        default=(1800, 100),
        help="of FedAvg, and of every split after it",
    )
    parser.add_argument(
        "--advisor-rounds",
        type=int,
        default=100,
        help="of FedAvg before the advisor's successive halving",
    )
    parser.add_argument("--set", nargs="*", default=[], help="override settings, for a small trial")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "command": command("benchmarks.advice", sys.argv[1:]),
        "machine": describe(options.device),
        "classes per client": {},
    }
    for classes in options.classes:
        settings = find_study("paper-cifar10").parts[f"paper-{classes}"].settings
        settings = with_overrides(
            settings,
            [f"plan.seeds={options.seeds}", f'run.device="{options.device}"', *options.set],
        )
        print(f"{classes} classes per client", flush=True)
        parts = build_components(settings, no_progress)
        advice = [run_advisor(settings, seed, options.advisor_rounds) for seed in parts.seeds]
        sweep, seconds = run_sweep(settings, parts, tuple(options.rounds))
        rows = [compare(sweep, seconds, place, each) for place, each in enumerate(advice)]
        for row in rows:
            shares = ", ".join(
                f"{name} {100 * share:.1f} %" for name, share in row["share"].items()
            )
            cheaper = f"'{row['choice, bytes preferred']}' {row['gap, bytes preferred']}"
            choice = f"advised '{row['choice']}', best '{row['best']}', gap {row['gap']} points"
            print(
                f"seed {row['seed']}: {choice}, with bytes preferred {cheaper}; cost {shares}",
                flush=True,
            )
        result["classes per client"][classes] = rows
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
