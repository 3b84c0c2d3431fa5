"""One round of LG-FedAvg with the network of 54 million parameters: seconds and memory, as JSON.

python -m benchmarks.vqa_round --device cuda --clients 50 --clients 500 \\
    --out papers/liang2020/results/vqa-round-gpu.json

Each number of clients runs in its own process, so that its peak memory is its own. Pictures are 500
random images: their content does not change the time. A client has 479 questions (464 in the
study), which are 5 steps of at most 100.
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
from benchmarks.job import own_peak_memory
from benchmarks.simulation import Simulation
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.datasets.image_table import ImageTable
from glocal.engines import EngineConfig
from liang2020.vqa_model import SHARED, vqa_net

WORDS, LENGTH, ANSWERS, PICTURES, SIZE, CLIENTS_PER_ROUND = 64_437, 19, 1000, 500, 128, 5


def main() -> None:
    options = arguments()
    if options.child:
        print(json.dumps(measure(options, options.clients[0])))
        return
    rows = [run_child(size) for size in options.clients]
    result = {
        "command": f"python -m benchmarks.vqa_round {' '.join(sys.argv[1:])}",
        "rows": rows,
        **about(options.device),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--engine", default="looped")
    parser.add_argument("--chunk-size", type=int, help="clients in one batched step")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--examples", type=int, default=479, help="questions of each client")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument(
        "--rounds", type=int, default=2, help="timed rounds; on a GPU after two that warm up"
    )
    parser.add_argument("--out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.clients = options.clients or [50]
    return options


def run_child(clients: int) -> dict[str, Any]:
    """One number of clients in its own process."""
    others = sys.argv[1:]
    while "--clients" in others:
        place = others.index("--clients")
        del others[place : place + 2]
    command = [
        sys.executable,
        "-m",
        "benchmarks.vqa_round",
        *others,
        "--clients",
        str(clients),
        "--child",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return row


def measure(options: argparse.Namespace, clients: int) -> dict[str, Any]:
    """Seconds of a round, and peak memory before and after."""
    where = torch.device(options.device)
    model = vqa_net(random_pictures(), words=WORDS, answers=ANSWERS)
    optimizer = SGD(0.01, momentum=0.9, lr_decay=0.0005)
    algorithm = glocal.LGFedAvg(glocal.classification(model), shared=SHARED, optimizer=optimizer)
    params = trees.to(algorithm.task.initial_params(), where)
    train = random_questions(clients, options.examples, where)
    before = own_peak_memory()
    engine = EngineConfig(options.engine, options.chunk_size, precision=options.precision)
    # on a GPU the second round is already running when the first one is returned
    warm = 2 if where.type == "cuda" else 0
    plan = Plan(options.rounds + warm, CLIENTS_PER_ROUND, batch_size=options.batch_size)
    simulation = Simulation.of(algorithm, params, train=train, plans=[plan], engine=engine)
    rounds = simulation.rounds()
    if warm:
        next(rounds)
        torch.cuda.synchronize()
    started, worked = time.perf_counter(), time.process_time()
    for [(_, report)] in rounds:
        [traffic] = report.traffic
    if warm:
        torch.cuda.synchronize()
    seconds, busy = (
        (now - then) / options.rounds
        for now, then in ((time.perf_counter(), started), (time.process_time(), worked))
    )
    return {
        "clients": clients,
        "clients_per_round": CLIENTS_PER_ROUND,
        "examples": options.examples,
        "batch_size": options.batch_size,
        "parameters": trees.numel(params),
        "shared": trees.numel(algorithm.split.take_shared(params)),
        "engine": simulation.executor.describe(),
        "precision": options.precision,
        "seconds_per_round": round(seconds, 3),
        "processor_seconds_per_round": round(busy, 3),
        "bytes_sent": traffic.total.bytes,
        "peak_mb": round(own_peak_memory() / 1e6),
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
    """One store that all clients read from their own start: clients need no memory of their own."""
    noise = np.random.default_rng(1)
    rows = np.concatenate(
        [noise.integers(0, PICTURES, (5000, 1)), noise.integers(2, WORDS, (5000, LENGTH))], axis=1
    )
    store = Examples(torch.from_numpy(rows), torch.from_numpy(noise.integers(0, ANSWERS, 5000))).to(
        where
    )
    owned = tuple(
        (np.arange(examples, dtype=np.int64) + 97 * client) % 5000 for client in range(clients)
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
