"""Conversion between our messages and Flower's records.

A tree is sent as one blob: Flower sends every array with several requests, so that sixty tensors
would take many seconds. The blob names its tensors and is read as data.
"""

import json
import math
import secrets
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.torch import load, save

from glocal.core.errors import describe_error
from glocal.core.files import Json
from glocal.core.trees import Params
from glocal.deploy.flower.client_internals import ErrorCode
from glocal.deploy.flower.protocol import ClientResult, Instructions, Reply

_SHARED, _CONFIG, _BLOB = "shared", "config", "blob"
_TEXT_METRICS = ("note", "fingerprint")  # all other metrics are numbers
_ACCURACIES = ("test", "validation")  # metrics from 0 to 1
_MAX_TEXT = 500  # characters of a client's text that are read
MAX_EXAMPLES = 2**53  # examples that a client may report


def to_record(tree: Params) -> ConfigRecord:
    """Named tensors as one blob; the names are the model's own.

    >>> import torch
    >>> from_record(to_record({"w": torch.ones(2)}))
    {'w': tensor([1., 1.])}
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tree.items()}
    return ConfigRecord({_BLOB: save(contiguous)})


def from_record(record: ConfigRecord) -> Params:
    """The tree of a blob; the order of its names is not preserved.

    The tensors are copied: their alignment within the blob would change how sums of products round.
    """
    blob = record[_BLOB]
    if not isinstance(blob, bytes):
        raise TypeError(f"its tensors are {type(blob).__name__}")
    return {name: tensor.clone() for name, tensor in load(blob).items()}


def instructions_to_record(shared: ConfigRecord | None, instructions: Instructions) -> RecordDict:
    """The content of a message to a client."""
    config = ConfigRecord({"instructions": instructions.to_json()})
    if shared is None:
        return RecordDict({_CONFIG: config})
    return RecordDict({_CONFIG: config, _SHARED: shared})


def read_instructions(content: RecordDict) -> tuple[Params, Instructions]:
    """The shared tree, empty where none was sent, and the instructions in a message."""
    shared = content.config_records.get(_SHARED)
    text = str(content.config_records[_CONFIG]["instructions"])
    instructions = Instructions.from_json(text)
    return from_record(shared) if shared is not None else {}, instructions


def result_to_record(result: ClientResult) -> RecordDict:
    """The content of a client's reply: an upload, its weight, and metrics.

    Flower names a record by the hash of its content. The nonce keeps another client that guesses
    the metrics from finding them by that name.
    """
    metrics, nonce = json.dumps(result.metrics), secrets.token_hex(16)
    config = ConfigRecord({"num_examples": result.num_examples, "metrics": metrics, "nonce": nonce})
    if result.upload is None:
        return RecordDict({_CONFIG: config})
    return RecordDict({_CONFIG: config, _SHARED: to_record(result.upload.tensors)})


def refusal_to_record(reason: str) -> RecordDict:
    """The content of a reply from a client that cannot do its task."""
    return RecordDict({_CONFIG: ConfigRecord({"fault": reason})})


def read_reply(message: Message) -> Reply:
    """A client's reply; one that cannot be read becomes a fault, not an error of the server."""
    if message.has_error():
        return _lost_reply(message)
    try:
        records = message.content.config_records
        config, shared = records[_CONFIG], records.get(_SHARED)
        if "fault" in config:
            return Reply({}, fault=str(config["fault"])[:_MAX_TEXT])
        num_examples = int(str(config["num_examples"]))
        if not 0 <= num_examples <= MAX_EXAMPLES:
            raise ValueError(f"it reports {num_examples} examples")
        tensors = from_record(shared) if shared is not None else {}
        return Reply(tensors, num_examples, read_metrics(str(config["metrics"])))
    except Exception as error:  # a broken or hostile client may send anything
        return Reply({}, fault=f"its reply cannot be read ({describe_error(error)})")


def _lost_reply(message: Message) -> Reply:
    error = message.error
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        reason = "it was restarted or disconnected before it replied"
    else:
        reason = f"Flower reports: {error.reason or f'error {error.code}'}"
    return Reply({}, fault=reason, lost=True)


def read_metrics(text: str) -> Json:
    """A client's metrics: finite numbers, and text under the names that stand for text.

    >>> read_metrics('{"loss": "low"}')
    Traceback (most recent call last):
    ...
    ValueError: its metric 'loss' is 'low'; a finite number was expected
    """
    metrics = json.loads(text)
    if not isinstance(metrics, Mapping):
        raise TypeError("its metrics are not a table")
    return {name: _check_metric(name, value) for name, value in metrics.items()}


def _check_metric(name: str, value: object) -> object:
    if name in _TEXT_METRICS:
        return str(value)[:_MAX_TEXT]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_bounded(value):
        raise ValueError(
            f"its metric '{name[:40]}' is {str(value)[:40]!r}; a finite number was expected"
        )
    if name in _ACCURACIES and not 0 <= value <= 1:
        raise ValueError(f"its metric '{name}' is {value}; a number from 0 to 1 was expected")
    return value


def _is_bounded(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= MAX_EXAMPLES
