"""Local training of all clients of a batch at once, called from within `vmap`.

An algorithm is written for one client, and `vmap` runs it for many. Inside, each tensor has the
shape of one client's: its axis of clients is hidden in a wrapper. Tracing, `torch.compile` and
Triton cannot work on such wrappers. `BatchedTraining` therefore leaves `vmap` for the duration of
local training.

Idea: an `autograd.Function` may define how `vmap` treats it (`_LeaveVmap.vmap`). Torch calls this
method once, with the bare tensors and with the place of the axis of clients in each. What it
returns is wrapped again, and the algorithm goes on as if one client had been trained.

Invariant: whatever may differ from client to client is an argument of `apply`: weights, anchors of
proximal and linear terms, order, keys and pad rows. Everything else goes into the
`_RequestTemplate` and must be the same for all clients. A loss or an optimizer that holds tensors
of the call that made it would carry wrapped tensors out of their `vmap`; such training is declined,
see `is_traceable`.

Traps:
- Torch does not look into the template. Its objective thus holds anchors that are still wrapped:
  only their names and strengths may be used.
- `setup_context` is needed although nothing differentiates through local training: torch refuses
  to run a function without it within `vmap`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glocal.core.data import Examples
from glocal.core.errors import describe_error
from glocal.core.optimizers import SGD, Adam, Optimizer
from glocal.core.training import (
    AugmentedLoss,
    ModelLoss,
    Objective,
    Proximal,
    Trained,
    WeightedSum,
    Work,
    precompute_augmented,
    row_indices,
    sum_losses,
    take_batch,
)
from glocal.core.trees import Params
from glocal.engines.attention import batchable_attention
from glocal.engines.conv_matmul import ConvAsMatmul
from glocal.engines.flat_step import (
    FlatStep,
    StepInputs,
    StepSignature,
    StepState,
    is_traceable,
    make_flat_step,
    tensor_kinds,
)
from glocal.engines.fused.gpu import local_train_batched, unsupported_reason
from glocal.engines.fused.layer_chain import LayerChain, parse_chain, unsupported_data
from glocal.engines.fx_passes import trace_step

StepCompiler = Callable[[FlatStep], FlatStep]


class TrainingRequest(NamedTuple):
    """Local training of many clients: the arguments of `local_train` with clients in front.

    Trees are (clients, ...), as are order, keys and pad rows of the work; its round index is ().
    """

    objective: Objective
    params: Params
    work: Work
    optimizer: Optimizer


TrainClients = Callable[[TrainingRequest], Trained]


class BatchedTraining:
    """A `LocalTrainer` for use within `vmap`: `train` gets a request with bare tensors.

    It declines a loss or an optimizer that may hold tensors of the call that made it, unless
    `train` checks this itself (`skip_check`).
    """

    def __init__(self, train: TrainClients, *, skip_check: bool = False) -> None:
        self.train = train
        self.skip_check = skip_check

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> Trained | None:
        """Trained params and the loss; None if it declines."""
        is_known = is_traceable(objective.loss) and isinstance(optimizer, SGD | Adam)
        if not (is_known or self.skip_check):
            return None
        constants: list[Tensor] = []
        for term in objective.proximal:
            constants += term.anchor.values()
        constants += objective.linear.values()
        names = tuple(params)
        template = _RequestTemplate(
            self.train, objective, optimizer, names, work.examples, work.full_steps
        )
        per_client = (*params.values(), *constants, work.order, work.keys, work.pad_row)
        *trained, total, weight = _LeaveVmap.apply(  # type: ignore[no-untyped-call]
            template, *per_client, work.round_index
        )
        return Trained(dict(zip(names, trained, strict=True)), WeightedSum(total, weight))


@dataclass(frozen=True, eq=False)
class _RequestTemplate:
    """What leaves `vmap` beside the tensors; a plain object, into which torch does not look."""

    train: TrainClients
    objective: Objective
    optimizer: Optimizer
    names: tuple[str, ...]
    examples: Examples
    full_steps: int

    def request(self, tensors: Sequence[Tensor]) -> TrainingRequest:
        """The request with these bare tensors, in the order of `_LeaveVmap.apply`."""
        *rest, order, keys, pad_row, round_index = tensors
        values = iter(rest)
        params = {name: next(values) for name in self.names}
        proximal = []
        for term in self.objective.proximal:
            anchor = {name: next(values) for name in term.anchor}
            proximal.append(Proximal(anchor, term.strength))
        linear = {name: next(values) for name in self.objective.linear}
        objective = self.objective._replace(proximal=tuple(proximal), linear=linear)
        key = keys[..., 0, 0]  # of no meaning: training reads the keys of steps
        work = Work(self.examples, order, key, keys, pad_row, round_index, self.full_steps)
        return TrainingRequest(objective, params, work, self.optimizer)


class _LeaveVmap(torch.autograd.Function):
    """The way out of `vmap`; the module's docstring explains it."""

    @staticmethod
    def forward(template: _RequestTemplate, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("batched local training was called outside of vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], template: _RequestTemplate, *tensors: Tensor
    ) -> Any:
        *per_client, round_index = tensors
        bare = []
        for tensor, axis in zip(per_client, in_dims[1:-1], strict=True):
            bare.append(_clients_first(tensor, axis, info.batch_size))
        params, (total, weight) = template.train(template.request([*bare, round_index]))
        outputs = (*params.values(), total, weight)
        return outputs, (0,) * len(outputs)


def _clients_first(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """The tensor with clients along its first axis; None: it is the same for all of them."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


class TracedBatchedTraining:
    """Local training step by step; each step is traced once per shape, and may be compiled."""

    def __init__(
        self, *, compiler: StepCompiler | None = None, conv_as_matmul: bool = False
    ) -> None:
        self.compiler = compiler
        self.conv_as_matmul = conv_as_matmul
        self.steps: dict[Hashable, FlatStep] = {}

    def __call__(self, request: TrainingRequest) -> Trained:
        """Trained params (clients, ...) and losses (clients,)."""
        init, objective, work = torch.vmap(request.optimizer.init), request.objective, request.work
        state = StepState.start(request.params, objective.trainable, init)
        order, keys = work.flat_order, work.flat_keys
        rows, mask = row_indices(order, work.pad_row)
        losses: list[Tensor] = []
        for step in range(order.shape[1]):
            batch = take_batch(work.examples, rows[:, step], mask[:, step], keys[:, step])
            inputs = StepInputs(
                state, objective.proximal, objective.linear, batch, work.round_index
            )
            state, loss = self._take_step(request, inputs, guard=work.needs_guard(step))
            losses.append(loss)
        return Trained(state.params(like=request.params), sum_losses(losses, order))

    def _take_step(
        self, request: TrainingRequest, inputs: StepInputs, *, guard: bool
    ) -> tuple[StepState, Tensor]:
        signature = StepSignature.of(inputs)
        tensors = signature.flatten(inputs)
        kinds = tensor_kinds(tensors)
        key = (request.objective.loss, request.optimizer, signature, guard, kinds)
        if key not in self.steps:
            self.steps[key] = self._make_step(request, signature, tensors, guard=guard)
        after = self.steps[key](*tensors)
        return signature.unflatten_state(after), after[-1]

    def _make_step(
        self,
        request: TrainingRequest,
        signature: StepSignature,
        tensors: Sequence[Tensor],
        *,
        guard: bool,
    ) -> FlatStep:
        one_client = make_flat_step(request.objective, request.optimizer, signature, guard=guard)
        # the last tensor is the round index, which all clients share
        in_dims = (*[0] * (len(tensors) - 1), None)
        all_clients = torch.vmap(one_client, in_dims=in_dims, randomness="error")
        with ConvAsMatmul(enabled=self.conv_as_matmul), batchable_attention():
            traced = trace_step(all_clients, [tensor.clone() for tensor in tensors])
        return self.compiler(traced) if self.compiler else traced


class FusedGpuTraining:
    """Local training by the fused steps for a GPU; an unsupported request is an error."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def __call__(self, request: TrainingRequest) -> Trained:
        """Trained params (clients, ...) and losses (clients,)."""
        try:
            return self._train(self._chain(request), _with_augmented_examples(request))
        except (RuntimeError, ValueError):
            raise
        except Exception as error:  # Triton raises errors of its own where it cannot compile
            message = f"the fused steps cannot be compiled here ({describe_error(error)})"
            raise RuntimeError(message) from error

    def _train(self, chain: LayerChain, request: TrainingRequest) -> Trained:
        sgd, work = request.optimizer, request.work
        assert isinstance(sgd, SGD)
        order = work.flat_order
        params, losses = local_train_batched(
            chain,
            request.params,
            work.examples.x,
            work.examples.y,
            order,
            lr=sgd.lr_at(work.round_index) if sgd.has_lr_schedule else sgd.lr,
            momentum=sgd.momentum,
            weight_decay=sgd.weight_decay,
            proximal=request.objective.proximal,
            precision="tf32" if self.precision == "tf32" else "fp32",
        )
        counts = (order >= 0).sum((-2, -1)).to(losses.dtype)
        return Trained(params, WeightedSum(losses * counts, counts))

    def _chain(self, request: TrainingRequest) -> LayerChain:
        """The model as a chain of layers.

        It is checked for every request: one algorithm may train the whole model, then its head.
        """
        work = request.work
        one_example = work._replace(
            order=work.order[:1, :1, :1, :1], keys=work.keys[:1, :1, :1], pad_row=work.pad_row[:1]
        )
        request = _with_augmented_examples(request._replace(work=one_example))
        objective, examples = request.objective, request.work.examples
        if reason := unsupported_data(objective.loss, examples):
            raise NotImplementedError(reason)
        shape = tuple(examples.x.shape[1:])
        dtype = _common_dtype([*request.params.values(), examples.x])
        reason = unsupported_reason(objective, request.optimizer, shape, dtype)
        if reason:
            raise NotImplementedError(reason)
        assert isinstance(objective.loss, ModelLoss)
        return parse_chain(objective.loss.model, shape)


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of all tensors; float64, which is unsupported, if they differ."""
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else torch.float64


def _with_augmented_examples(request: TrainingRequest) -> TrainingRequest:
    """The same request on examples that are augmented in advance, if its loss augments them."""
    loss = request.objective.loss
    if type(loss) is not AugmentedLoss:
        return request
    objective = request.objective._replace(loss=loss.inner)
    work = precompute_augmented(loss.augment, request.work)
    return request._replace(objective=objective, work=work)
