"""Codecs: what a client does to its upload before it is sent, and how the server undoes it.

A codec is a value with a client half (`encode`) and a server half (`decode`). It works on messages
of one client, and engines batch it. What a client has to remember, such as the error that a lossy
codec made, is private state. Whole numbers (counters) pass through unless a codec says otherwise.
"""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from glocal.core import random
from glocal.core.checks import require_choice, require_flag, require_number
from glocal.core.errors import InputError, describe_value
from glocal.core.trees import Params
from glocal.wire.schema import Schema, empty_message, schema_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@runtime_checkable
class Codec(Protocol):
    """The two halves. With `keeps_form`, a payload has the names, shapes and types of a message."""

    @property
    def keeps_form(self) -> bool:
        """Whether payloads can be averaged without decoding, as secure aggregation does."""

    def init(self, like: Params) -> Params:
        """A client's memory before its first upload."""

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The payload that is sent, and the memory after it; key () seeds what is random."""

    def decode(self, payload: Params, like: Params) -> Params:
        """The message of a payload, in the form of `like`."""


@dataclass(frozen=True)
class Identity:
    """Sends messages as they are."""

    keeps_form: ClassVar[bool] = True

    def init(self, like: Params) -> Params:
        """Nothing to remember."""
        return {}

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The message itself."""
        return message, memory

    def decode(self, payload: Params, like: Params) -> Params:
        """The message itself."""
        return payload


@dataclass(frozen=True)
class Clip(Identity):
    """Scales a message down so that the L2 norm of all its tensors together is at most `norm`.

    >>> sent, _ = Clip(1.0).encode({"w": torch.tensor([3.0, 4.0])}, {}, torch.tensor(0))
    >>> sent["w"]
    tensor([0.6000, 0.8000])
    """

    norm: float

    def __post_init__(self) -> None:
        require_number("codec: the norm of Clip", self.norm, lambda norm: norm > 0, "above 0")

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The message, scaled."""
        floats = floating(message)
        if not floats:
            return message, memory
        squares = [tensor.double().square().sum() for tensor in floats.values()]
        length = torch.stack(squares).sum().sqrt()
        scale = (self.norm / length.clamp(min=1e-12)).clamp(max=1.0)
        scaled = {name: tensor * scale.to(tensor.dtype) for name, tensor in floats.items()}
        return {**message, **scaled}, memory


@dataclass(frozen=True)
class Noise(Identity):
    """Adds normal noise with the standard deviation `std` to every number of a message.

    After `Clip`, this is differential privacy on the client (Abadi et al. 2016, McMahan et al.
    2018): the server sees noisy messages only. Whole numbers cannot be noised, so their change is
    not sent. The simulator draws by address, so that runs repeat. A real client must draw numbers
    that nobody can predict: `entropy` takes the machine's.

    >>> sent, _ = Noise(0.1).encode({"w": torch.zeros(1000)}, {}, torch.tensor(0))
    >>> 0.09 < float(sent["w"].std()) < 0.11
    True
    """

    std: float
    entropy: bool = False

    def __post_init__(self) -> None:
        require_number("codec: the std of Noise", self.std, lambda std: std > 0, "above 0")
        require_flag("codec: the entropy of Noise", self.entropy)

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The message plus noise."""
        noisy = {}
        for name, tensor in message.items():
            if not tensor.is_floating_point():
                noisy[name] = torch.zeros_like(tensor)
                continue
            draw = _entropy_normal if self.entropy else random.normal
            noise = draw(random.fold_in(key, name_address(name)), tensor.shape)
            noisy[name] = tensor + self.std * noise.to(tensor)
        return noisy, memory


@dataclass(frozen=True)
class Half:
    """Sends numbers with 16 bits: "fp16" or "bf16".

    >>> sent, _ = Half("bf16").encode({"w": torch.tensor([1.0, 2.0])}, {}, torch.tensor(0))
    >>> sent["w"].dtype
    torch.bfloat16
    """

    name: str = "fp16"

    keeps_form: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_choice("codec: the name of Half", self.name, DTYPES)

    def init(self, like: Params) -> Params:
        """Nothing to remember."""
        return {}

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The message, rounded."""
        dtype = DTYPES[self.name]
        rounded = {name: tensor.to(dtype) for name, tensor in floating(message).items()}
        return {**message, **rounded}, memory

    def decode(self, payload: Params, like: Params) -> Params:
        """The message in its own type."""
        return {name: payload[name].to(tensor.dtype) for name, tensor in like.items()}


@dataclass(frozen=True)
class Chain:
    """Codecs one after the other; the server undoes them in reverse."""

    codecs: tuple[Codec, ...]

    @property
    def keeps_form(self) -> bool:
        """Whether every one keeps the form."""
        return all(codec.keeps_form for codec in self.codecs)

    def init(self, like: Params) -> Params:
        """The memory of all, each under its place."""
        memory: Params = {}
        for place, (codec, form) in enumerate(zip(self.codecs, self._forms(like), strict=True)):
            own = codec.init(empty_message(form, _device(like)))
            memory |= {f"{place}/{name}": tensor for name, tensor in own.items()}
        return memory

    def encode(self, message: Params, memory: Params, key: Tensor) -> tuple[Params, Params]:
        """The payload of the last one."""
        after: Params = {}
        for place, codec in enumerate(self.codecs):
            prefix = f"{place}/"
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in memory.items()
                if name.startswith(prefix)
            }
            message, own = codec.encode(message, own, random.fold_in(key, place))
            after |= {prefix + name: tensor for name, tensor in own.items()}
        return message, after

    def decode(self, payload: Params, like: Params) -> Params:
        """The message before the first one."""
        forms = self._forms(like)
        for codec, form in zip(reversed(self.codecs), reversed(forms), strict=True):
            payload = codec.decode(payload, empty_message(form, _device(payload)))
        return payload

    def _forms(self, like: Params) -> list[Schema]:
        """What enters each codec."""
        return _stage_forms(self.codecs, tuple(schema_of(like).items()))


def chain(*codecs: Codec) -> Codec:
    """Several codecs as one, the first one first.

    >>> chain(Clip(1.0), Noise(0.1)).keeps_form, chain()
    (True, Identity())
    """
    for codec in codecs:
        require_codec(codec)
    if len(codecs) <= 1:
        return codecs[0] if codecs else Identity()
    return Chain(codecs)


def require_codec(codec: object) -> None:
    """Refuse what is no codec, such as the class of one."""
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise InputError(
            f"codec: {getattr(codec, '__name__', describe_value(codec))} was given; "
            "one of glocal's was expected, such as glocal.Int8()"
        )


def floating(message: Params) -> Params:
    """The tensors that codecs change; whole numbers are sent as they are."""
    return {name: tensor for name, tensor in message.items() if tensor.is_floating_point()}


def name_address(name: str) -> int:
    """The address of a tensor's randomness: its name, since the order of tensors may change."""
    return zlib.crc32(name.encode())


@lru_cache(maxsize=64)
def _stage_forms(codecs: Sequence[Codec], items: tuple[tuple[str, object], ...]) -> list[Schema]:
    """What enters each codec, by trial on zeros."""
    forms = [dict(items)]
    for codec in codecs[:-1]:
        message = empty_message(forms[-1])  # type: ignore[arg-type]
        payload, _ = codec.encode(message, codec.init(message), torch.tensor(0))
        forms.append(schema_of(payload))  # type: ignore[arg-type]
    return forms  # type: ignore[return-value]


def _device(message: Params) -> torch.device | None:
    return next((tensor.device for tensor in message.values()), None)


def _entropy_normal(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal numbers seeded by the machine's entropy, not by the key, which the server knows."""
    seed = int.from_bytes(os.urandom(8), "little", signed=True)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(key.device)
