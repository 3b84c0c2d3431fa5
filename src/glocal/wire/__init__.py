"""What a client and the server send each other: declared messages, codecs, aggregation, bytes."""

from glocal.wire.aggregation import Aggregation, Mean, require_enough_clients
from glocal.wire.codec import Chain, Clip, Codec, Half, Identity, Noise, chain, require_codec
from glocal.wire.ledger import Ledger, Traffic
from glocal.wire.quantize import Int4, Int8
from glocal.wire.robust import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from glocal.wire.schema import Schema, TensorForm, WireError, gate, require_finite, schema_of
from glocal.wire.sparse import TopK
from glocal.wire.wire import Wire, pack, split_private, unpack
from glocal.wire.words import parse_aggregation, parse_codec

__all__ = [
    "Aggregation",
    "CentredClipping",
    "Chain",
    "Clip",
    "Codec",
    "GeometricMedian",
    "Half",
    "Identity",
    "Int4",
    "Int8",
    "Krum",
    "Ledger",
    "Mean",
    "Median",
    "MultiKrum",
    "Noise",
    "Schema",
    "TensorForm",
    "TopK",
    "Traffic",
    "TrimmedMean",
    "Wire",
    "WireError",
    "chain",
    "gate",
    "pack",
    "parse_aggregation",
    "parse_codec",
    "require_codec",
    "require_enough_clients",
    "require_finite",
    "schema_of",
    "split_private",
    "unpack",
]
