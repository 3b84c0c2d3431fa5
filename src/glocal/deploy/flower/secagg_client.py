"""The client's part of SecAgg+ (Bell et al. 2020): its upload leaves it masked.

It rests on Flower's legacy workflow and its positional Fit messages, which nothing else here uses.
The server cannot check single masked uploads, so every client checks its own. The server's
part is in `secagg_server.py`.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message

from glocal.core.trees import Params
from glocal.deploy.flower.client_internals import (
    SECAGG_RECORD,
    Code,
    FitRes,
    Status,
    legacy,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
    secaggplus_mod,
)
from glocal.deploy.flower.protocol import ClientResult, Instructions
from glocal.wire import UploadError

CLIPPING_RANGE = 8.0  # quantisation would cut off a number outside -8 to 8

TrainFunction = Callable[[Params, Instructions], ClientResult]


def is_masked(message: Message) -> bool:
    """Whether a message belongs to SecAgg+."""
    return SECAGG_RECORD in message.content.config_records


def masked_reply(
    message: Message, context: Context, names: Sequence[str], train: TrainFunction
) -> Message:
    """The client's reply in one stage of the protocol; the upload in it is masked."""

    def fit(request: Message, _: Context) -> Message:
        ins = legacy.recorddict_to_fitins(request.content, keep_input=True)
        arrays = parameters_to_ndarrays(ins.parameters)
        pairs = zip(names, arrays, strict=True)
        shared = {name: torch.from_numpy(np.array(array)) for name, array in pairs}
        result = train(shared, Instructions.from_json(str(ins.config["instructions"])))
        assert result.upload is not None
        _require_in_range(result.upload.tensors)
        upload = [result.upload.tensors[name].numpy() for name in names]
        metrics: dict[str, Any] = {"metrics": json.dumps(result.metrics)}
        parameters = ndarrays_to_parameters(upload)
        fit_res = FitRes(Status(Code.OK, ""), parameters, result.num_examples, metrics)
        return Message(legacy.fitres_to_recorddict(fit_res, keep_input=True), reply_to=request)

    return secaggplus_mod(message, context, fit)


def _require_in_range(tree: Params) -> None:
    for name, tensor in tree.items():
        if not tensor.is_floating_point() or float(tensor.abs().max()) > CLIPPING_RANGE:
            raise UploadError(
                f"upload: masking needs float tensors within {-CLIPPING_RANGE:g} to "
                f"{CLIPPING_RANGE:g}, and '{name}' is not"
            )
