"""Trace a step to an FX graph, and rewrite the graph so that it runs fast on a CPU.

A trace is functional: every operation writes a new tensor. For the weight of a linear layer under
SGD with momentum it reads

    grad     = mm(output_grad, x)
    velocity = add(grad, old_velocity, alpha=momentum)
    weight   = sub(old_weight, velocity, alpha=lr)

With small batches, most of the time goes into moving these tensors of the weight's size through
memory. `make_in_place` rewrites the three lines to

    old_velocity.addmm_(output_grad, x, beta=momentum)
    old_weight.sub_(old_velocity, alpha=lr)

The grads are added to the velocity while they are computed, and nothing of the weight's size is
allocated.

Invariant: an old value is overwritten only by the operation that makes its new value, and only
where nothing reads the old value after that operation.

Trap: a view (`t`, `expand`, `view`) shares the memory of what it views. Whatever reads a view of a
state reads the state, see `_readers`. The result of an in-place operation is such an alias too, but
its readers want the new value; the search for readers therefore stops there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from glocal.engines.flat_step import FlatStep

_ATEN = torch.ops.aten
_IN_PLACE = (_ATEN.addmm_.default, _ATEN.mul_.Tensor, _ATEN.add_.Tensor, _ATEN.sub_.Tensor)
# The same operations under the names that torch calls fastest: this saves about two microseconds
# for each of some seventy operations in a step.
_FASTER_CALLS: dict[Any, Callable[..., Tensor]] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.add_.Tensor: Tensor.add_,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.addmm_.default: Tensor.addmm_,
    _ATEN.div.Tensor: torch.div,
    _ATEN.expand.default: Tensor.expand,
    _ATEN.mm.default: torch.mm,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.mul_.Tensor: Tensor.mul_,
    _ATEN.relu.default: torch.relu,
    _ATEN.sub.Tensor: torch.sub,
    _ATEN.sub_.Tensor: Tensor.sub_,
    _ATEN.sum.default: torch.sum,
    _ATEN.sum.dim_IntList: torch.sum,
    _ATEN.t.default: torch.t,
    _ATEN.view.default: Tensor.view,
    _ATEN.where.self: torch.where,
}


def trace_step(step: FlatStep, tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of a step on tensors of these shapes."""
    traced = make_fx(step)(*tensors)
    _drop_double_transposes(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def make_in_place(traced: fx.GraphModule, num_state: int) -> fx.GraphModule:
    """The same step, with its first `num_state` inputs overwritten wherever this is safe."""
    graph = traced.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    states, results = inputs[:num_state], output.args[0][:num_state]
    for state, result in zip(states, results, strict=True):
        _overwrite(graph, state, result)
    graph.eliminate_dead_code()
    # in reverse: the velocities first, then the weights, whose changes depend on them
    for state in reversed(states):
        _move_changes_up(graph, state)
    traced.recompile()
    return traced


def use_faster_calls(traced: fx.GraphModule) -> fx.GraphModule:
    """The same step, its operations called with less overhead."""
    for node in traced.graph.nodes:
        node.target = _FASTER_CALLS.get(node.target, node.target)
    traced.recompile()
    return traced


def _overwrite(graph: fx.Graph, state: fx.Node, result: object) -> None:
    """Let the operation that computes a state's new value write over the old one, if it may."""
    if not isinstance(result, fx.Node) or result.op != "call_function":
        return
    if _is_read_after(graph, state, result):
        return
    if _is_decrease(result, state):
        result.target = _ATEN.sub_.Tensor  # weight - lr * velocity
    elif _is_accumulation(result, state):
        _accumulate(graph, state, result)  # grad + momentum * velocity


def _is_decrease(result: fx.Node, state: fx.Node) -> bool:
    """Whether a result is `state - something`, and not `state - state`."""
    if result.target is not _ATEN.sub.Tensor:
        return False
    return result.args[0] is state and result.args[1] is not state


def _is_accumulation(result: fx.Node, state: fx.Node) -> bool:
    """Whether a result is `tensor + alpha * state`."""
    if result.target is not _ATEN.add.Tensor:
        return False
    return result.args[1] is state and isinstance(result.args[0], fx.Node)


def _accumulate(graph: fx.Graph, velocity: fx.Node, result: fx.Node) -> None:
    """Replace `grad + momentum * velocity` by operations that write over the velocity."""
    grad, momentum = result.args[0], result.kwargs.get("alpha", 1)
    assert isinstance(grad, fx.Node)
    with graph.inserting_before(result):
        if grad.target is _ATEN.mm.default and len(grad.users) == 1:
            product = (velocity, *grad.args)
            changed = graph.call_function(_ATEN.addmm_.default, product, {"beta": momentum})
        else:
            scaled = graph.call_function(_ATEN.mul_.Tensor, (velocity, momentum))
            changed = graph.call_function(_ATEN.add_.Tensor, (scaled, grad))
    result.replace_all_uses_with(changed)


def _is_read_after(graph: fx.Graph, state: fx.Node, operation: fx.Node) -> bool:
    """Whether a state's old value is still read after an operation."""
    position = _positions(graph)
    return any(position[reader] > position[operation] for reader in _readers(state))


def _readers(state: fx.Node) -> set[fx.Node]:
    """All nodes that read a state's old value, directly or by a view of it."""
    readers: set[fx.Node] = set()
    aliases = [state]
    while aliases:
        for user in aliases.pop().users:
            readers.add(user)
            if user.target not in _IN_PLACE and _is_view(user):
                aliases.append(user)
    return readers


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result shares memory with one of its inputs, by the operation's schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def _move_changes_up(graph: fx.Graph, state: fx.Node) -> None:
    """Change a state as soon as nothing needs its old value: it is then still in the cache."""
    changes = [user for user in state.users if user.target in _IN_PLACE and user.args[0] is state]
    for change in changes:
        position = _positions(graph)
        latest = state
        for node in (*change.all_input_nodes, *_readers(state)):
            if position[latest] < position[node] < position[change]:
                latest = node
        latest.append(change)


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def _drop_double_transposes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        inner = node.args[0] if node.target is _ATEN.t.default else None
        if isinstance(inner, fx.Node) and inner.target is _ATEN.t.default:
            node.replace_all_uses_with(inner.args[0])
