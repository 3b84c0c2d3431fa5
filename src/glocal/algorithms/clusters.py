"""Models of several clusters as one tree, whose tensors have a first axis of clusters."""

from collections.abc import Iterable

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Message, add_change, require_numbers
from glocal.core import random
from glocal.core.bounds import MAX_CLUSTERS, require_count
from glocal.core.trees import Params
from glocal.wire.codec import name_address

MEMBERSHIP = "membership"


class Clustered(Algorithm):
    """An algorithm whose shared tree has a model for each of several clusters.

    They start from the task's model, the first one as it is, the others with noise of `spread`
    times the standard deviation of each tensor.
    """

    clusters: int = 2
    spread: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(f"{self.name}: clusters", self.clusters, 1, MAX_CLUSTERS)
        require_numbers(self, "spread")

    def start_models(self, params: Params) -> Params:
        """The model of every cluster (clusters, ...)."""
        return perturbed_copies(params, self.task.trainable, self.clusters, self.spread)


def perturbed_copies(params: Params, names: Iterable[str], clusters: int, spread: float) -> Params:
    """A model and copies of it (clusters, ...), with noise in the tensors of these names.

    The noise is `spread` times a tensor's standard deviation. It is drawn by name and cluster.
    """
    chosen, copies = frozenset(names), {}
    for name, tensor in params.items():
        each = [tensor] * clusters
        if name in chosen:
            key = torch.tensor(name_address(name), device=tensor.device)
            scale = spread * tensor.std(correction=0)
            for cluster in range(1, clusters):
                noise = random.normal(random.fold_in(key, cluster), tensor.shape)
                each[cluster] = tensor + scale * noise.to(tensor)
        copies[name] = torch.stack(each)
    return copies


def one_hot(cluster: Tensor, models: Params) -> Tensor:
    """A one for this cluster among zeros (clusters,), in the type of the models."""
    like = next(tensor for tensor in models.values() if tensor.is_floating_point())
    return (torch.arange(len(like), device=like.device) == cluster).to(like)


def of_cluster(moved: Message, membership: Tensor) -> Message:
    """A client's change as one of all models (clusters, ...): 0 for those of other clusters."""
    changes = {}
    for name, tensor in moved.items():
        values = tensor if tensor.is_floating_point() else tensor.double()
        changes[name] = torch.tensordot(membership.to(values.dtype), values, dims=0)
    return {**changes, MEMBERSHIP: membership}


def add_mean_of_members(models: Params, mean: Message) -> Params:
    """The models after the mean change of each cluster's members; without any, it stays.

    `mean` is that of what `of_cluster` makes of all uploads.
    """
    share, moved = mean[MEMBERSHIP], {}
    for name in models:
        of_model = share.reshape(-1, *(1,) * (mean[name].dim() - 1)).to(mean[name].dtype)
        moved[name] = mean[name] / torch.where(of_model > 0, of_model, 1)
    return add_change(models, moved)
