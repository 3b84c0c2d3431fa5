"""SecAgg+ on the server: it learns the average of a cohort, and no upload (Bell et al. 2020).

It rests on Flower's legacy workflow and its positional Fit messages, which the rest of this package
does without; `secure_client.py` has the clients' part.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid

from glocal.core.errors import describe_error
from glocal.core.files import Json
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Instructions, Reply
from glocal.deploy.flower.records import read_metrics
from glocal.deploy.flower.secagg_client import CLIPPING_RANGE
from glocal.deploy.flower.server_internals import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    FitIns,
    FitRes,
    Key,
    LegacyContext,
    SecAggPlusWorkflow,
    legacy,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)

_THRESHOLD = 0.5  # of a cohort: fewer cannot unmask anybody, and as many must stay until the end


class _ClientProxy:
    """A device as the legacy workflow knows it."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


class _RoundStrategy:
    """A legacy strategy of one round: whom to ask, and what came of it."""

    def __init__(self, instructions: Mapping[int, Instructions]) -> None:
        self.instructions = instructions
        self.arrays: list[Any] | None = None
        self.replies: dict[int, Reply] = {}

    def configure_fit(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> list[tuple[_ClientProxy, FitIns]]:
        return [
            (_ClientProxy(node), FitIns(parameters, {"instructions": order.to_json()}))
            for node, order in self.instructions.items()
        ]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[_ClientProxy, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        for node, result in results:
            self.arrays = parameters_to_ndarrays(result.parameters)
            self.replies[node.node_id] = Reply({}, result.num_examples, _client_metrics(result))
        return None, {}


def _client_metrics(result: FitRes) -> Json:
    """What it let leave; its upload is in the mean already, so that figures that cannot be read do not undo the round."""
    try:
        return read_metrics(str(result.metrics.get("metrics", "{}")))
    except (TypeError, ValueError) as error:
        return {"note": f"its figures cannot be read ({describe_error(error)})"}


class _ClientManager:
    """A legacy client manager that knows how many there are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def num_available(self) -> int:
        return self.number


class _SecAggWorkflow(SecAggPlusWorkflow):
    """Flower's, which fails when a device is lost before it has handed out its shares: it asks the others for them all the same."""

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """Who is lost until now has masked nothing, and nothing of it is to be unmasked."""
        enough = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = state.active_node_ids
        state.nid_to_neighbours = {
            node: near & state.active_node_ids for node, near in state.nid_to_neighbours.items()
        }
        return enough


def secure_mean(
    grid: Grid,
    shared: Params,
    instructions: Mapping[int, Instructions],
    *,
    wait: float,
    max_weight: float,
) -> tuple[Params | None, dict[int, Reply]]:
    """One round: the weighted mean of the uploads (None if too few stayed), and the replies without any upload.

    `max_weight` is the largest weight: the nearer the others are to it, the finer is the mean.
    """
    round_ = _RoundStrategy(instructions)
    state = RecordDict()
    arrays = ndarrays_to_parameters([tensor.numpy() for tensor in shared.values()])
    state.array_records[MAIN_PARAMS_RECORD] = legacy.parameters_to_arrayrecord(
        arrays, keep_input=True
    )
    number = next(iter(instructions.values())).round_index
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: number})
    context = LegacyContext(
        Context(0, 0, {}, state, {}), None, round_, _ClientManager(len(instructions))
    )  # type: ignore[arg-type]
    workflow = _SecAggWorkflow(
        1.0, _THRESHOLD, max_weight=max_weight, clipping_range=CLIPPING_RANGE, timeout=wait
    )
    workflow(grid, context)
    if round_.arrays is None:
        return None, {}
    mean = {
        name: torch.from_numpy(np.array(array)).to(shared[name])
        for name, array in zip(shared, round_.arrays, strict=True)
    }
    return mean, round_.replies
