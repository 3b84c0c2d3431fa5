"""Local training of one client on a CPU by a traced step: no module and no autograd at run time."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from glocal.core.errors import describe_error
from glocal.core.optimizers import SGD, Adam, Optimizer
from glocal.core.training import Batch, Objective, Trained, Work, batches, sum_losses
from glocal.core.trees import Params
from glocal.engines.flat_step import (
    FlatStep,
    StepInputs,
    StepSignature,
    StepState,
    flatten_batch,
    is_traceable,
    make_flat_step,
    tensor_kinds,
)
from glocal.engines.fx_passes import make_in_place, trace_step, use_faster_calls


class TracedTraining:
    """A `LocalTrainer` by a traced step; each step is traced once per shape.

    `reason` says why it last declined.
    """

    def __init__(self) -> None:
        self.steps: dict[Hashable, FlatStep | None] = {}
        self.reason = ""

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> Trained | None:
        """The same as `local_train`; None where the loss or the optimizer may not be traced."""
        if not is_traceable(objective.loss) or not isinstance(optimizer, SGD | Adam):
            self.reason = "the loss or the optimiser is one of your own"
            return None
        with torch.no_grad():
            return self._train(objective, params, work, optimizer)

    def _train(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> Trained | None:
        remaining = batches(work)
        first = next(remaining)
        state = StepState.start(params, objective.trainable, optimizer.init)
        inputs = StepInputs(state, objective.proximal, objective.linear, first, work.round_index)
        signature = StepSignature.of(inputs)
        tensors = signature.flatten(inputs)
        # one step for all batches: they have the same shape
        step = self._step(objective, optimizer, signature, tensors)
        if step is None:
            return None
        after, losses = _run_steps(step, signature, tensors, work, chain([first], remaining))
        trained = signature.unflatten_state(after).params(like=params)
        return Trained(trained, sum_losses(losses, work.flat_order))

    def _step(
        self,
        objective: Objective,
        optimizer: Optimizer,
        signature: StepSignature,
        tensors: Sequence[Tensor],
    ) -> FlatStep | None:
        """The traced step, from before if there is one for these shapes; None if tracing fails."""
        key = (objective.loss, optimizer, signature, tensor_kinds(tensors))
        if key not in self.steps:
            step = make_flat_step(objective, optimizer, signature, guard=False)
            self.steps[key] = self._trace(step, tensors, signature.num_state)
        return self.steps[key]

    def _trace(self, step: FlatStep, tensors: Sequence[Tensor], num_state: int) -> FlatStep | None:
        copies = [tensor.clone() for tensor in tensors]
        try:
            # Tracing runs the step once. It must not use up random numbers of torch's own
            # generator: whichever client happens to come first would then get other ones.
            with torch.random.fork_rng([]):
                traced = trace_step(step, copies)
            return use_faster_calls(make_in_place(traced, num_state)).forward
        except Exception as error:  # a user's own module may raise anything when it is traced
            self.reason = f"its step cannot be traced ({describe_error(error)})"
            return None


def _run_steps(
    step: FlatStep,
    signature: StepSignature,
    tensors: Sequence[Tensor],
    work: Work,
    each_batch: Iterator[Batch],
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """The tensors of the state after all steps, and the loss of each; padded steps are skipped."""
    states = tensors[: signature.num_state]
    constants = tensors[signature.num_state : signature.batch_offset]
    losses: list[Tensor] = []
    has_examples = (work.flat_order >= 0).any(1).tolist()
    for batch, has_example in zip(each_batch, has_examples, strict=True):
        if not has_example:
            losses.append(torch.zeros(()))
            continue
        *states, loss = step(*states, *constants, *flatten_batch(batch), work.round_index)
        losses.append(loss)
    return states, losses
