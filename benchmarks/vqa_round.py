"""One round of LG-FedAvg with the full network of 54 million numbers: its seconds and peak memory, as JSON.

python -m benchmarks.vqa_round --device cuda --devices 50 --devices 500 --out docs/results/vqa-round-gpu.json

Each size of federation runs in a process of its own, so that peaks are its own. Pictures are random bytes, of which 500 are enough:
what is in them changes no time. Rounds are those of a device with 479 questions, the study has 464: 5 steps of at most 100.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import glocal
from benchmarks.job import own_peak
from glocal.algorithms import lg_fedavg
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.modules import params_of
from glocal.core.optimizers import sgd
from glocal.core.sampling import Plan
from glocal.core.split import Split
from glocal.core.training import cross_entropy
from glocal.datasets.image_table import ImageTable
from glocal.engines import EngineConfig, Executor
from glocal.federate.rounds import Seat, initial_state, simulate_seeds
from glocal.studies.vqa_model import SHARED, vqa_net

WORDS, LENGTH, ANSWERS, PICTURES, SIZE, COHORT = 64_437, 19, 1000, 500, 128, 5


def main() -> None:
    given = arguments()
    if given.child:
        print(json.dumps(measured(given, given.clients[0])))
        return
    rows = [asked(size) for size in given.clients]
    told = {
        "command": f"python -m benchmarks.vqa_round {' '.join(sys.argv[1:])}",
        "rows": rows,
        **about(given.device),
    }
    print(json.dumps(told, indent=1))
    if given.out:
        Path(given.out).write_text(json.dumps(told, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--devices", type=int, action="append")
    parser.add_argument("--engine", default="looped")
    parser.add_argument("--chunk", type=int, help="devices in one batched step")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--examples", type=int, default=479, help="questions of each device")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument(
        "--rounds", type=int, default=2, help="timed, on a GPU after two that warm up"
    )
    parser.add_argument("--out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.clients = given.clients or [50]
    return given


def asked(clients: int) -> dict[str, Any]:
    """One size in a process of its own."""
    others = sys.argv[1:]
    while "--devices" in others:
        place = others.index("--devices")
        del others[place : place + 2]
    command = [
        sys.executable,
        "-m",
        "benchmarks.vqa_round",
        *others,
        "--devices",
        str(clients),
        "--child",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def measured(given: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Seconds of a round, and the most memory that was held, before and after."""
    where = torch.device(given.device)
    model = vqa_net(random_pictures(), words=WORDS, answers=ANSWERS)
    split = Split.of(model, shared=SHARED)
    algorithm = lg_fedavg(
        cross_entropy(model), sgd(0.01, momentum=0.9, lr_decay=0.0005), split=split
    )
    params = trees.to(params_of(model), where)
    train = random_questions(clients, given.examples, where)
    before = own_peak()
    engine = EngineConfig(given.engine, given.chunk_size, precision=given.precision)
    executor = Executor(algorithm.client_update, engine=engine, num_calls=1000)
    warm = (
        2 if where.type == "cuda" else 0
    )  # the second is under way when the first can be looked at
    plan = Plan(given.rounds + warm, COHORT, batch_size=given.batch_size)
    rounds = simulate_seeds(
        algorithm, [Seat(plan, train, initial_state(algorithm, params))], executor
    )
    if warm:
        next(rounds)
        torch.cuda.synchronize()
    started, worked = time.perf_counter(), time.process_time()
    for moment in rounds:
        traffic = moment[0][1].traffic
    if warm:
        torch.cuda.synchronize()
    seconds, busy = (
        (now - then) / given.rounds
        for now, then in ((time.perf_counter(), started), (time.process_time(), worked))
    )
    return {
        "clients": clients,
        "clients_per_round": COHORT,
        "examples": given.examples,
        "batch": given.batch_size,
        "parameters": trees.numel(params),
        "shared": trees.numel(split.take_shared(params)),
        "engine": executor.describe(),
        "precision": given.precision,
        "seconds_per_round": round(seconds, 3),
        "processor_seconds_per_round": round(busy, 3),
        "bytes_sent": traffic.total.bytes,
        "peak_mb": round(own_peak() / 1e6),
        "peak_mb_before_the_round": round(before / 1e6),
        "gpu_peak_mb": round(torch.cuda.max_memory_allocated() / 1e6)
        if where.type == "cuda"
        else None,
    }


def random_pictures() -> ImageTable:
    return ImageTable(
        np.random.default_rng(0).integers(0, 256, (PICTURES, 3, SIZE, SIZE), dtype=np.uint8)
    )


def random_questions(clients: int, examples: int, where: torch.device) -> ClientData:
    """One store that all devices visit from their own start on: what a device holds costs no memory of its own here."""
    noise = np.random.default_rng(1)
    rows = np.concatenate(
        [noise.integers(0, PICTURES, (5000, 1)), noise.integers(2, WORDS, (5000, LENGTH))], axis=1
    )
    store = Examples(torch.from_numpy(rows), torch.from_numpy(noise.integers(0, ANSWERS, 5000))).to(
        where
    )
    owned = tuple(
        (np.arange(examples, dtype=np.int64) + 97 * device) % 5000 for device in range(clients)
    )
    return ClientData(store, owned)


def about(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "machine": {"device": name, "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "version": glocal.__version__,
    }


if __name__ == "__main__":
    main()
