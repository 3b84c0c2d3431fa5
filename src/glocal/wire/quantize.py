"""Codecs that send few bits per number: stochastic rounding to levels, with a scale per tensor.

A number is rounded up or down at random, in proportion to how near the two levels are. So the mean
of many rounded numbers is the number itself (QSGD, Alistarh et al. 2017).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from glocal.core import random
from glocal.core.trees import Params
from glocal.wire.bits import pack_nibbles, unpack_nibbles
from glocal.wire.codec import floating, name_address

_SCALE = "#scale"


@dataclass(frozen=True)
class Int8:
    """255 levels per tensor, one byte per number.

    >>> sent, _ = Int8().encode({"w": torch.tensor([-1.0, 0.0, 1.0])}, {}, torch.tensor(0))
    >>> {name: tensor.tolist() for name, tensor in sent.items()}["w#int8"]
    [-127, 0, 127]
    """

    keeps_form: ClassVar[bool] = False

    def init(self, like: Params) -> Params:
        """Nothing to remember: the rounding has no bias."""
        return {}

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """Whole numbers and a scale for each tensor of floating numbers."""
        payload: Params = {}
        for name, tensor in message.items():
            if not tensor.is_floating_point():
                payload[name] = tensor
                continue
            levels, scale = _round(tensor, random.fold_in(key, name_address(name)), 127)
            payload[f"{name}#int8"] = levels.to(torch.int8)
            payload[name + _SCALE] = scale
        return payload, memory

    def decode(self, payload: Params, like: Params) -> Params:
        """Levels times scale."""
        message = {}
        for name, tensor in like.items():
            if name in payload:
                message[name] = payload[name]
            else:
                levels = payload[f"{name}#int8"].to(tensor.dtype)
                message[name] = levels * payload[name + _SCALE]
        return message


@dataclass(frozen=True)
class Int4:
    """15 levels per tensor, two numbers in a byte.

    >>> sent, _ = Int4().encode({"w": torch.zeros(1000)}, {}, torch.tensor(0))
    >>> sent["w#int4"].numel(), sent["w#int4"].dtype
    (500, torch.uint8)
    """

    keeps_form: ClassVar[bool] = False

    def init(self, like: Params) -> Params:
        """Nothing to remember: the rounding has no bias."""
        return {}

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """Packed levels and a scale for each tensor of floating numbers."""
        payload = {
            name: tensor for name, tensor in message.items() if name not in floating(message)
        }
        for name, tensor in floating(message).items():
            levels, scale = _round(tensor, random.fold_in(key, name_address(name)), 7)
            payload[f"{name}#int4"] = pack_nibbles((levels + 8).to(torch.int64).flatten())
            payload[name + _SCALE] = scale
        return payload, memory

    def decode(self, payload: Params, like: Params) -> Params:
        """Levels times scale."""
        message = {}
        for name, tensor in like.items():
            if name in payload:
                message[name] = payload[name]
                continue
            levels = unpack_nibbles(payload[f"{name}#int4"], tensor.numel()) - 8
            scaled = levels.to(tensor.dtype) * payload[name + _SCALE]
            message[name] = scaled.reshape(tensor.shape)
        return message


def _round(tensor: Tensor, key: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers from -levels to levels, and the value of one level ()."""
    if not tensor.numel():
        return tensor, tensor.new_zeros(())
    scale = tensor.abs().amax() / levels
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    noise = random.uniform(key, tensor.shape).to(tensor.dtype)
    return torch.floor(tensor / safe + noise).clamp(-levels, levels), scale
