"""Models of several clusters as one tree, whose tensors have a first axis of clusters."""

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Message, Uploads, require_numbers
from glocal.core import random
from glocal.core.bounds import MAX_SEEDS, require_count
from glocal.core.trees import Params
from glocal.wire.codec import name_address


def number_of_clusters(algorithm: Algorithm, clusters: object, spread: object) -> None:
    """Refuse a number of clusters that is not a count, and a spread below 0."""
    require_count(f"{algorithm.name}: clusters", clusters, 1, MAX_SEEDS)
    require_numbers(algorithm, "spread")


def perturbed_copies(params: Params, clusters: int, spread: float) -> Params:
    """A model and noisy copies of it (clusters, ...); noise is drawn by name and cluster."""
    copies = {}
    for name, tensor in params.items():
        stacked = tensor.expand(clusters, *tensor.shape).clone()
        if tensor.is_floating_point() and tensor.numel() > 1:
            scale = spread * tensor.std()
            for cluster in range(1, clusters):
                key = torch.tensor(name_address(name), device=tensor.device)
                noise = random.normal(random.fold_in(key, cluster), tensor.shape)
                stacked[cluster] += scale * noise.to(tensor)
        copies[name] = stacked
    return copies


def select(models: Params, weights: Tensor) -> Params:
    """The mean of the clusters' models by these weights (clusters,); counters are rounded."""
    shares = weights / weights.sum()
    chosen = {}
    for name, tensor in models.items():
        values = tensor if tensor.is_floating_point() else tensor.double()
        mean = torch.tensordot(shares.to(values.dtype), values, dims=1)
        chosen[name] = mean if tensor.is_floating_point() else mean.round().to(tensor.dtype)
    return chosen


def mean_of_members(uploads: Uploads, choice: str) -> Message:
    """The mean change of each cluster's members (clusters, ...); 0 without members.

    `choice` names the part of an upload that says which cluster it is for.
    """

    def of_cluster(upload: Message, sent: Message, profile: Params) -> Message:
        own = {}
        for name, tensor in upload.items():
            if name != choice:
                own[name] = torch.tensordot(upload[choice].to(tensor.dtype), tensor, dims=0)
        return {**own, choice: upload[choice]}

    summed = uploads.aggregate(of_cluster)
    members = summed.pop(choice)
    moved = {}
    for name, tensor in summed.items():
        count = members.reshape(-1, *(1,) * (tensor.dim() - 1)).to(tensor.dtype)
        moved[name] = tensor / torch.where(count > 0, count, 1)
    return moved
