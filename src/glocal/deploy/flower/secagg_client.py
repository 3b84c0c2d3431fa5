"""The client's part of SecAgg+ (Bell et al. 2020): its upload leaves it masked.

It rests on Flower's legacy workflow and its positional Fit messages, which nothing else here uses:
the arrays of an upload are in the order of its schema. What the server sends is a blob, as it is
without masks. The server cannot check single masked uploads, so every client checks its own. The
server's part is in `secagg_server.py`.
"""

import json
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message

from glocal.core.trees import Params
from glocal.deploy.flower.client_internals import (
    SECAGG_RECORD,
    Code,
    FitRes,
    Status,
    legacy,
    ndarrays_to_parameters,
    secaggplus_mod,
)
from glocal.deploy.flower.protocol import ClientResult, Instructions
from glocal.wire import WireError

CLIPPING_RANGE = 8.0  # quantisation would cut off a number outside -8 to 8
INSTRUCTIONS, BLOB = "instructions", "blob"  # in the configuration of a Fit message

TrainFunction = Callable[[bytes, Instructions], ClientResult]


def is_masked(message: Message) -> bool:
    """Whether a message belongs to SecAgg+."""
    return SECAGG_RECORD in message.content.config_records


def masked_reply(message: Message, context: Context, train: TrainFunction) -> Message:
    """The client's reply in one stage of the protocol; the upload in it is masked."""

    def fit(request: Message, _: Context) -> Message:
        config = legacy.recorddict_to_fitins(request.content, keep_input=True).config
        blob, text = config[BLOB], str(config[INSTRUCTIONS])
        if not isinstance(blob, bytes):
            raise TypeError(f"the server's tensors are {type(blob).__name__}")
        result = train(blob, Instructions.from_json(text))
        assert result.payload is not None
        _require_in_range(result.payload)
        arrays = [tensor.float().numpy() for tensor in result.payload.values()]
        metrics: dict[str, Any] = {"metrics": json.dumps(result.metrics)}
        parameters = ndarrays_to_parameters(arrays)
        fit_res = FitRes(Status(Code.OK, ""), parameters, result.num_examples, metrics)
        return Message(legacy.fitres_to_recorddict(fit_res, keep_input=True), reply_to=request)

    return secaggplus_mod(message, context, fit)


def _require_in_range(payload: Params) -> None:
    for name, tensor in payload.items():
        if tensor.numel() and float(tensor.abs().max()) > CLIPPING_RANGE:
            raise WireError(
                f"wire: masking needs numbers within {-CLIPPING_RANGE:g} to {CLIPPING_RANGE:g}, "
                f"and the change of '{name}' has others"
            )
