"""`descend` for all devices of a batch at once: called from within `vmap`, it works on the tensors beneath it (devices, ...).

There a step can be traced, compiled or replaced by a fused one, which `vmap` itself knows nothing of.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.errors import describe_error
from glocal.core.optimizers import SGD, Adam, Optimizer
from glocal.core.training import (
    AugmentedLoss,
    Batch,
    ModelLoss,
    Objective,
    Proximal,
    Work,
    mean_example_loss,
    precompute_augmented,
    step_indices,
    take_batch,
)
from glocal.core.trees import Params
from glocal.engines.conv_matmul import ConvAsMatmul
from glocal.engines.fused.gpu import local_train_batched, unsupported_reason
from glocal.engines.fused.layer_chain import LayerChain, parse_chain
from glocal.engines.traced import (
    FlatStep,
    StepSignature,
    StepState,
    is_traceable,
    make_flat_step,
    trace_step,
)

StepCompiler = Callable[[FlatStep], FlatStep]


class TrainingRequest(NamedTuple):
    """A descent of many devices: trees (devices, ...), orders (devices, steps, batch), keys (devices,), round_index ()."""

    objective: Objective
    optimizer: Optimizer
    params: Params
    examples: Examples
    order: Tensor
    key: Tensor
    round_index: Tensor
    full_steps: int


class BatchedTraining:
    """A `LocalTrainer` for use under `vmap`: `train` is how a journey is made once its tensors are bare.

    Where the loss or the optimiser may hold tensors of the call that made them it passes, unless `train` itself `skip_check` those.
    """

    def __init__(
        self, train: Callable[[TrainingRequest], tuple[Params, Tensor]], *, skip_check: bool = False
    ) -> None:
        self.train, self.skip_check = train, skip_check

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, Tensor] | None:
        """Trained params and the loss (); None where it passes."""
        if not self.skip_check and not (
            is_traceable(objective.loss) and isinstance(optimizer, SGD | Adam)
        ):
            return None
        sizes = [len(params), *(len(pull.anchor) for pull in objective.proximal)]
        anchor = [tensor for pull in objective.proximal for tensor in pull.anchor.values()]
        ticket = _RequestTemplate(self, objective, optimizer, work, [*params], sizes)
        *trained, loss = _BelowVmap.apply(  # type: ignore[no-untyped-call]
            ticket, *params.values(), *anchor, work.order, work.key, work.round_index
        )
        return dict(zip(params, trained, strict=True)), loss


class _RequestTemplate:
    """What goes beneath `vmap` beside tensors."""

    def __init__(
        self,
        batched: BatchedTraining,
        objective: Objective,
        optimizer: Optimizer,
        work: Work,
        names: list[str],
        sizes: list[int],
    ) -> None:
        self.batched, self.objective, self.optimizer = batched, objective, optimizer
        self.examples, self.full_steps, self.names, self.sizes = (
            work.examples,
            work.full_steps,
            names,
            sizes,
        )

    def request(self, tensors: Sequence[Tensor]) -> TrainingRequest:
        """The journey whose tensors, now bare, are these."""
        *rest, order, key, round_index = tensors
        params, rest = (
            dict(zip(self.names, rest[: self.sizes[0]], strict=True)),
            rest[self.sizes[0] :],
        )
        proximal = []
        for pull in self.objective.proximal:
            proximal.append(Proximal(dict(zip(pull.anchor, rest, strict=False)), pull.strength))
            rest = rest[len(pull.anchor) :]
        objective = self.objective._replace(proximal=tuple(proximal))
        return TrainingRequest(
            objective,
            self.optimizer,
            params,
            self.examples,
            order,
            key,
            round_index,
            self.full_steps,
        )


class _BelowVmap(torch.autograd.Function):
    """The door: torch calls `vmap` below with bare tensors and tells which of their axes are devices."""

    @staticmethod
    def forward(ticket: _RequestTemplate, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("a descent of many devices was asked for one")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], ticket: _RequestTemplate, *tensors: Tensor
    ) -> Any:
        *many, _ = [
            _clients_first(tensor, axis, info.batch_size)
            for tensor, axis in zip(tensors, in_dims[1:], strict=True)
        ]
        params, loss = ticket.batched.train(ticket.request([*many, tensors[-1]]))
        return (*params.values(), loss), (0,) * (len(params) + 1)


def _clients_first(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """The tensor with devices along its first axis."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


class TracedBatchedTraining:
    """Journeys step by step, each step traced once per shape, then compiled if `compiler` says how."""

    def __init__(
        self, *, compiler: StepCompiler | None = None, conv_as_matmul: bool = False
    ) -> None:
        self.compiler, self.conv_as_matmul = compiler, conv_as_matmul
        self.steps: dict[Hashable, FlatStep] = {}

    def __call__(self, request: TrainingRequest) -> tuple[Params, Tensor]:
        """Trained params (devices, ...) and losses (devices,)."""
        objective, params, order = request.objective, request.params, request.order
        trainable = {
            name: tensor.clone() for name, tensor in trees.pick(params, objective.trainable).items()
        }
        buffers = {
            name: tensor.clone()
            for name, tensor in params.items()
            if name not in objective.trainable
        }
        state = StepState(trainable, torch.vmap(request.optimizer.init)(trainable), buffers)
        (rows, mask, keys), losses = step_indices(order, request.key), []
        for step in range(order.shape[1]):
            batch = take_batch(request.examples, rows[:, step], mask[:, step], keys[:, step])
            state, loss = self._take_step(request, state, batch, guard=step >= request.full_steps)
            losses.append(loss)
        trained = {**state.trainable, **state.buffers}
        return {name: trained[name] for name in params}, mean_example_loss(losses, order)

    def _take_step(
        self, request: TrainingRequest, state: StepState, batch: Batch, *, guard: bool
    ) -> tuple[StepState, Tensor]:
        signature = StepSignature.of(state, request.objective.proximal, batch)
        tensors = signature.flatten(state, request.objective.proximal, batch, request.round_index)
        key = (
            request.objective.loss,
            request.optimizer,
            signature,
            guard,
            tuple((t.shape, t.dtype) for t in tensors),
        )
        if key not in self.steps:
            self.steps[key] = self._make_step(request, signature, tensors, guard=guard)
        after = self.steps[key](*tensors)
        return signature.state(after), after[-1]

    def _make_step(
        self,
        request: TrainingRequest,
        signature: StepSignature,
        tensors: Sequence[Tensor],
        *,
        guard: bool,
    ) -> FlatStep:
        one = make_flat_step(request.objective, request.optimizer, signature, guard=guard)
        many = torch.vmap(one, in_dims=(*(0 for _ in tensors[:-1]), None), randomness="error")
        with ConvAsMatmul(enabled=self.conv_as_matmul):
            traced = trace_step(many, [tensor.clone() for tensor in tensors])
        return self.compiler(traced) if self.compiler else traced


class FusedGpuTraining:
    """Journeys by the fused steps for a GPU; a model that they do not know is refused with the reason."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def __call__(self, request: TrainingRequest) -> tuple[Params, Tensor]:
        """Trained params (devices, ...) and losses (devices,)."""
        try:
            return self._train(self._chain(request), _augmented_beforehand(request))
        except (RuntimeError, ValueError):
            raise
        except Exception as error:  # whatever Triton raises where it cannot compile
            raise RuntimeError(
                f"the fused steps cannot be compiled here ({describe_error(error)})"
            ) from error

    def _train(self, chain: LayerChain, request: TrainingRequest) -> tuple[Params, Tensor]:
        rule = request.optimizer
        assert isinstance(rule, SGD)
        return local_train_batched(
            chain,
            request.params,
            request.examples.x,
            request.examples.y,
            request.order,
            lr=rule.lr_at(request.round_index) if rule.has_lr_schedule else rule.lr,
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            proximal=request.objective.proximal,
            precision="tf32" if self.precision == "tf32" else "fp32",
        )

    def _chain(self, request: TrainingRequest) -> LayerChain:
        """The model as a chain; looked at every time, for what may be done with it depends on the whole journey."""
        one = _augmented_beforehand(
            request._replace(order=request.order[:1, :1, :1], key=request.key[:1])
        )
        loss, inputs = one.objective.loss, tuple(one.examples.x.shape[1:])
        dtypes = {tensor.dtype for tensor in (*request.params.values(), one.examples.x)}
        reason = unsupported_reason(
            one.objective,
            request.optimizer,
            inputs,
            dtypes.pop() if len(dtypes) == 1 else torch.float64,
        )
        if reason:
            raise NotImplementedError(reason)
        assert isinstance(loss, ModelLoss)
        return parse_chain(loss.model, inputs)


def _augmented_beforehand(request: TrainingRequest) -> TrainingRequest:
    """The same journey on examples that are augmented beforehand, if they are to be."""
    loss = request.objective.loss
    if type(loss) is not AugmentedLoss:
        return request
    examples, order = precompute_augmented(
        loss.augment, request.examples, request.order, request.key
    )
    return request._replace(
        objective=request.objective._replace(loss=loss.inner), examples=examples, order=order
    )
