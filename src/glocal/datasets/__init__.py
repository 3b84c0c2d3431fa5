"""Data sets, their partitions over clients, and augmentation."""

from glocal.datasets.augment import crop_and_flip
from glocal.datasets.catalog import SOURCES, Source
from glocal.datasets.dataset import Dataset
from glocal.datasets.fetch import ProgressCallback, RemoteFile
from glocal.datasets.partitions import (
    Partitioner,
    class_counts,
    dirichlet,
    iid,
    natural,
    question_type_shards,
    random_shards,
    shards,
)
from glocal.datasets.sources import (
    fetch_source,
    load_any,
    load_dataset,
    load_texts,
    source_status,
    verify_source,
)
from glocal.datasets.texts import Texts, partition_texts

__all__ = [
    "SOURCES",
    "Dataset",
    "Partitioner",
    "ProgressCallback",
    "RemoteFile",
    "Source",
    "Texts",
    "class_counts",
    "crop_and_flip",
    "dirichlet",
    "fetch_source",
    "iid",
    "load_any",
    "load_dataset",
    "load_texts",
    "natural",
    "partition_texts",
    "question_type_shards",
    "random_shards",
    "shards",
    "source_status",
    "verify_source",
]
