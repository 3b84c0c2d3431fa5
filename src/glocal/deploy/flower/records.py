"""Our trees and words as Flower's records, and back.

A tree crosses as one blob: Flower sends every array by several requests of its own, so that sixty
tensors would take many seconds. The blob names its tensors, and is read as data.
"""

import json
import math
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.torch import load, save

from glocal.core.errors import describe_error
from glocal.core.files import Json
from glocal.core.trees import Params
from glocal.deploy.flower.client_internals import ErrorCode
from glocal.deploy.flower.protocol import ClientResult, Instructions, Reply

_SHARED, _CONFIG, _BLOB = "shared", "config", "blob"
_TEXT_METRICS = ("note", "fingerprint")  # figures that are words; all others are numbers
_ACCURACIES = ("test", "validation")  # accuracies
_MAX_TEXT = 500  # characters of a device's words that are kept
_MAX_EXAMPLES = 2**53  # examples that a device may say it has


def to_record(tree: Params) -> ConfigRecord:
    """Named tensors as one blob; the names are the model's own.

    >>> import torch
    >>> from_record(to_record({"w": torch.ones(2)}))
    {'w': tensor([1., 1.])}
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tree.items()}
    return ConfigRecord({_BLOB: save(contiguous)})


def from_record(record: ConfigRecord) -> Params:
    """The tree that was sent; its names come in another order.

    Its tensors are copied: where one begins in the blob decides how products of a row round.
    """
    blob = record[_BLOB]
    if not isinstance(blob, bytes):
        raise TypeError(f"its tensors are {type(blob).__name__}")
    return {name: tensor.clone() for name, tensor in load(blob).items()}


def instructions_to_record(shared: ConfigRecord | None, order: Instructions) -> RecordDict:
    """What goes to a device."""
    words = {_CONFIG: ConfigRecord({"instructions": order.to_json()})}
    return RecordDict({**words, **({_SHARED: shared} if shared is not None else {})})


def read_instructions(content: RecordDict) -> tuple[Params, Instructions]:
    """What a device was sent."""
    shared = content.config_records.get(_SHARED)
    order = Instructions.from_json(str(content.config_records[_CONFIG]["instructions"]))
    return from_record(shared) if shared is not None else {}, order


def result_to_record(answer: ClientResult) -> RecordDict:
    """What leaves a device: an upload, its weight, and figures."""
    words = ConfigRecord(
        {"num_examples": answer.num_examples, "metrics": json.dumps(answer.metrics)}
    )
    uploaded = {_SHARED: to_record(answer.upload.tensors)} if answer.upload is not None else {}
    return RecordDict({_CONFIG: words, **uploaded})


def refusal_to_record(reason: str) -> RecordDict:
    """What a device says that cannot do what it was asked."""
    return RecordDict({_CONFIG: ConfigRecord({"fault": reason})})


def read_reply(message: Message) -> Reply:
    """A reply as it came; one that cannot be read is a fault, not a failure of the server."""
    if message.has_error():
        error = message.error
        reason = f"Flower says: {error.reason or f'error {error.code}'}"
        if error.code == ErrorCode.NODE_UNAVAILABLE:
            reason = "it was started anew, or cut off, before it answered"
        return Reply({}, fault=reason, lost=True)
    try:
        records = message.content.config_records
        words, shared = records[_CONFIG], records.get(_SHARED)
        if "fault" in words:
            return Reply({}, fault=str(words["fault"])[:_MAX_TEXT])
        num_examples = int(str(words["num_examples"]))
        if not 0 <= num_examples <= _MAX_EXAMPLES:
            raise ValueError(f"it counts {num_examples} examples")
        return Reply(
            from_record(shared) if shared is not None else {},
            num_examples,
            read_metrics(str(words["metrics"])),
        )
    except Exception as error:  # whatever a broken or hostile device may send
        return Reply({}, fault=f"its reply cannot be read ({describe_error(error)})")


def read_metrics(text: str) -> Json:
    """The figures that a device sent: finite numbers, and words where words belong.

    >>> read_metrics('{"loss": "low"}')
    Traceback (most recent call last):
    ...
    ValueError: its figure 'loss' is 'low'; a finite number was expected
    """
    metrics = json.loads(text)
    if not isinstance(metrics, Mapping):
        raise TypeError("its figures are no table")
    return {name: _check_metric(name, value) for name, value in metrics.items()}


def _check_metric(name: str, value: object) -> object:
    if name in _TEXT_METRICS:
        return str(value)[:_MAX_TEXT]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or abs(value) > _MAX_EXAMPLES
    ):
        raise ValueError(
            f"its figure '{name[:40]}' is {str(value)[:40]!r}; a finite number was expected"
        )
    if name in _ACCURACIES and not 0 <= value <= 1:
        raise ValueError(f"its figure '{name}' is {value}; a share from 0 to 1 was expected")
    return value
