"""The wire of an algorithm: all that may cross, what a client keeps, and how payloads are bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.core import random, trees
from glocal.core.errors import InputError
from glocal.core.trees import Params
from glocal.wire.codec import Codec, Identity
from glocal.wire.schema import Schema, WireError, empty_message, gate, schema_of

MEMORY = "codec/"  # in a client's private tree: what its codec remembers
_CODEC = -2  # the address of a codec's randomness within the key of a client's round


@dataclass(frozen=True)
class Wire:
    """Schemas of downloads, uploads, payloads (encoded uploads) and private trees; the codec."""

    download: Schema
    upload: Schema
    payload: Schema
    private: Schema
    codec: Codec

    @classmethod
    def of(cls, download: Params, upload: Params, private: Params, codec: Codec) -> "Wire":
        """From messages and a private tree like those that will be.

        A message may not have the name of a private tensor: it could be the tensor itself.
        """
        both = private.keys() & (download.keys() | upload.keys())
        if both:
            raise InputError(
                f"wire: {sorted(both)} names private tensors and parts of a message; rename one"
            )
        like = trees.zeros_like(upload)
        memory = codec.init(like)
        payload, _ = codec.encode(like, memory, torch.tensor(0, device=_device(like)))
        own = schema_of({**private, **trees.with_prefix(MEMORY, memory)})
        return cls(schema_of(download), schema_of(upload), schema_of(payload), own, codec)

    def initial_memory(self, device: torch.device | None = None) -> Params:
        """What a client's codec remembers at first, by its names in the private tree."""
        memory = self.codec.init(empty_message(self.upload, device))
        return trees.with_prefix(MEMORY, memory)

    def encode(self, upload: Params, private: Params, key: Tensor) -> tuple[Params, Params]:
        """The payload of an upload, and the memory after it; key () is that of the round."""
        memory = trees.under_prefix(MEMORY, private)
        message = gate(upload, self.upload)
        payload, memory = self.codec.encode(message, memory, random.fold_in(key, _CODEC))
        return gate(payload, self.payload), trees.with_prefix(MEMORY, memory)

    def decode(self, payloads: Params) -> Params:
        """The messages (clients, ...) of payloads (clients, ...)."""
        payloads = gate(payloads, self.payload, rows=True)
        if isinstance(self.codec, Identity) or not self.upload:
            return payloads
        like = empty_message(self.upload, _device(payloads))
        decode = torch.vmap(self.codec.decode, in_dims=(0, None))
        return gate(decode(payloads, like), self.upload, rows=True)

    @property
    def scalars(self) -> int:
        """The numbers in an upload, before it is encoded."""
        return sum(torch.Size(form.shape).numel() for form in self.upload.values())


def split_private(private: Params) -> tuple[Params, Params]:
    """A client's private tree: that of its algorithm, and what its codec remembers."""
    memory = {name: tensor for name, tensor in private.items() if name.startswith(MEMORY)}
    return trees.drop(private, memory), memory


def pack(tree: Params) -> bytes:
    """A tree as the bytes that cross the wire: both ends know the schema, so only numbers do.

    >>> len(pack({"w": torch.zeros(3), "steps": torch.tensor(1)}))
    20
    """
    return b"".join(_raw(tree[name]).numpy().tobytes() for name in sorted(tree))


def unpack(data: bytes, schema: Schema) -> Params:
    """The packed tree."""
    sizes = {}
    for name, (shape, dtype) in schema.items():
        sizes[name] = torch.Size(shape).numel() * dtype.itemsize
    if len(data) != sum(sizes.values()):
        raise WireError(
            f"wire: {len(data)} bytes arrived, {sum(sizes.values())} were expected; "
            "is it the same model, algorithm and codec?"
        )
    tree, start = {}, 0
    for name in sorted(schema):
        end = start + sizes[name]
        tree[name] = _from_raw(data[start:end], *schema[name])
        start = end
    return {name: tree[name] for name in schema}


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _from_raw(data: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)  # `frombuffer` refuses an empty buffer
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _device(message: Params) -> torch.device | None:
    return next((tensor.device for tensor in message.values()), None)
