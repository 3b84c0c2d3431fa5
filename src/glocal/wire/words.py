"""Codecs and aggregations as words in settings: "int8", "top_k(0.01)", "mean(clients)"."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from glocal.core.errors import InputError, suggest_name
from glocal.wire.aggregation import Aggregation, Mean
from glocal.wire.codec import Clip, Codec, Half, Noise, chain
from glocal.wire.quantize import Int4, Int8
from glocal.wire.robust import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from glocal.wire.sparse import TopK

ValueT = TypeVar("ValueT")

AGGREGATIONS: dict[str, Callable[..., Aggregation]] = {
    "centred_clipping": CentredClipping,
    "geometric_median": GeometricMedian,
    "krum": Krum,
    "mean": Mean,
    "median": Median,
    "multi_krum": MultiKrum,
    "trimmed_mean": TrimmedMean,
}
CODECS: dict[str, Callable[..., Codec]] = {
    "bf16": lambda: Half("bf16"),
    "clip": Clip,
    "fp16": lambda: Half("fp16"),
    "int4": Int4,
    "int8": Int8,
    "noise": Noise,
    "top_k": TopK,
}


def parse_aggregation(word: str, where: str) -> Aggregation:
    """An aggregation from its word.

    >>> parse_aggregation("mean(clients)", "plan.aggregation")
    Mean(by='clients', max_weight=None)
    >>> parse_aggregation("trimmed_mean(0.1)", "plan.aggregation")
    TrimmedMean(trim=0.1)
    """
    return _parse(word, AGGREGATIONS, where)


def parse_codec(words: Sequence[str], where: str) -> Codec:
    """A chain of codecs from their words.

    >>> parse_codec(["top_k(0.01)"], "plan.uplink")
    TopK(share=0.01)
    """
    return chain(*(_parse(word, CODECS, where) for word in words))


def _parse(word: str, known: Mapping[str, Callable[..., ValueT]], where: str) -> ValueT:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*([^()]*?)\s*\))?\s*", word)
    name = match[1] if match else word
    if match is None or name not in known:
        raise InputError(f"settings: {where} is '{word}'; {suggest_name(name, known)}")
    texts = [text for text in re.split(r"\s*,\s*", match[2] or "") if text]
    try:
        return known[name](*map(_argument, texts))
    except InputError as error:
        raise InputError(f"settings: {where} is '{word}': {error}") from error
    except TypeError as error:
        raise InputError(
            f"settings: {where} is '{word}'; '{name}' does not take {len(texts)} numbers or words"
        ) from error


def _argument(text: str) -> Any:
    """A number or a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
