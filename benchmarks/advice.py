"""Whether the advisor's split is near the best of a full sweep, and what each costs: CIFAR-10, LeNet-5, 100 devices.

The sweep is the paper's protocol: 1800 rounds of FedAvg, then 100 of every split from there, rounds chosen on validation data.
The advisor starts from the same random model, and sees neither the sweep nor test data. Local Test is that of the sweep.

python -m benchmarks.advice --device cuda --classes 2 10 --seeds 1 --out docs/results/advice.json
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import command, describe
from glocal.algorithms import lg_fedavg
from glocal.core.sampling import Plan
from glocal.datasets.fetch import no_progress
from glocal.federate.fitting import Case, fit_case, warm_start_params
from glocal.federate.result import Result
from glocal.personalize.advisor import Advice, AdvisorConfig, advise
from glocal.personalize.advisor.candidates import make_candidates
from glocal.personalize.advisor.search import choose_candidate
from glocal.studies.build import Components, build_algorithm, build_components, build_optimizer
from glocal.studies.paper import PAPER
from glocal.studies.settings import ExperimentSettings, Settings, with_overrides
from glocal.wire import Ledger


def swept(
    settings: Settings, parts: Components, rounds: tuple[int, int]
) -> tuple[dict[str, list[Result]], dict[str, float]]:
    """Every split after one FedAvg, with seconds by case; "FedAvg" is the start."""
    fedavg, splits = rounds
    first = build_algorithm(settings, ExperimentSettings("fedavg"), parts)
    plan = Plan(
        fedavg,
        settings.plan.clients_per_round,
        settings.plan.local_epochs,
        settings.plan.batch_size,
    )
    none = tuple(Ledger() for _ in parts.seeds)
    start = Case(first, parts.model, plan, parts.seeds, parts.params, parts.federations, none)
    found, seconds = {}, {}
    began = time.perf_counter()
    found["FedAvg"], seconds["FedAvg"] = fit_case(start, settings.run), time.perf_counter() - began
    warm = tuple(warm_start_params(result.algorithm, result.state) for result in found["FedAvg"])
    after = replace(start, params=warm, plan=replace(plan, rounds=splits, first_round=fedavg))
    for each in make_candidates(parts.model):
        began = time.perf_counter()
        algorithm = lg_fedavg(
            parts.objective, build_optimizer(settings.optimizer), split=each.split
        )
        found[each.name] = fit_case(replace(after, algorithm=algorithm), settings.run)
        seconds[each.name] = time.perf_counter() - began
        print(
            f"  {each.name}: {[round(100 * (result.local_test or 0), 2) for result in found[each.name]]}",
            flush=True,
        )
    return found, seconds


def advised(settings: Settings, seed: int, rounds: int) -> Advice:
    """What the advisor says, on the same devices."""
    alone = with_overrides(settings, ["plan.seeds=1", f"plan.seed={seed}"])
    parts = build_components(alone, no_progress)
    algorithm = build_algorithm(alone, ExperimentSettings("fedavg"), parts)
    plan = Plan(
        rounds, alone.plan.clients_per_round, alone.plan.local_epochs, alone.plan.batch_size, seed
    )
    return advise(
        algorithm,
        parts.model,
        parts.federations[0],
        plan,
        config=AdvisorConfig(),
        options=alone.run,
    )


def compared(
    found: dict[str, list[Result]], seconds: dict[str, float], place: int, advice: Advice
) -> dict[str, object]:
    """One seed: the advisor's choice beside the sweep, and its cost as a share of the sweep's."""
    results = {name: results[place] for name, results in found.items()}
    local = {
        name: round(100 * (result.local_test or 0.0), 2)
        for name, result in results.items()
        if name != "FedAvg"
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
        "seconds": round(sum(seconds.values()) / len(found["FedAvg"]), 2),
    }
    best = max(local, key=lambda name: local[name])
    rows = advice.rows
    sent_fraction, predicted_error = (
        {row.candidate.name: getattr(row, what) for row in rows}
        for what in ("sent_fraction", "predicted_error")
    )
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
    """Sweep, ask, compare, print, write."""
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
        "--advisor-rounds", type=int, default=100, help="of FedAvg before the advisor's race"
    )
    parser.add_argument("--set", nargs="*", default=[], help="change settings, to try it in small")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    told = {
        "command": command("benchmarks.advice", sys.argv[1:]),
        "machine": describe(given.device),
        "classes per device": {},
    }
    for classes in given.classes:
        settings = PAPER["paper-cifar10"].parts[f"paper-{classes}"].settings
        settings = with_overrides(
            settings, [f"plan.seeds={given.seeds}", f'run.device="{given.device}"', *given.set]
        )
        print(f"{classes} classes per device", flush=True)
        parts = build_components(settings, no_progress)
        asked = [advised(settings, seed, given.advisor_rounds) for seed in parts.seeds]
        found, seconds = swept(settings, parts, tuple(given.rounds))
        rows = [compared(found, seconds, place, advice) for place, advice in enumerate(asked)]
        for row in rows:
            shares = ", ".join(
                f"{name} {100 * share:.1f} %" for name, share in row["share"].items()
            )
            cheaper = f"'{row['choice, bytes preferred']}' {row['gap, bytes preferred']}"
            told_of = f"advised '{row['choice']}', best '{row['best']}', gap {row['gap']} points, with bytes preferred {cheaper}"
            print(f"seed {row['seed']}: {told_of}; cost {shares}", flush=True)
        told["classes per device"][classes] = rows
        if given.out:
            given.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
