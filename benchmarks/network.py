"""A workload's network in PyTorch, the same for every tool that can take an `nn.Module`."""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import Layer, Workload

PROBE = 1000


def build(workload: Workload) -> nn.Sequential:
    """The network, with the same initial weights for all tools.

    Layers with weights are layer1, layer2, ...
    """
    torch.manual_seed(0)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    weighted = 0
    for place, layer in enumerate(workload.layers):
        name = f"{layer[0]}_{place}"
        if layer[0] in ("linear", "conv"):
            weighted += 1
            name = f"layer{weighted}"
        parts[name] = _module(layer)
    return nn.Sequential(parts)


def _module(layer: Layer) -> nn.Module:
    makers = {
        "linear": nn.Linear,
        "conv": nn.Conv2d,
        "pool": nn.MaxPool2d,
        "relu": nn.ReLU,
        "flatten": nn.Flatten,
    }
    return makers[layer[0]](*layer[1:])


@torch.no_grad()
def probe(model: nn.Module, arrays: tuple[np.ndarray, np.ndarray]) -> float:
    """The loss on the first thousand examples after training: shows that a tool did the work."""
    x, y = (
        torch.from_numpy(array.reshape(-1, *array.shape[2:])[:PROBE].copy()) for array in arrays
    )
    device = next(model.parameters()).device
    return float(functional.cross_entropy(model(x.to(device)), y.to(device)))


def as_tensors(arrays: tuple[np.ndarray, np.ndarray], device: str) -> tuple[Tensor, Tensor]:
    """The arrays on a device; on the CPU they stay mapped from disk."""
    x, y = (torch.from_numpy(array).to(device) for array in arrays)
    return x, y


def synchronizer(device: str) -> Callable[[], object] | None:
    """A function that waits for the device; None if there is nothing to wait for."""
    return torch.cuda.synchronize if device == "cuda" else None


def device_peak(device: str) -> dict[str, int]:
    """The peak memory of this process on a GPU."""
    return (
        {"peak_device_memory_mb": round(torch.cuda.max_memory_allocated() / 1e6)}
        if device == "cuda"
        else {}
    )
