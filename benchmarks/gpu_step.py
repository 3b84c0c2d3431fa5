"""Time of a training round with the fused kernels, and the best tiles for them; needs a GPU.

python benchmarks/gpu_step.py                       agreement, ms per round, us per launch
python benchmarks/gpu_step.py --only A10 --sweep    try the tiles below, and time the best ones
python benchmarks/gpu_step.py --set backward=16,8,128,4,1 --precision ieee
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from glocal.core.data import Examples
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.task import classification
from glocal.core.training import Work, local_train
from glocal.core.trees import Params
from glocal.engines.fused.gpu import local_train_batched
from glocal.engines.fused.layer_chain import LayerChain, LinearSpec, parse_chain
from glocal.engines.fused.tiles import SMALL_BATCH, KernelLaunch, Tile, TileChooser, default_tile

LR, MOMENTUM, REPLAYS, EXAMPLES = 0.05, 0.5, 20, 6000
KERNELS = ("linear_forward", "linear_loss", "linear_backward", "linear_update")
# (rows, outputs, inputs, warps, stages); rows of "backward" and "loss" are ignored
CANDIDATES = {
    "forward": [
        (16, 16, 64, 4, 4), (16, 16, 128, 4, 3), (16, 32, 64, 4, 4), (16, 32, 128, 4, 3),
        (16, 16, 256, 4, 2), (16, 16, 128, 2, 4), (16, 16, 128, 8, 3), (16, 32, 128, 8, 3),
        (16, 64, 64, 4, 3),
    ],
    "backward": [
        (16, 8, 64, 4, 1), (16, 16, 32, 4, 1), (16, 32, 16, 4, 1), (16, 8, 32, 2, 1),
        (16, 64, 16, 8, 1), (16, 8, 64, 4, 3), (16, 16, 32, 4, 3), (16, 16, 64, 8, 2),
        (16, 8, 128, 8, 1), (16, 4, 128, 4, 2), (16, 8, 64, 2, 2), (16, 4, 64, 2, 3),
    ],
    "update": [
        (64, 32, 32, 4, 1), (64, 32, 64, 4, 1), (64, 64, 64, 4, 1), (64, 16, 64, 4, 1),
        (64, 64, 32, 4, 1),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A network, its inputs, and a round of clients x steps x batch size."""

    model: nn.Module
    inputs: tuple[int, ...]
    clients: int
    steps: int
    batch_size: int

    @cached_property
    def chain(self) -> LayerChain:
        """Computed once: it copies the model, which must not happen inside a graph."""
        return parse_chain(self.model, self.inputs)


def workloads() -> dict[str, Workload]:
    torch.manual_seed(0)
    widths = (784, 512, 256, 256, 128)
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    mlp = nn.Sequential(*hidden, nn.Linear(128, 10))
    convs = [
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    lenet = nn.Sequential(
        *convs, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    wide = [
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    cnn = nn.Sequential(*wide, nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10))
    image = (3, 32, 32)
    return {
        "A10": Workload(mlp, (784,), 10, 60, 10),
        "A100": Workload(mlp, (784,), 100, 60, 10),
        "B10": Workload(lenet, image, 10, 10, 50),
        "B100": Workload(lenet, image, 100, 10, 50),
        "C50": Workload(cnn, image, 50, 5, 10),
    }


@dataclass(frozen=True)
class Round:
    """The tensors of a workload."""

    work: Workload
    params: Params
    x: Tensor
    y: Tensor
    order: Tensor

    def fused(self, choose_tile: TileChooser, precision: str) -> tuple[Params, Tensor]:
        numbers = {
            "lr": LR,
            "momentum": MOMENTUM,
            "precision": precision,
            "choose_tile": choose_tile,
        }
        return local_train_batched(
            self.work.chain, self.params, self.x, self.y, self.order, **numbers
        )

    def shortened(self, steps: int) -> "Round":
        return replace(self, order=self.order[:, :steps].contiguous())


def prepared(work: Workload, device: str) -> Round:
    shared = {name: tensor.detach().to(device) for name, tensor in params_of(work.model).items()}
    params = {
        name: tensor.expand(work.clients, *tensor.shape).contiguous()
        for name, tensor in shared.items()
    }
    x = torch.randn(EXAMPLES, *work.inputs, device=device)
    y = torch.randint(0, 10, (EXAMPLES,), device=device)
    order = torch.randint(0, EXAMPLES, (work.clients, work.steps, work.batch_size), device=device)
    return Round(work, params, x, y, order)


def train_eagerly(it: Round, dtype: torch.dtype, clients: int) -> tuple[Params, Tensor]:
    """Eager `local_train` under vmap, for the first clients."""
    objective = classification(it.work.model.to(it.x.device, dtype)).objective
    sgd, examples = SGD(LR, momentum=MOMENTUM), Examples(it.x.to(dtype), it.y)
    zero = torch.zeros((), dtype=torch.int64, device=it.x.device)

    def one(params: Params, order: Tensor) -> tuple[Params, Tensor]:
        work = Work.of(examples, order[None], zero, zero, full_steps=order.shape[0])
        trained = local_train(objective, params, work, sgd)
        return trained.params, trained.loss.mean

    own = {name: tensor[:clients].to(dtype) for name, tensor in it.params.items()}
    return torch.vmap(one)(own, it.order[:clients])


def gap(one: tuple[Params, Tensor], other: tuple[Params, Tensor], clients: int) -> float:
    worst = max(
        (one[0][name][:clients] - other[0][name][:clients]).abs().max().item() for name in other[0]
    )
    return max(worst, (one[1][:clients] - other[1][:clients]).abs().max().item())


def check(name: str, it: Round, choose_tile: TileChooser, precision: str) -> None:
    """Compare fused steps and eager float32 with float64: one and three steps, three clients."""
    for steps in (1, 3):
        short = it.shortened(steps)
        truth = train_eagerly(short, torch.float64, 3)
        eager, fused = train_eagerly(short, torch.float32, 3), short.fused(choose_tile, precision)
        again = short.fused(choose_tile, precision)
        same = all(torch.equal(fused[0][n], again[0][n]) for n in fused[0])
        errors = (
            f"fused is {gap(fused, truth, 3):.1e} from float64, eager {gap(eager, truth, 3):.1e}"
        )
        print(f"{name}: after {steps} steps {errors}; same bits twice: {same}", flush=True)
    it.work.model.float()


def time_graph(it: Round, choose_tile: TileChooser, precision: str) -> float:
    """Median milliseconds of a replayed round."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        it.shortened(2).fused(choose_tile, precision)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        it.fused(choose_tile, precision)
    times = []
    for _ in range(3 + REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def launches(
    chain: LayerChain, clients: int, batch: int
) -> Iterator[tuple[str, KernelLaunch, float, float]]:
    """The launches of one step's linear layers in order.

    Each has its kernel, its job, and its floor: megabytes of weights, and GFLOP.
    """
    linear = [layer for layer in chain.layers if isinstance(layer, LinearSpec)]
    for layer in linear:
        size = clients * layer.inputs * layer.outputs
        kernel, kind = (
            ("linear_loss", "loss") if layer is linear[-1] else ("linear_forward", "forward")
        )
        yield (
            kernel,
            KernelLaunch(kind, clients, batch, layer.outputs, layer.inputs),
            4e-6 * size,
            2e-9 * size * batch,
        )
    for layer in reversed(linear):
        yield from backward_of(layer, clients, batch, first=layer is chain.layers[0])


def backward_of(
    layer: LinearSpec, clients: int, batch: int, *, first: bool
) -> Iterator[tuple[str, KernelLaunch, float, float]]:
    size = clients * layer.inputs * layer.outputs
    flops = 2e-9 * size * batch
    if batch <= SMALL_BATCH:
        job = KernelLaunch("backward", clients, batch, layer.outputs, layer.inputs)
        yield "linear_backward", job, 16e-6 * size, flops * (1 if first else 2)
        return
    if not first:
        yield (
            "linear_forward",
            KernelLaunch("forward", clients, batch, layer.inputs, layer.outputs),
            4e-6 * size,
            flops,
        )
    yield (
        "linear_update",
        KernelLaunch("update", clients, batch, layer.outputs, layer.inputs),
        16e-6 * size,
        flops,
    )


def profile_steps(
    it: Round, choose_tile: TileChooser, precision: str, steps: int = 5
) -> tuple[list[Any], int]:
    """All kernels of a few steps, in order, and the number of steps."""
    short = it.shortened(min(steps, it.work.steps))
    short.fused(choose_tile, precision)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        short.fused(choose_tile, precision)
        torch.cuda.synchronize()
    return sorted(profiler.events(), key=lambda event: event.time_range.start), short.order.shape[1]


def time_launches(it: Round, choose_tile: TileChooser, precision: str) -> list[float]:
    """Mean microseconds of each launch of a step's linear layers, without the first step."""
    events, count = profile_steps(it, choose_tile, precision)
    times = [event.time_range.elapsed_us() for event in events if event.name in KERNELS]
    per_step = len(times) // count
    assert per_step * count == len(times), f"{len(times)} launches in {count} steps"
    return [statistics.mean(times[per_step + place :: per_step]) for place in range(per_step)]


def show_kernels(it: Round, choose_tile: TileChooser, precision: str) -> None:
    """The time of each kernel over a few steps."""
    events, count = profile_steps(it, choose_tile, precision)
    spent: dict[str, list[float]] = {}
    for event in events:
        spent.setdefault(event.name[:70], []).append(event.time_range.elapsed_us())
    for name, micros in sorted(spent.items(), key=lambda item: -sum(item[1]))[:14]:
        print(
            f"  {sum(micros) / count:8.1f} us a step in {len(micros) / count:5.1f} launches  {name}"
        )


def show_launches(it: Round, choose_tile: TileChooser, precision: str) -> None:
    work = it.work
    times = time_launches(it, choose_tile, precision)
    for (kernel, job, megabytes, gflop), micros in zip(
        launches(work.chain, work.clients, work.batch_size), times, strict=True
    ):
        tile, sizes = choose_tile(job), f"rows {job.rows} outputs {job.outputs} inputs {job.inputs}"
        rates = f"{megabytes / micros:6.2f} TB/s {gflop / micros * 1e3:6.1f} TFLOP/s"
        print(f"  {micros:8.1f} us  {rates}  {kernel:16} {sizes:38} {short_form(tile)}")
    round_time = sum(times) * work.steps / 1e3
    print(
        f"  {sum(times):8.1f} us a step in linear layers, "
        f"x {work.steps} = {round_time:.2f} ms a round",
        flush=True,
    )


def short_form(tile: Tile | None) -> str:
    if tile is None:
        return ""
    values = (tile.rows, tile.outputs, tile.inputs, tile.warps, tile.stages)
    return ",".join(str(value) for value in values)


def candidates(job: KernelLaunch, usual: Tile) -> list[Tile]:
    rows = usual.rows if job.kind == "forward" else None
    return [Tile(rows or values[0], *values[1:]) for values in CANDIDATES.get(job.kind, [])]


def sweep(name: str, it: Round, choose_tile: TileChooser, precision: str, until: float) -> None:
    """Try every candidate on all launches of its kind at once; keep the best tile of each job."""
    jobs = [job for _, job, _, _ in launches(it.work.chain, it.work.clients, it.work.batch_size)]
    best = {
        job: (micros, choose_tile(job))
        for job, micros in zip(jobs, time_launches(it, choose_tile, precision), strict=True)
    }
    for kind in dict.fromkeys(job.kind for job in best):
        longest = max(len(candidates(job, choose_tile(job))) for job in best if job.kind == kind)
        for number in range(longest):
            if time.monotonic() > until:
                print("  out of time")
                break
            tiles = {
                job: candidates(job, choose_tile(job))[number] for job in best if job.kind == kind
            }
            try:
                times = time_launches(
                    it, lambda job, tiles=tiles: tiles.get(job) or choose_tile(job), precision
                )
            except Exception as error:  # Triton may raise anything for a tile that does not fit
                tile, reason = next(iter(tiles.values())), f"{type(error).__name__}: {error}"
                print(f"  {kind} {short_form(tile)}: {reason[:100]}", flush=True)
                continue
            for job, micros in zip(jobs, times, strict=True):
                if job in tiles:
                    sizes = f"outputs {job.outputs:5} inputs {job.inputs:5}"
                    tile = short_form(tiles[job])
                    print(f"  {micros:8.1f} us {kind:12} {sizes}  {tile}", flush=True)
                    best[job] = min(best[job], (micros, tiles[job]), key=lambda pair: pair[0])
    print(f"{name}: best tiles")
    for job, (micros, tile) in best.items():
        sizes = f"rows {job.rows} outputs {job.outputs} inputs {job.inputs}"
        print(f"  {micros:8.1f} us {job.kind:12} {sizes}: {short_form(tile)}")
    print(
        f"{name}: {time_graph(it, lambda job: best[job][1], precision):.2f} ms a round with them",
        flush=True,
    )


def tile_chooser(settings: list[str]) -> TileChooser:
    """The default tiles, except for kinds that the command line sets."""
    tiles = {}
    for setting in settings:
        kind, _, values = setting.partition("=")
        tiles[kind] = Tile(*(int(value) for value in values.split(",")))
    return lambda job: tiles.get(job.kind) or default_tile(job)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="A10,A100,B10,B100,C50", help="workloads, with commas")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "ieee", "tf32"))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KIND=rows,outputs,inputs,warps,stages"
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=230.0, help="no new candidate starts after this time"
    )
    options = parser.parse_args()
    start, choose_tile = time.monotonic(), tile_chooser(options.set)
    known = workloads()
    for name in options.only.split(","):
        it = prepared(known[name], "cuda")
        begin = time.monotonic()
        it.shortened(2).fused(choose_tile, options.precision)
        torch.cuda.synchronize()
        print(f"{name}: compiled in {time.monotonic() - begin:.1f} s", flush=True)
        if not options.no_check:
            check(name, it, choose_tile, options.precision)
        milliseconds = time_graph(it, choose_tile, options.precision)
        print(f"{name}: {milliseconds:.2f} ms a round ({options.precision})", flush=True)
        show_kernels(it, choose_tile, options.precision)
        show_launches(it, choose_tile, options.precision)
        if options.sweep:
            sweep(name, it, choose_tile, options.precision, start + options.seconds)
    print(f"{time.monotonic() - start:.0f} s in all")


if __name__ == "__main__":
    main()
