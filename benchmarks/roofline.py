"""The machine's limits (matrix products, copies) and the least work of a round.

Floating-point operations. A layer that multiplies n weights with each of its output positions (1
for a linear layer) does 2 n operations per example and position in the forward pass. The backward
pass needs as many for the gradients of its weights, and as many for the gradients of its inputs,
except in the first layer: 6 n together, 4 n for the first layer. Biases, ReLU, pooling and the
optimiser are left out: they are below 2 % of the operations. Most inputs of a max-pool get no
gradient, which could save operations; it is not counted.

Least bytes. In every step every weight is read in the forward pass, and read and written in the
backward pass; with momentum its velocity is read and written: 5 times 4 bytes a step with momentum,
3 without. Gradients need not reach memory. Every example is read once. On a CPU, one client's
weights and velocity stay in the cache if they fit: the bandwidth is that of a copy of their size.
On a GPU all sampled clients train at once: the bandwidth is that of a large copy.

The floor is the larger of operations / FLOPS and bytes / bandwidth, each at the machine's best.
"""

import json
import sys
from collections.abc import Callable, Iterator
from math import prod
from time import perf_counter

import torch

from benchmarks.workloads import WORKLOADS, Layer, Shape, Workload, parameters

Figures = dict[str, object]
_REPEATS = 15
_MATRIX = {"cpu": 1536, "cuda": 8192}
_LARGE = {"cpu": 2**28, "cuda": 2**31}


def operations(workload: Workload) -> int:
    """Floating-point operations of one round."""
    products = list(_products(workload))
    return (
        workload.clients_per_round
        * workload.local_epochs
        * workload.examples
        * (6 * sum(products) - 2 * products[0])
    )


def least_bytes(workload: Workload) -> int:
    """Bytes that one round must move."""
    passes = 5 if workload.momentum else 3
    weights = workload.steps * passes * 4 * parameters(workload)
    return workload.clients_per_round * (
        weights + workload.local_epochs * workload.examples * 4 * prod(workload.shape)
    )


def _products(workload: Workload) -> Iterator[int]:
    """Multiplications of one example going forward, for every layer that has any."""
    shape = workload.shape
    for layer in workload.layers:
        shape = _after(layer, shape)
        if layer[0] == "linear":
            yield layer[1] * layer[2]
        elif layer[0] == "conv":
            yield layer[1] * layer[3] ** 2 * prod(shape)


def _after(layer: Layer, shape: Shape) -> Shape:
    """The shape of a layer's output."""
    kind, *numbers = layer
    if kind == "conv":
        return (numbers[1], *(side - numbers[2] + 1 for side in shape[1:]))
    if kind == "pool":
        return (shape[0], *(side // numbers[0] for side in shape[1:]))
    return {"linear": tuple(numbers[1:]), "flatten": (prod(shape),), "relu": shape}[kind]


def floor(workload: Workload, flops: float, bandwidth: float) -> Figures:
    """The least time of a round in milliseconds, and what bounds it.

    flops are operations per second, bandwidth bytes per second.
    """
    arithmetic, traffic = (
        1e3 * operations(workload) / flops,
        1e3 * least_bytes(workload) / bandwidth,
    )
    return {
        "gflop": operations(workload) / 1e9,
        "gigabytes": least_bytes(workload) / 1e9,
        "arithmetic_ms": arithmetic,
        "traffic_ms": traffic,
        "floor_ms": max(arithmetic, traffic),
        "bound": "arithmetic" if arithmetic >= traffic else "traffic",
    }


def measure(workloads: list[Workload], device: str) -> Figures:
    """The limits of this machine, and the floor of every workload."""
    counts = sorted({1, torch.get_num_threads()}) if device == "cpu" else [1]
    matrix = {count: matrix_flops(device, count) for count in counts}
    large = {count: copy_bandwidth(_LARGE[device], device, count) for count in counts}
    small = {
        work.name: max(_client_copy(work, device, count, large) for count in counts)
        for work in workloads
    }
    return {
        "device": device,
        "matrix_gflops": {_label(device, count): flops / 1e9 for count, flops in matrix.items()},
        "large_copy_gbs": {_label(device, n): bandwidth / 1e9 for n, bandwidth in large.items()},
        "copy_of_a_client_gbs": {name: bandwidth / 1e9 for name, bandwidth in small.items()},
        "workloads": {
            work.name: floor(work, max(matrix.values()), small[work.name]) for work in workloads
        },
    }


def _client_copy(workload: Workload, device: str, threads: int, large: dict[int, float]) -> float:
    """The bandwidth of training.

    On a CPU that of copies of one client's state per thread, on a GPU that of a large copy.
    """
    return (
        copy_bandwidth(threads * _state(workload), device, threads)
        if device == "cpu"
        else large[threads]
    )


def _label(device: str, threads: int) -> str:
    return device if device == "cuda" else f"{threads} thread{'s' * (threads > 1)}"


def _state(workload: Workload) -> int:
    """Bytes of one client's weights, and of its velocity if there is momentum."""
    return 4 * parameters(workload) * (2 if workload.momentum else 1)


def matrix_flops(device: str, threads: int) -> float:
    """Operations per second of a large float32 matrix product."""
    side = _MATRIX[device]
    left, right, out = (torch.ones(side, side, device=device) for _ in range(3))
    return 2 * side**3 / _shortest(lambda: torch.mm(left, right, out=out), device, threads)


def copy_bandwidth(size: int, device: str, threads: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes in all."""
    source, target = (torch.ones(size // 8, device=device) for _ in range(2))
    times = max(1, 2**26 // size)

    def copies() -> None:
        for _ in range(times):
            target.copy_(source)

    return times * size / _shortest(copies, device, threads)


def _shortest(action: Callable[[], object], device: str, threads: int) -> float:
    """Seconds of the fastest of several repeats."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(_REPEATS + 1):
        wait()
        started = perf_counter()
        action()
        wait()
        seconds.append(perf_counter() - started)
    torch.set_num_threads(before)
    return min(seconds[1:])


if __name__ == "__main__":
    print(
        json.dumps(
            measure(list(WORKLOADS.values()), sys.argv[1] if len(sys.argv) > 1 else "cpu"), indent=2
        )
    )
