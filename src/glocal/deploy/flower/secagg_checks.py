"""What a client's reply must be in each stage of SecAgg+; Flower's workflow reads it unchecked.

A reply is checked for what the server can see: fields, types, sizes, and for whom it is. Whether
masks and key shares are right cannot be seen in a single reply.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.serverapp import Grid

from glocal.core.errors import describe_error
from glocal.deploy.flower.records import MAX_EXAMPLES
from glocal.deploy.flower.server_internals import (
    SECAGG_RECORD,
    SecAggKey,
    SecAggStage,
    legacy,
    masked_arrays,
    share_sizes,
)

Shapes = Sequence[tuple[int, ...]]


class CheckedGrid:
    """A grid that leaves out replies that do not fit their stage, as if they had not come.

    `faults` says by node what was wrong. `shapes` are those of the masked arrays.
    """

    def __init__(self, grid: Grid, shapes: Shapes) -> None:
        self.grid, self.shapes = grid, shapes
        self.faults: dict[int, str] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send all; the errors, and the replies that can be used."""
        requests = list(messages)
        sent = {message.metadata.dst_node_id: _fields(message) for message in requests}
        usable = []
        for reply in self.grid.send_and_receive(requests, timeout=timeout):
            node = reply.metadata.src_node_id
            if reply.has_error() or self._is_usable(node, sent[node], reply):
                usable.append(reply)
        return usable

    def _is_usable(self, node: int, request: dict[str, Any], reply: Message) -> bool:
        stage = request[SecAggKey.STAGE]
        try:
            if stage == SecAggStage.COLLECT_MASKED_VECTORS:
                _check_masked_vectors(reply, self.shapes)
            else:
                _CHECKS[stage](_fields(reply), request, node)
        except Exception as error:  # a broken or hostile client may send anything
            reason = describe_error(error)
            self.faults[node] = f"its reply in stage '{stage}' cannot be used ({reason})"
            return False
        return True


def _fields(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records[SECAGG_RECORD])


def _check_public_keys(reply: dict[str, Any], request: dict[str, Any], node: int) -> None:
    """Two different keys on the curve that all clients use."""
    keys = [
        _of_type(reply[name], bytes) for name in (SecAggKey.PUBLIC_KEY_1, SecAggKey.PUBLIC_KEY_2)
    ]
    _require(keys[0] != keys[1], "its two public keys are the same")
    for key in keys:
        public = serialization.load_pem_public_key(key)
        on_curve = isinstance(public, ec.EllipticCurvePublicKey) and (
            isinstance(public.curve, ec.SECP384R1)
        )
        _require(on_curve, "its public key is of another kind")


def _check_shares_sent(reply: dict[str, Any], request: dict[str, Any], node: int) -> None:
    """A ciphertext for each neighbour."""
    neighbours = {int(name) for name in request if name != SecAggKey.STAGE} - {node}
    receivers = _list_of(int, reply[SecAggKey.DESTINATION_LIST])
    ciphertexts = _list_of(bytes, reply[SecAggKey.CIPHERTEXT_LIST])
    _require(Counter(receivers) == Counter(neighbours), "its shares are for other clients")
    _require(len(ciphertexts) == len(receivers), "it has not one share for each client")


def _check_masked_vectors(reply: Message, shapes: Shapes) -> None:
    """Masked integers in the shapes of the shared part, and a count of examples."""
    parts = _list_of(bytes, _fields(reply)[SecAggKey.MASKED_PARAMETERS])
    arrays = masked_arrays(parts)
    _require([array.shape for array in arrays] == list(shapes), "its arrays have other shapes")
    _require(all(array.dtype == np.int64 for array in arrays), "its arrays have another type")
    inside = all(array.min() >= 0 and array.max() < 2**32 for array in arrays if array.size)
    _require(inside, "its numbers are out of range")
    result = legacy.recorddict_to_fitres(reply.content, keep_input=True)
    examples = _of_type(result.num_examples, int)
    _require(1 <= examples <= MAX_EXAMPLES, f"it reports {examples} examples")


def _check_shares_returned(reply: dict[str, Any], request: dict[str, Any], node: int) -> None:
    """One share for each client that was asked about, in its length."""
    active, dead = request[SecAggKey.ACTIVE_NODE_ID_LIST], request[SecAggKey.DEAD_NODE_ID_LIST]
    owners = _list_of(int, reply[SecAggKey.NODE_ID_LIST])
    shares = _list_of(bytes, reply[SecAggKey.SHARE_LIST])
    _require(Counter(owners) == Counter([*active, *dead]), "its shares are of other clients")
    _require(len(shares) == len(owners), "it has not one share of each client")
    of_active, of_dead = share_sizes()
    for owner, share in zip(owners, shares, strict=True):
        size = of_active if owner in active else of_dead
        _require(len(share) == size, f"a share has {len(share)} bytes, and {size} were expected")


_CHECKS: dict[str, Callable[[dict[str, Any], dict[str, Any], int], None]] = {
    SecAggStage.SETUP: _check_public_keys,
    SecAggStage.SHARE_KEYS: _check_shares_sent,
    SecAggStage.UNMASK: _check_shares_returned,
}


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} was expected, not {type(value).__name__}")
    return value


def _list_of(kind: type, values: Any) -> list[Any]:
    return [_of_type(value, kind) for value in _of_type(values, list)]
