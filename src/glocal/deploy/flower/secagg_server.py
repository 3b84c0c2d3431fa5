"""The server's part of SecAgg+ (Bell et al. 2020): it learns the average and no single upload.

It rests on Flower's legacy workflow and its positional Fit messages, which nothing else here uses.
The client's part is in `secagg_client.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid

from glocal.core.errors import InputError, describe_error
from glocal.core.files import Json
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Reply, Request
from glocal.deploy.flower.records import read_metrics
from glocal.deploy.flower.secagg_checks import CheckedGrid
from glocal.deploy.flower.secagg_client import BLOB, CLIPPING_RANGE, INSTRUCTIONS
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
from glocal.wire import Schema, pack

# The share of the sampled clients that must stay until the end, and that can unmask an upload.
_THRESHOLD = 0.5


class _ClientProxy:
    """A client as the legacy workflow knows it."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


class _RoundStrategy:
    """A legacy strategy for one round: it holds the requests and collects the results."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self.requests = requests
        self.arrays: list[Any] | None = None
        self.replies: dict[int, Reply] = {}

    def configure_fit(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> list[tuple[_ClientProxy, FitIns]]:
        """The requests; Flower's own place for arrays stays empty."""
        requests: list[tuple[_ClientProxy, FitIns]] = []
        for node, request in self.requests.items():
            blob = pack(request.message or {})
            config: dict[str, Any] = {INSTRUCTIONS: request.instructions.to_json(), BLOB: blob}
            requests.append((_ClientProxy(node), FitIns(parameters, config)))
        return requests

    def aggregate_fit(
        self, server_round: int, results: list[tuple[_ClientProxy, FitRes]], failures: Any
    ) -> tuple[None, dict[str, Any]]:
        """Keep the mean, which each of the results has, and what the clients say beside it."""
        for node, result in results:
            self.arrays = parameters_to_ndarrays(result.parameters)
            self.replies[node.node_id] = Reply(b"", result.num_examples, _client_metrics(result))
        return None, {}


def _client_metrics(result: FitRes) -> Json:
    """A client's metrics; unreadable ones must not undo a round whose mean includes the upload."""
    try:
        return read_metrics(str(result.metrics.get("metrics", "{}")))
    except (TypeError, ValueError) as error:
        return {"note": f"its metrics cannot be read ({describe_error(error)})"}


class _ClientManager:
    """A legacy client manager that only knows the number of clients."""

    def __init__(self, number: int) -> None:
        self.number = number

    def num_available(self) -> int:
        return self.number


class _SecAggWorkflow(SecAggPlusWorkflow):
    """Flower's workflow, made to survive the loss of a client before the key shares are sent.

    Flower's own would ask the other clients for the shares of the lost one, and fail.
    """

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """Leave out the clients lost so far: they have masked nothing."""
        enough = super().share_keys_stage(grid, context, state)
        active = state.active_node_ids
        state.sampled_node_ids = active
        neighbours = state.nid_to_neighbours
        state.nid_to_neighbours = {node: near & active for node, near in neighbours.items()}
        return enough

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: Any) -> bool:
        """Unmask the mean; shares that do not fit together are an error of the run."""
        try:
            return super().unmask_stage(grid, context, state)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"run: a masked round could not be unmasked ({describe_error(error)}): the key "
                "shares of its clients do not fit together; repeat it with `glocal deploy resume`"
            ) from error


def secure_mean(
    grid: Grid,
    requests: Mapping[int, Request],
    schema: Schema,
    *,
    timeout: float,
    max_weight: float,
) -> tuple[Params | None, dict[int, Reply]]:
    """One round: the weighted mean of the uploads, None if too few stayed, and replies without it.

    A client whose reply in one of the stages cannot be used is left out from then on, and its reply
    here says why; after the mean has been masked, a note does.
    `max_weight` is the largest weight: the nearer the others are to it, the finer is the mean.
    """
    strategy = _RoundStrategy(requests)
    workflow = _SecAggWorkflow(
        1.0, _THRESHOLD, max_weight=max_weight, clipping_range=CLIPPING_RANGE, timeout=timeout
    )
    shapes = [(1,), *(form.shape for form in schema.values())]  # first, the weight
    checked: Any = CheckedGrid(grid, shapes)  # the workflow sends and receives, and no more
    workflow(checked, _legacy_context(strategy))
    replies = _with_faults(strategy.replies, checked.faults)
    if strategy.arrays is None:
        return None, replies
    mean = {}
    for (name, form), array in zip(schema.items(), strategy.arrays, strict=True):
        mean[name] = torch.from_numpy(np.array(array)).to(form.dtype)
    return mean, replies


def _with_faults(replies: Mapping[int, Reply], faults: Mapping[int, str]) -> dict[int, Reply]:
    """The replies, and those of clients whose reply in one of the stages could not be used."""
    known = dict(replies)
    for node, fault in faults.items():
        if node in replies:  # its upload is part of the mean
            metrics = {**replies[node].metrics, "note": fault}
            known[node] = replace(replies[node], metrics=metrics)
        else:
            known[node] = Reply(fault=fault)
    return known


def _legacy_context(strategy: _RoundStrategy) -> LegacyContext:
    """What the legacy workflow reads and writes in one round."""
    state = RecordDict()
    record = legacy.parameters_to_arrayrecord(ndarrays_to_parameters([]), keep_input=True)
    state.array_records[MAIN_PARAMS_RECORD] = record
    round_index = next(iter(strategy.requests.values())).instructions.round_index
    state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round_index})
    # Flower's types ask for its whole Strategy and ClientManager: the workflow calls these parts
    manager: Any = _ClientManager(len(strategy.requests))
    parts: Any = strategy
    return LegacyContext(Context(0, 0, {}, state, {}), None, parts, manager)
