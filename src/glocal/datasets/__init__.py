"""Data sets, how they are dealt to devices, and how they vary while training."""

from glocal.datasets.augment import crop_and_flip
from glocal.datasets.fetch import RemoteFile, Report
from glocal.datasets.mood import Texts, deal_texts
from glocal.datasets.partition import Partition, class_counts, deal, dirichlet, iid, kind_shards, natural, random_shards, shards
from glocal.datasets.sources import SOURCES, Dataset, Source, check, fetch_source, load, load_any, load_texts, status

__all__ = [
    "SOURCES",
    "Dataset",
    "Partition",
    "RemoteFile",
    "Report",
    "Source",
    "Texts",
    "check",
    "class_counts",
    "crop_and_flip",
    "deal",
    "deal_texts",
    "dirichlet",
    "fetch_source",
    "iid",
    "kind_shards",
    "load",
    "load_any",
    "load_texts",
    "natural",
    "random_shards",
    "shards",
    "status",
]
