"""Conversion between our messages and Flower's records.

A tree is sent as one blob: Flower sends every array with several requests, so that sixty tensors
would take many seconds. The blob has the numbers alone, as both ends know the schema; whoever
receives it checks it against that before it is read.
"""

import json
import math
import secrets
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, RecordDict

from glocal.core.errors import describe_error
from glocal.core.files import Json
from glocal.core.trees import Params
from glocal.deploy.flower.client_internals import ErrorCode
from glocal.deploy.flower.protocol import ClientResult, Instructions, Reply
from glocal.wire import pack

_TREE, _CONFIG, _BLOB = "tree", "config", "blob"
_TEXT_METRICS = ("note", "fingerprint")  # all other metrics are numbers, pairs or tables of numbers
_MAX_TEXT = 500  # characters of a client's text that are read
_MAX_METRICS = 100  # in a table
MAX_EXAMPLES = 2**53  # examples that a client may report


def to_record(tree: Params) -> ConfigRecord:
    """A tree as one blob.

    >>> import torch
    >>> len(from_record(to_record({"w": torch.ones(2)})))
    8
    """
    return ConfigRecord({_BLOB: pack(tree)})


def from_record(record: ConfigRecord | None) -> bytes:
    """The bytes of a blob; none where there is no record."""
    blob = b"" if record is None else record[_BLOB]
    if not isinstance(blob, bytes):
        raise TypeError(f"its tensors are {type(blob).__name__}")
    return blob


def request_to_record(tree: ConfigRecord | None, instructions: Instructions) -> RecordDict:
    """The content of a message to a client."""
    config = ConfigRecord({"instructions": instructions.to_json()})
    if tree is None:
        return RecordDict({_CONFIG: config})
    return RecordDict({_CONFIG: config, _TREE: tree})


def read_request(content: RecordDict) -> tuple[bytes, Instructions]:
    """The packed tree, empty where none was sent, and the instructions in a message."""
    text = str(content.config_records[_CONFIG]["instructions"])
    return from_record(content.config_records.get(_TREE)), Instructions.from_json(text)


def result_to_record(result: ClientResult) -> RecordDict:
    """The content of a client's reply: a payload, its weight, and metrics.

    Flower names a record by the hash of its content. The nonce keeps another client that guesses
    the metrics from finding them by that name.
    """
    metrics, nonce = json.dumps(result.metrics), secrets.token_hex(16)
    config = ConfigRecord({"num_examples": result.num_examples, "metrics": metrics, "nonce": nonce})
    if result.payload is None:
        return RecordDict({_CONFIG: config})
    return RecordDict({_CONFIG: config, _TREE: to_record(result.payload)})


def refusal_to_record(reason: str) -> RecordDict:
    """The content of a reply from a client that cannot do its task."""
    return RecordDict({_CONFIG: ConfigRecord({"fault": reason})})


def read_reply(message: Message) -> Reply:
    """A client's reply; one that cannot be read becomes a fault, not an error of the server."""
    if message.has_error():
        return _lost_reply(message)
    try:
        records = message.content.config_records
        config = records[_CONFIG]
        if "fault" in config:
            return Reply(fault=str(config["fault"])[:_MAX_TEXT])
        num_examples = int(str(config["num_examples"]))
        if not 0 <= num_examples <= MAX_EXAMPLES:
            raise ValueError(f"it reports {num_examples} examples")
        payload = from_record(records.get(_TREE))
        return Reply(payload, num_examples, read_metrics(str(config["metrics"])))
    except Exception as error:  # a broken or hostile client may send anything
        return Reply(fault=f"its reply cannot be read ({describe_error(error)})")


def _lost_reply(message: Message) -> Reply:
    error = message.error
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        reason = "it was restarted or disconnected before it replied"
    else:
        reason = f"Flower reports: {error.reason or f'error {error.code}'}"
    return Reply(fault=reason, lost=True)


def read_metrics(text: str) -> Json:
    """A client's metrics: finite numbers, pairs and tables of them, and text where it stands.

    >>> read_metrics('{"loss": [3.5, 7], "test": {"accuracy": 0.5}}')
    {'loss': [3.5, 7], 'test': {'accuracy': 0.5}}
    >>> read_metrics('{"loss": "low"}')
    Traceback (most recent call last):
    ...
    ValueError: its metric 'loss' is 'low'; a finite number was expected
    """
    return {name: _check_metric(name, value) for name, value in _table(json.loads(text)).items()}


def _check_metric(name: str, value: object) -> object:
    if name in _TEXT_METRICS:
        return str(value)[:_MAX_TEXT]
    if isinstance(value, list) and len(value) == 2:
        return [_check_number(name, each) for each in value]
    if isinstance(value, Mapping):
        return {inner: _check_number(inner, each) for inner, each in _table(value).items()}
    return _check_number(name, value)


def _table(metrics: object) -> Mapping[str, object]:
    if not isinstance(metrics, Mapping):
        raise TypeError("its metrics are not a table")
    if len(metrics) > _MAX_METRICS or max(map(len, metrics), default=0) > _MAX_TEXT:
        raise ValueError(
            f"it reports {len(metrics)} metrics; at most {_MAX_METRICS} with short names expected"
        )
    return metrics


def _check_number(name: str, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_bounded(value):
        raise ValueError(
            f"its metric '{name[:40]}' is {str(value)[:40]!r}; a finite number was expected"
        )
    return value


def _is_bounded(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= MAX_EXAMPLES
