"""SecAgg+ over the shared part: the server learns the average of a cohort, and no upload (Bell et al. 2020).

It rests on Flower's legacy workflow and its positional Fit messages, which the rest of this package does without; should Flower let
go of them, this file goes alone. Uploads are masked, so that the server cannot check them one by one: every device checks its own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flwr.compat.common.recorddict_compat as legacy
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid

from glocal.backends.flower.contract import Answer, Order, Reply
from glocal.backends.flower.records import read_figures
from glocal.errors import brief
from glocal.keep import Json
from glocal.trees import Params
from glocal.wire import UploadError

RANGE = 8.0  # a number outside of -8 to 8 would be cut off by quantisation
_THRESHOLD = 0.5  # of a cohort: fewer cannot unmask anybody, and as many must stay until the end

Train = Callable[[Params, Order], Answer]


def is_masked(message: Message) -> bool:
    """Whether a message belongs to the protocol."""
    return RECORD_KEY_CONFIGS in message.content.config_records


def masked_reply(message: Message, context: Context, names: Sequence[str], train: Train) -> Message:
    """A device's part of the protocol; what it trained leaves it masked."""

    def fit(asked: Message, _: Context) -> Message:
        ins = legacy.recorddict_to_fitins(asked.content, keep_input=True)
        arrays = parameters_to_ndarrays(ins.parameters)
        shared = {name: torch.from_numpy(np.array(array)) for name, array in zip(names, arrays, strict=True)}
        answer = train(shared, Order.unpacked(str(ins.config["order"])))
        assert answer.upload is not None
        _require_in_range(answer.upload.tensors)
        uploaded = [answer.upload.tensors[name].numpy() for name in names]
        figures: dict[str, Any] = {"figures": json.dumps(answer.figures)}
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(uploaded), answer.examples, figures)
        return Message(legacy.fitres_to_recorddict(result, keep_input=True), reply_to=asked)

    return secaggplus_mod(message, context, fit)


def _require_in_range(tree: Params) -> None:
    for name, tensor in tree.items():
        if not tensor.is_floating_point() or float(tensor.abs().max()) > RANGE:
            raise UploadError(f"upload: '{name}' is no float tensor within {-RANGE:g} to {RANGE:g}, as masking needs it")


class _Node:
    """A device as the legacy workflow knows it."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


class _Round:
    """A legacy strategy of one round: whom to ask, and what came of it."""

    def __init__(self, orders: Mapping[int, Order]) -> None:
        self.orders = orders
        self.arrays: list[Any] | None = None
        self.replies: dict[int, Reply] = {}

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[tuple[_Node, FitIns]]:
        return [(_Node(node), FitIns(parameters, {"order": order.packed()})) for node, order in self.orders.items()]

    def aggregate_fit(self, server_round: int, results: list[tuple[_Node, FitRes]], failures: Any) -> tuple[None, dict[str, Any]]:
        for node, result in results:
            self.arrays = parameters_to_ndarrays(result.parameters)
            self.replies[node.node_id] = Reply({}, result.num_examples, _figures(result))
        return None, {}


def _figures(result: FitRes) -> Json:
    """What it let leave; its upload is in the mean already, so that figures that cannot be read do not undo the round."""
    try:
        return read_figures(str(result.metrics.get("figures", "{}")))
    except (TypeError, ValueError) as error:
        return {"note": f"its figures cannot be read ({brief(error)})"}


class _Crowd:
    """A legacy client manager that knows how many there are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def num_available(self) -> int:
        return self.number


class _Workflow(SecAggPlusWorkflow):
    """Flower's, which fails when a device is lost before it has handed out its shares: it asks the others for them all the same."""

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """Who is lost until now has masked nothing, and nothing of it is to be unmasked."""
        enough = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = state.active_node_ids
        state.nid_to_neighbours = {node: near & state.active_node_ids for node, near in state.nid_to_neighbours.items()}
        return enough


def secure_mean(
    grid: Grid, shared: Params, orders: Mapping[int, Order], *, wait: float, heaviest: float
) -> tuple[Params | None, dict[int, Reply]]:
    """One round: the weighted mean of the uploads (None if too few stayed), and the replies without any upload.

    `heaviest` is the largest weight: the nearer the others are to it, the finer is the mean.
    """
    round_ = _Round(orders)
    state = RecordDict()
    arrays = ndarrays_to_parameters([tensor.numpy() for tensor in shared.values()])
    state.array_records[MAIN_PARAMS_RECORD] = legacy.parameters_to_arrayrecord(arrays, keep_input=True)
    number = next(iter(orders.values())).round_index
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: number})
    context = LegacyContext(Context(0, 0, {}, state, {}), None, round_, _Crowd(len(orders)))  # type: ignore[arg-type]
    workflow = _Workflow(1.0, _THRESHOLD, max_weight=heaviest, clipping_range=RANGE, timeout=wait)
    workflow(grid, context)
    if round_.arrays is None:
        return None, {}
    mean = {name: torch.from_numpy(np.array(array)).to(shared[name]) for name, array in zip(shared, round_.arrays, strict=True)}
    return mean, round_.replies
