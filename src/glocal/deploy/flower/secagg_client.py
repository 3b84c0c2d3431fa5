"""SecAgg+ on the client: what it trained leaves it masked (Bell et al. 2020); `secure_server.py` has the rest.

It rests on Flower's legacy workflow and its positional Fit messages, which the rest of this package
does without. The server cannot check masked uploads one by one: every client checks its own.
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

CLIPPING_RANGE = 8.0  # a number outside of -8 to 8 would be cut off by quantisation

TrainFunction = Callable[[Params, Instructions], ClientResult]


def is_masked(message: Message) -> bool:
    """Whether a message belongs to the protocol."""
    return SECAGG_RECORD in message.content.config_records


def masked_reply(
    message: Message, context: Context, names: Sequence[str], train: TrainFunction
) -> Message:
    """A client's part of the protocol; what it trained leaves it masked."""

    def fit(asked: Message, _: Context) -> Message:
        ins = legacy.recorddict_to_fitins(asked.content, keep_input=True)
        arrays = parameters_to_ndarrays(ins.parameters)
        named = zip(names, arrays, strict=True)
        shared = {name: torch.from_numpy(np.array(array)) for name, array in named}
        answer = train(shared, Instructions.from_json(str(ins.config["instructions"])))
        assert answer.upload is not None
        _require_in_range(answer.upload.tensors)
        uploaded = [answer.upload.tensors[name].numpy() for name in names]
        metrics: dict[str, Any] = {"metrics": json.dumps(answer.metrics)}
        parameters = ndarrays_to_parameters(uploaded)
        result = FitRes(Status(Code.OK, ""), parameters, answer.num_examples, metrics)
        return Message(legacy.fitres_to_recorddict(result, keep_input=True), reply_to=asked)

    return secaggplus_mod(message, context, fit)


def _require_in_range(tree: Params) -> None:
    for name, tensor in tree.items():
        if not tensor.is_floating_point() or float(tensor.abs().max()) > CLIPPING_RANGE:
            raise UploadError(
                f"upload: '{name}' is no float tensor within {-CLIPPING_RANGE:g} to {CLIPPING_RANGE:g}, as masking needs it"
            )
