"""Top-k: send the largest numbers of a message, remember the rest for the next time."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_value
from glocal.core.trees import Params
from glocal.wire.bits import pack_ascending, unpack_ascending
from glocal.wire.codec import floating


@dataclass(frozen=True)
class TopK:
    """The `share` of every tensor's numbers with the largest magnitude (Aji and Heafield 2017).

    What is left out is added to the next message (error feedback, Stich et al. 2018), so it is
    private state of the client. Indices are coded by their gaps: about 1 byte each where 1 % is
    sent, instead of 4.

    >>> codec, message = TopK(0.5), {"w": torch.tensor([1.0, -4.0, 2.0, 0.5])}
    >>> sent, memory = codec.encode(message, codec.init(message), torch.tensor(0))
    >>> codec.decode(sent, message)["w"].tolist(), memory["w"].tolist()
    ([0.0, -4.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.5])
    """

    share: float

    keeps_form: ClassVar[bool] = False

    def __post_init__(self) -> None:
        is_number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not is_number or not 0 < self.share <= 1:
            raise InputError(
                f"codec: top_k has share = {describe_value(self.share)}; "
                "a number above 0 and at most 1 was expected"
            )

    def init(self, like: Params) -> Params:
        """No error so far."""
        return {name: torch.zeros_like(tensor) for name, tensor in floating(like).items()}

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The largest numbers and their places; the others become the memory."""
        payload = {name: tensor for name, tensor in message.items() if name not in memory}
        errors = {}
        for name, error in memory.items():
            whole = (message[name] + error).flatten()
            chosen = whole.abs().topk(self.count(whole.shape[0])).indices
            index = chosen.sort().values
            values = whole.gather(0, index)
            low, high = pack_ascending(index, whole.shape[0])
            payload |= {f"{name}#values": values, f"{name}#low": low, f"{name}#high": high}
            left_out = whole.scatter(0, index, torch.zeros_like(values))
            errors[name] = left_out.reshape(error.shape)
        return payload, errors

    def decode(self, payload: Params, like: Params) -> Params:
        """The numbers at their places, zeros elsewhere."""
        message = {}
        for name, tensor in like.items():
            if name in payload:
                message[name] = payload[name]
                continue
            size = tensor.numel()
            low, high = payload[f"{name}#low"], payload[f"{name}#high"]
            index = unpack_ascending(low, high, self.count(size), size)
            empty = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
            message[name] = empty.scatter(0, index, payload[f"{name}#values"]).reshape(tensor.shape)
        return message

    def count(self, size: int) -> int:
        """How many of so many numbers are sent."""
        return min(size, max(1, math.floor(self.share * size)))
