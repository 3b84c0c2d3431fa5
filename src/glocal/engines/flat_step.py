"""One step of local training as a function of a flat list of tensors.

Tracing, `vmap` and CUDA graphs all work on such lists. A `StepSignature` holds the names behind
the places in the list.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from glocal.core import trees
from glocal.core.optimizers import Optimizer
from glocal.core.training import (
    AugmentedLoss,
    Batch,
    LossFn,
    ModelLoss,
    Objective,
    Proximal,
    compute_grads,
)
from glocal.core.trees import Params
from glocal.core.values import Values, tensors_of

FlatStep = Callable[..., Sequence[Tensor]]
Names = tuple[str, ...]


class StepState(NamedTuple):
    """What one step of local training changes."""

    trainable: Params
    opt_state: Params
    buffers: Params

    @classmethod
    def start(
        cls, params: Params, trainable: frozenset[str], init: Callable[[Params], Params]
    ) -> "StepState":
        """The state before the first step, in copies: steps may overwrite it.

        `init` makes the optimizer's state.
        """
        weights = {name: params[name].clone() for name in params if name in trainable}
        buffers = {name: params[name].clone() for name in params if name not in trainable}
        return cls(weights, init(weights), buffers)

    def params(self, like: Params) -> Params:
        """Weights and buffers in the order of the tree `like`."""
        merged = {**self.trainable, **self.buffers}
        return {name: merged[name] for name in like}


class BatchForm(NamedTuple):
    """The form of a batch: that of its inputs, of its targets if it has any, and of its group."""

    x: TreeSpec
    y: TreeSpec | None
    has_group: bool

    @classmethod
    def of(cls, batch: Batch) -> "BatchForm":
        """The form of this batch."""
        targets = None if batch.y is batch.x else tree_structure(batch.y)
        return cls(tree_structure(batch.x), targets, batch.group is not None)

    def unflatten(self, tensors: Iterator[Tensor]) -> Batch:
        """The inverse of `flatten_batch`."""
        x = _unflatten(self.x, tensors)
        y = x if self.y is None else _unflatten(self.y, tensors)
        group = next(tensors) if self.has_group else None
        return Batch(x, y, group, next(tensors), next(tensors))


def _unflatten(form: TreeSpec, tensors: Iterator[Tensor]) -> Values:
    return tree_unflatten(list(islice(tensors, form.num_leaves)), form)


class StepInputs(NamedTuple):
    """Everything that one step reads."""

    state: StepState
    proximal: tuple[Proximal, ...]
    linear: Params
    batch: Batch
    round_index: Tensor


class StepSignature(NamedTuple):
    """The names behind a flat list of tensors.

    A step's input is: state, anchors of the proximal terms, linear term, batch, round index. Its
    output is: state, loss. The state stands first in both, in the same order.
    """

    trainable: Names
    opt_state: Names
    buffers: Names
    anchors: tuple[Names, ...]
    strengths: tuple[float, ...]
    linear: Names
    batch: BatchForm

    @classmethod
    def of(cls, inputs: StepInputs) -> "StepSignature":
        """The signature of a step with these inputs."""
        trainable, opt_state, buffers = (tuple(tree) for tree in inputs.state)
        anchors = tuple(tuple(term.anchor) for term in inputs.proximal)
        strengths = tuple(term.strength for term in inputs.proximal)
        form = BatchForm.of(inputs.batch)
        linear = tuple(inputs.linear)
        return cls(trainable, opt_state, buffers, anchors, strengths, linear, form)

    @property
    def num_state(self) -> int:
        """How many tensors a state has."""
        return len(self.trainable) + len(self.opt_state) + len(self.buffers)

    @property
    def batch_offset(self) -> int:
        """Where the batch begins in the list of inputs."""
        return self.num_state + sum(map(len, self.anchors)) + len(self.linear)

    def flatten(self, inputs: StepInputs) -> list[Tensor]:
        """All inputs of a step in one list."""
        tensors = self.flatten_state(inputs.state)
        for term, names in zip(inputs.proximal, self.anchors, strict=True):
            tensors += _pick(term.anchor, names)
        tensors += _pick(inputs.linear, self.linear)
        tensors += flatten_batch(inputs.batch)
        return [*tensors, inputs.round_index]

    def flatten_state(self, state: StepState) -> list[Tensor]:
        """A state in one list."""
        return [
            *_pick(state.trainable, self.trainable),
            *_pick(state.opt_state, self.opt_state),
            *_pick(state.buffers, self.buffers),
        ]

    def unflatten(self, tensors: Sequence[Tensor]) -> StepInputs:
        """The inverse of `flatten`."""
        rest = iter(tensors[self.num_state :])
        proximal = []
        for names, strength in zip(self.anchors, self.strengths, strict=True):
            anchor = {name: next(rest) for name in names}
            proximal.append(Proximal(anchor, strength))
        linear = {name: next(rest) for name in self.linear}
        batch = self.batch.unflatten(rest)
        state = self.unflatten_state(tensors)
        return StepInputs(state, tuple(proximal), linear, batch, next(rest))

    def unflatten_state(self, tensors: Sequence[Tensor]) -> StepState:
        """The state at the beginning of a list."""
        values = iter(tensors)
        return StepState(
            {name: next(values) for name in self.trainable},
            {name: next(values) for name in self.opt_state},
            {name: next(values) for name in self.buffers},
        )


def flatten_batch(batch: Batch) -> list[Tensor]:
    """A batch in one list, without targets that are the inputs, and without a group of None."""
    targets = [] if batch.y is batch.x else tensors_of(batch.y)
    group = [] if batch.group is None else [batch.group]
    return [*tensors_of(batch.x), *targets, *group, batch.mask, batch.key]


def tensor_kinds(tensors: Sequence[Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shape and dtype of each tensor: a step is traced once per such kinds."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def is_traceable(loss: LossFn) -> bool:
    """Whether a loss is one and the same function for all clients and steps.

    Others may hold tensors of the call that made them; a trace would freeze their values.
    """
    if isinstance(loss, AugmentedLoss):
        return is_traceable(loss.inner)
    return isinstance(loss, ModelLoss)


def make_flat_step(
    objective: Objective, optimizer: Optimizer, signature: StepSignature, *, guard: bool
) -> FlatStep:
    """One step on flat tensors; it returns the state after it, and its loss.

    With `guard`, a step that is all padding leaves the state as it is.
    """

    def step(*tensors: Tensor) -> list[Tensor]:
        inputs = signature.unflatten(tensors)
        after, loss = _take_step(objective, optimizer, inputs)
        if guard:
            after = _unless_padding(inputs.batch, after, inputs.state)
        return [*signature.flatten_state(after), loss]

    return step


def _take_step(
    objective: Objective, optimizer: Optimizer, inputs: StepInputs
) -> tuple[StepState, Tensor]:
    state = inputs.state
    own = objective._replace(proximal=inputs.proximal, linear=inputs.linear)
    grads, loss, buffers = compute_grads(own, state.trainable, state.buffers, inputs.batch)
    trainable, opt_state = optimizer.step(
        state.trainable, grads, state.opt_state, inputs.round_index
    )
    return StepState(trainable, opt_state, {**state.buffers, **buffers}), loss


def _unless_padding(batch: Batch, after: StepState, before: StepState) -> StepState:
    """The state after a step if its batch has an example, else the state before."""
    has_example = batch.mask.any()
    return StepState(
        trees.where(has_example, after.trainable, before.trainable),
        trees.where(has_example, after.opt_state, before.opt_state),
        trees.where(has_example, after.buffers, before.buffers),
    )


def _pick(tree: Params, names: Names) -> list[Tensor]:
    return [tree[name] for name in names]
