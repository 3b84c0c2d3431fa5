"""A whole data set, before it is partitioned over clients."""

from typing import NamedTuple

from glocal.core.data import Examples
from glocal.datasets.vqa import VQAMetadata


class Dataset(NamedTuple):
    """Training and test examples: x is normalised float32, y is int64.

    Images are (rows, channels, height, width). Where examples are questions about pictures, x holds
    numbers of pictures and words, and `questions` says what they stand for.
    """

    train: Examples
    test: Examples
    classes: int
    questions: VQAMetadata | None = None
