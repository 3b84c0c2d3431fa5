"""One step of gradient descent as a flat list of tensor operations, traced once; then no module and no autograd is in the way.

The trace is what engines work on: a worker on a CPU runs it as it is, with slopes added to velocities where they are computed and
weights changed where they lie; on a GPU it is compiled and captured.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from glocal.core import trees
from glocal.core.errors import describe_error
from glocal.core.optimizers import SGD, Adam, Optimizer
from glocal.core.training import (
    AugmentedLoss,
    Batch,
    LossFn,
    ModelLoss,
    Objective,
    Proximal,
    Work,
    batches,
    compute_grads,
    mean_example_loss,
)
from glocal.core.trees import Params

FlatStep = Callable[..., Sequence[Tensor]]
_ATEN = torch.ops.aten
_IN_PLACE = (_ATEN.addmm_.default, _ATEN.mul_.Tensor, _ATEN.add_.Tensor, _ATEN.sub_.Tensor)
# the same operations by the names that torch calls fastest: two microseconds less each, of some seventy in a step
_FASTER_CALLS: dict[Any, Callable[..., Tensor]] = {
    **{
        getattr(_ATEN, name).default: getattr(torch, name)
        for name in ("addmm", "mm", "relu", "t", "sum")
    },
    **{getattr(_ATEN, name).Tensor: getattr(torch, name) for name in ("add", "div", "mul", "sub")},
    **{getattr(_ATEN, name).Tensor: getattr(Tensor, name) for name in ("add_", "mul_", "sub_")},
    **{
        getattr(_ATEN, name).default: getattr(Tensor, name) for name in ("addmm_", "expand", "view")
    },
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.where.self: torch.where,
}


class StepState(NamedTuple):
    """Where a device is in its descent."""

    trainable: Params
    opt_state: Params
    buffers: Params


class StepSignature(NamedTuple):
    """The names behind a flat list of tensors: what goes into a step and comes out of it."""

    trainable: tuple[str, ...]
    opt_state: tuple[str, ...]
    buffers: tuple[str, ...]
    proximal: tuple[tuple[str, ...], ...]
    strengths: tuple[float, ...]
    has_group: bool

    @classmethod
    def of(cls, state: StepState, proximal: Sequence[Proximal], batch: Batch) -> "StepSignature":
        """The signature of a step from here."""
        anchor = tuple(tuple(pull.anchor) for pull in proximal)
        strengths = tuple(pull.strength for pull in proximal)
        trainable, opt_state, buffers = (tuple(tree) for tree in state)
        return cls(trainable, opt_state, buffers, anchor, strengths, batch.group is not None)

    def flatten(
        self, state: StepState, proximal: Sequence[Proximal], batch: Batch, round_index: Tensor
    ) -> list[Tensor]:
        """All inputs of a step in one list."""
        tensors = [
            tree[name] for tree, names in zip(state, self[:3], strict=True) for name in names
        ]
        tensors += [
            pull.anchor[name]
            for pull, names in zip(proximal, self.proximal, strict=True)
            for name in names
        ]
        return [*tensors, *(tensor for tensor in batch if tensor is not None), round_index]

    def state(self, tensors: Sequence[Tensor]) -> StepState:
        """The first tensors of a list as a place."""
        first, second = len(self.trainable), len(self.trainable) + len(self.opt_state)
        trainable = dict(zip(self.trainable, tensors[:first], strict=True))
        opt_state = dict(zip(self.opt_state, tensors[first:second], strict=True))
        return StepState(
            trainable,
            opt_state,
            dict(zip(self.buffers, tensors[second : second + len(self.buffers)], strict=True)),
        )

    @property
    def num_state(self) -> int:
        """How many tensors a place has."""
        return len(self.trainable) + len(self.opt_state) + len(self.buffers)

    @property
    def batch_offset(self) -> int:
        """Where in the list a batch begins."""
        return self.num_state + sum(len(names) for names in self.proximal)

    def unflatten(
        self, tensors: Sequence[Tensor]
    ) -> tuple[StepState, tuple[Proximal, ...], Batch, Tensor]:
        """What `flatten` made flat."""
        rest, proximal = list(tensors[self.num_state :]), []
        for names, strength in zip(self.proximal, self.strengths, strict=True):
            proximal.append(Proximal(dict(zip(names, rest, strict=False)), strength))
            rest = rest[len(names) :]
        x, y, *group, mask, key, round_index = rest
        return (
            self.state(tensors),
            tuple(proximal),
            Batch(x, y, group[0] if group else None, mask, key),
            round_index,
        )


def is_traceable(loss: LossFn) -> bool:
    """A loss that is one function for all devices and steps: others may hold tensors of the call that made them."""
    return isinstance(loss, ModelLoss) or (
        isinstance(loss, AugmentedLoss) and is_traceable(loss.inner)
    )


def make_flat_step(
    objective: Objective, optimizer: Optimizer, signature: StepSignature, *, guard: bool
) -> FlatStep:
    """One step on flat tensors: places after it, and its loss. With a guard, a step that is all padding is the identity."""

    def step(*tensors: Tensor) -> list[Tensor]:
        state, proximal, batch, round_index = signature.unflatten(tensors)
        grads, loss, buffers = compute_grads(
            objective._replace(proximal=proximal), state.trainable, state.buffers, batch
        )
        trainable, opt_state = optimizer.step(state.trainable, grads, state.opt_state, round_index)
        after = StepState(trainable, opt_state, {**state.buffers, **buffers})
        if guard:
            after = StepState(
                *(
                    trees.where(batch.mask.any(), new, old)
                    for new, old in zip(after, state, strict=True)
                )
            )
        return [
            *(
                tree[name]
                for tree, names in zip(after, signature[:3], strict=True)
                for name in names
            ),
            loss,
        ]

    return step


def trace_step(step: FlatStep, tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of a step on tensors of these shapes."""
    traced = make_fx(step)(*tensors)
    _drop_double_transposes(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def make_in_place(traced: fx.GraphModule, num_state: int) -> fx.GraphModule:
    """The same step, with its first `states` inputs changed where they lie whenever nothing reads the old values any more."""
    graph = traced.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"][:num_state]
    (output,) = (node for node in graph.nodes if node.op == "output")
    for state, after in zip(inputs, output.args[0][:num_state], strict=True):
        _overwrite(graph, state, after)
    graph.eliminate_dead_code()
    for state in reversed(inputs):  # velocities, then the weights that follow them
        _move_earlier(graph, state)
    traced.recompile()
    return traced


def use_faster_calls(traced: fx.GraphModule) -> fx.GraphModule:
    """The same step, its operations called with less ado."""
    for node in traced.graph.nodes:
        node.target = _FASTER_CALLS.get(node.target, node.target)
    traced.recompile()
    return traced


def _overwrite(graph: fx.Graph, state: fx.Node, after: object) -> None:
    """Let the operation that makes a new state out of the old one write over it."""
    if not isinstance(after, fx.Node) or after.op != "call_function":
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    if any(order[reader] > order[after] for reader in _readers(state)):
        return
    if after.target is _ATEN.sub.Tensor and after.args[0] is state and after.args[1] is not state:
        after.target = _ATEN.sub_.Tensor  # weight - rate * velocity
    elif (
        after.target is _ATEN.add.Tensor
        and after.args[1] is state
        and isinstance(after.args[0], fx.Node)
    ):
        _accumulate(graph, state, after)  # slope + momentum * velocity


def _accumulate(graph: fx.Graph, velocity: fx.Node, after: fx.Node) -> None:
    grad, fade = after.args[0], after.kwargs.get("alpha", 1)
    assert isinstance(grad, fx.Node)
    with graph.inserting_before(after):
        if grad.target is _ATEN.mm.default and len(grad.users) == 1:
            made = graph.call_function(_ATEN.addmm_.default, (velocity, *grad.args), {"beta": fade})
        else:
            faded = graph.call_function(_ATEN.mul_.Tensor, (velocity, fade))
            made = graph.call_function(_ATEN.add_.Tensor, (faded, grad))
    after.replace_all_uses_with(made)


def _readers(state: fx.Node) -> set[fx.Node]:
    """Whatever reads a state, also by a view of it; not what reads it after it was changed where it lies."""
    found, waiting = set(), [state]
    while waiting:
        for user in waiting.pop().users:
            found.add(user)
            if user.target not in _IN_PLACE and _is_view(user):
                waiting.append(user)
    return found


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _move_earlier(graph: fx.Graph, state: fx.Node) -> None:
    """Change a state as soon as nothing waits for its old value: what was just read is still near."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for change in [
        user for user in state.users if user.target in _IN_PLACE and user.args[0] is state
    ]:
        needed = [
            node
            for node in (*change.all_input_nodes, *_readers(state))
            if order[node] < order[change]
        ]
        latest = max(needed, key=lambda node: order[node])
        latest.append(change)
        order = {node: place for place, node in enumerate(graph.nodes)}


def _drop_double_transposes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        inner = node.args[0] if node.target is _ATEN.t.default else None
        if isinstance(inner, fx.Node) and inner.target is _ATEN.t.default:
            node.replace_all_uses_with(inner.args[0])


class TracedTraining:
    """`descend` for one device on a CPU, by a traced step; steps are traced once per shape and kept."""

    def __init__(self) -> None:
        self.steps: dict[Hashable, FlatStep | None] = {}
        self.reason = ""

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, Tensor] | None:
        """The same numbers as `descend`; None where the loss or the optimiser may not be traced."""
        if not is_traceable(objective.loss) or not isinstance(optimizer, SGD | Adam):
            self.reason = "the loss or the optimiser is one of your own"
            return None
        with torch.no_grad():
            return self._train(objective, params, work, optimizer)

    def _train(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, Tensor] | None:
        trainable = {
            name: tensor.clone() for name, tensor in trees.pick(params, objective.trainable).items()
        }
        buffers = {
            name: tensor.clone()
            for name, tensor in params.items()
            if name not in objective.trainable
        }
        state, losses = StepState(trainable, optimizer.init(trainable), buffers), []
        rest = batches(work)
        first = next(rest)
        signature = StepSignature.of(state, objective.proximal, first)
        tensors = signature.flatten(state, objective.proximal, first, work.round_index)
        step = self._step(
            objective, optimizer, signature, tensors
        )  # every batch has the same shape
        if step is None:
            return None
        states, anchor = (
            tensors[: signature.num_state],
            tensors[signature.num_state : signature.batch_offset],
        )
        for batch, real in zip(
            chain([first], rest), (work.order >= 0).any(1).tolist(), strict=True
        ):
            if not real:
                losses.append(torch.zeros(()))
                continue
            *states, loss = step(
                *states,
                *anchor,
                *(tensor for tensor in batch if tensor is not None),
                work.round_index,
            )
            losses.append(loss)
        state = signature.state(states)
        trained = {**state.trainable, **state.buffers}
        return {name: trained[name] for name in params}, mean_example_loss(losses, work.order)

    def _step(
        self,
        objective: Objective,
        optimizer: Optimizer,
        signature: StepSignature,
        tensors: Sequence[Tensor],
    ) -> FlatStep | None:
        key = (
            objective.loss,
            optimizer,
            signature,
            tuple((tensor.shape, tensor.dtype) for tensor in tensors),
        )
        if key not in self.steps:
            self.steps[key] = self._traced(
                make_flat_step(objective, optimizer, signature, guard=False),
                tensors,
                signature.num_state,
            )
        return self.steps[key]

    def _traced(self, step: FlatStep, tensors: Sequence[Tensor], num_state: int) -> FlatStep | None:
        try:
            copies = [tensor.clone() for tensor in tensors]
            with torch.random.fork_rng(
                []
            ):  # the step is run to be traced, and may draw numbers that are another's
                return use_faster_calls(make_in_place(trace_step(step, copies), num_state)).forward
        except Exception as error:  # whatever a user's own module may raise when it is traced
            self.reason = f"its step cannot be traced ({describe_error(error)})"
            return None
