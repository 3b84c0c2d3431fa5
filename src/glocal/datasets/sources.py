"""Public data sets by name: where their files come from, and how they become tensors.

Files are looked for in the folder GLOCAL_DATA (one folder per source), then in the cache (GLOCAL_CACHE, else XDG_CACHE_HOME/glocal,
else ~/.cache/glocal), and are downloaded into the cache when neither has them. No file is read unless its checksum is right.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.data import Examples
from glocal.core.errors import InputError, suggest_name
from glocal.core.paths import cache_folder
from glocal.core.sampling import make_rng
from glocal.datasets import formats
from glocal.datasets.adult import ATTRIBUTES, read_adult
from glocal.datasets.cache import load_array, save_array
from glocal.datasets.fetch import (
    ProgressCallback,
    RemoteFile,
    digest,
    fetch,
    has_checksum,
    no_progress,
)
from glocal.datasets.formats import Bytes
from glocal.datasets.texts import Texts, read_texts
from glocal.datasets.vqa import VQAMetadata, read_easy_vqa, read_vqa


class Dataset(NamedTuple):
    """Examples to train and to test on: x float32 and normalised, images (rows, channels, height, width), y int64.

    Where they are questions about pictures, x are numbers of pictures and words, which `questions` tells.
    """

    train: Examples
    test: Examples
    classes: int
    questions: VQAMetadata | None = None


@dataclass(frozen=True)
class Source:
    """A data set: what its download consists of, another packing that GLOCAL_DATA may hold, and how files become tensors.

    `attributes` names the columns of its groups, if it has any, and what 0 and 1 stand for.
    """

    name: str
    summary: str
    files: tuple[RemoteFile, ...]
    load: Callable[[Mapping[str, Path]], Dataset | Texts]
    repacked: tuple[RemoteFile, ...] = ()
    attributes: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def load(name: str, *, report: ProgressCallback = no_progress) -> Dataset:
    """A data set by name, downloaded first if need be.

    >>> load("digits").train.x.shape
    torch.Size([1347, 1, 8, 8])
    """
    loaded = load_any(name, report=report)
    if isinstance(loaded, Texts):
        raise InputError(
            f"data: {name} holds texts, which are numbered only once they are dealt out; use load_texts"
        )
    return loaded


def load_texts(name: str, *, report: ProgressCallback = no_progress) -> Texts:
    """Texts by name, or from a .csv file of yours with person, text and mood (1 to 100)."""
    loaded = load_any(name, report=report)
    if isinstance(loaded, Dataset):
        raise InputError(f"data: {name} holds no texts; use load")
    return loaded


def load_any(name: str, *, report: ProgressCallback = no_progress) -> Dataset | Texts:
    """What a source holds, or a .csv file of texts."""
    if name.endswith(".csv"):
        return read_texts([Path(name).expanduser()])
    source = find_source(name)
    return source.load(_locate_files(source, report))


def fetch_source(name: str, report: ProgressCallback = no_progress) -> Path:
    """Make sure that a source's files are here and right; returns their folder."""
    source = find_source(name)
    paths = _locate_files(source, report)
    return next(iter(paths.values())).parent if paths else cache_folder() / name


def source_status(name: str) -> str:
    """Where a source is: "bundled", "in GLOCAL_DATA", "in the cache" or "not downloaded"; checksums are not computed."""
    source = find_source(name)
    if not source.files:
        return "bundled"
    if _local_files(source):
        return "in GLOCAL_DATA"
    return "in the cache" if _complete(source.files, cache_folder() / name) else "not downloaded"


def verify_source(name: str) -> list[tuple[str, bool]]:
    """Each file of a source that is here, and whether its checksum is right; empty when none is here."""
    source = find_source(name)
    present = _local_files(source) or {
        file: path
        for file, path in _paths(source.files, cache_folder() / name).items()
        if path.is_file()
    }
    known = _files_by_name(source)
    return [(file, has_checksum(path, known[file].sha256)) for file, path in present.items()]


def find_source(name: str) -> Source:
    """The source of this name."""
    if name not in SOURCES:
        raise InputError(f"data: there is no data set '{name}'; {suggest_name(name, SOURCES)}")
    return SOURCES[name]


def _locate_files(source: Source, report: ProgressCallback) -> dict[str, Path]:
    """The paths of all files by name, checked, from GLOCAL_DATA or the cache."""
    given, known = _local_files(source), _files_by_name(source)
    for name, path in given.items():
        _verify(path, known[name])
    folder = cache_folder() / source.name
    return given or {remote.name: fetch(remote, folder, report=report) for remote in source.files}


def _local_files(source: Source) -> dict[str, Path]:
    """The files that the folder GLOCAL_DATA holds for a source, right or not; empty when it lacks one of them."""
    named_folder = os.environ.get("GLOCAL_DATA")
    if not named_folder:
        return {}
    folder = Path(named_folder).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"data: GLOCAL_DATA is {folder}, which is not a folder; set it to one that holds the data, or unset it"
        )
    for files in (source.files, source.repacked):
        if files and _complete(files, folder / source.name):
            return _paths(files, folder / source.name)
    return {}


def _files_by_name(source: Source) -> dict[str, RemoteFile]:
    return {remote.name: remote for remote in (*source.files, *source.repacked)}


def _paths(files: tuple[RemoteFile, ...], folder: Path) -> dict[str, Path]:
    return {remote.name: folder / remote.name for remote in files}


def _complete(files: tuple[RemoteFile, ...], folder: Path) -> bool:
    return all(path.is_file() for path in _paths(files, folder).values())


def _verify(path: Path, remote: RemoteFile) -> None:
    try:
        size, found = path.stat().st_size, digest(path)
    except OSError as error:
        raise InputError(
            f"data: {path} could not be read ({error.strerror}); make it readable, or unset GLOCAL_DATA"
        ) from error
    if found != remote.sha256:
        raise InputError(
            f"data: {path} has {size} bytes and checksum {found[:12]}.., expected {remote.size} bytes and {remote.sha256[:12]}..; "
            f"copy it again from its origin{', or unset GLOCAL_DATA to download it' if remote.urls else ''}"
        )


def _load_digits(files: Mapping[str, Path]) -> Dataset:
    table = np.loadtxt(_digits_file(), delimiter=",")
    images, labels = table[:, :-1].reshape(-1, 1, 8, 8) / 16, table[:, -1].astype(np.int64)
    generator = make_rng(0, "digits")
    shuffled = [generator.permutation(np.flatnonzero(labels == label)) for label in range(10)]
    train = np.sort(np.concatenate([rows[: round(0.75 * len(rows))] for rows in shuffled]))
    test = np.setdiff1d(np.arange(len(labels)), train)
    # mean and standard deviation of the 1,347 training images' pixels, after division by 16
    x = (torch.from_numpy(images).float() - 0.3049) / 0.3759
    everything = Examples(x, torch.from_numpy(labels))
    return Dataset(everything.take(train), everything.take(test), 10)


def _digits_file() -> Path:
    """Where scikit-learn keeps its digits; importing it for them would take seconds and 100 MB."""
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
        if path.is_file():
            return path
    raise InputError("data: scikit-learn's digits are not found; install scikit-learn anew")


def _load_mnist(files: Mapping[str, Path]) -> Dataset:
    train, test = (
        Examples(
            _normalize(
                formats.read_idx(files[f"{part}-images-idx3-ubyte.gz"])[:, None],
                (0.1307,),
                (0.3081,),
            ),
            _labels(formats.read_idx(files[f"{part}-labels-idx1-ubyte.gz"])),
        )
        for part in ("train", "t10k")
    )
    return Dataset(train, test, 10)


def _load_cifar10(files: Mapping[str, Path]) -> Dataset:
    x, y = _read_cifar10(files)
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    parts = (slice(-formats.CIFAR_IMAGES), slice(-formats.CIFAR_IMAGES, None))
    train, test = (
        Examples(_normalize(x[part], mean, deviation), _labels(y[part])) for part in parts
    )
    return Dataset(train, test, 10)


def _load_adult(files: Mapping[str, Path]) -> Dataset:
    return Dataset(*read_adult(files["adult.data"]), 2)


def _load_mood_essays(files: Mapping[str, Path]) -> Texts:
    return read_texts(files[name] for name in ("train_subtask1.csv", "test_labels_subtask1.csv"))


def _load_vqav2(files: Mapping[str, Path]) -> Dataset:
    """Tested on the course's validation and test parts together: validation data come out of the training part."""
    pairs = {
        part: (files[f"vqa_questions_{part}.gzip"], files[f"vqa_annotatons_{part}.gzip"])
        for part in ("train", "valid", "test")
    }
    train, test, questions = read_vqa(
        [pairs["train"]], [pairs["valid"], pairs["test"]], files["images.zip"]
    )
    return Dataset(train, test, len(questions.answers), questions)


def _load_easy_vqa(files: Mapping[str, Path]) -> Dataset:
    train, test, questions = read_easy_vqa(files)
    return Dataset(train, test, len(questions.answers), questions)


def _read_cifar10(files: Mapping[str, Path]) -> tuple[Bytes, Bytes]:
    """Images (60000, 3, 32, 32) and labels (60000,); decoding takes seconds, so a decoded copy is kept in the cache."""
    known = _files_by_name(SOURCES["cifar10"])
    version = hashlib.sha256("".join(known[name].sha256 for name in files).encode()).hexdigest()[
        :12
    ]
    kept_x, kept_y = (cache_folder() / "cifar10" / f"decoded-{version}-{part}.npy" for part in "xy")
    images = len(formats.CIFAR_BATCHES) * formats.CIFAR_IMAGES
    x, y = (
        load_array(kept_x, np.uint8, (images, 3, 32, 32)),
        load_array(kept_y, np.uint8, (images,)),
    )
    if x is not None and y is not None:
        return x, y
    x, y = (
        formats.read_cifar_repacked(files)
        if len(files) > 1
        else formats.read_cifar_binary(*files.values())
    )
    save_array(kept_x, x)
    save_array(kept_y, y)
    return x, y


def _normalize(images: Bytes, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    """Bytes (rows, channels, height, width) as float32 of mean 0 and deviation 1 per channel."""
    per_channel = torch.tensor([mean, deviation]).reshape(2, 1, -1, 1, 1)
    return (
        torch.tensor(images, dtype=torch.float32)
        .div_(255)
        .sub_(per_channel[0])
        .div_(per_channel[1])
    )


def _labels(values: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)


def _mnist_file(name: str, sha256: str, size: int) -> RemoteFile:
    return RemoteFile(name, tuple(mirror + name for mirror in _MNIST_MIRRORS), sha256, size)


_MNIST = (
    _mnist_file(
        "train-images-idx3-ubyte.gz",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        9_912_422,
    ),
    _mnist_file(
        "train-labels-idx1-ubyte.gz",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        28_881,
    ),
    _mnist_file(
        "t10k-images-idx3-ubyte.gz",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        1_648_877,
    ),
    _mnist_file(
        "t10k-labels-idx1-ubyte.gz",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        4_542,
    ),
)
_CIFAR10 = (
    RemoteFile(
        "cifar-10-binary.tar.gz",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        170_052_171,
    ),
)
_CIFAR10_REPACKED = (
    RemoteFile(
        "data_batch_1.xz",
        (),
        "45054fc75004b9672f23df104883df42066aa0dcd4801397c7abaae46bba48c3",
        16_837_880,
    ),
    RemoteFile(
        "data_batch_2.xz",
        (),
        "34debafe1b93452d59ac20d79e4ddfae564e2870e4c889946ee4b34433f3b09c",
        16_892_968,
    ),
    RemoteFile(
        "data_batch_3.xz",
        (),
        "3161cca6121209e91eba379c6bd4b8bb8a93f04ca0ff032a5ea97cf2cf2d1917",
        16_894_880,
    ),
    RemoteFile(
        "data_batch_4.xz",
        (),
        "baaa4c36ba408211c40711eaaec402e4f69715aca1a6c18013f4bb94dadf17c0",
        16_871_032,
    ),
    RemoteFile(
        "data_batch_5.xz",
        (),
        "73f86e188b0bd02f4d03a6af0fbc144d9ff2bdee1e78d2eaf6d67606eb600e36",
        16_836_484,
    ),
    RemoteFile(
        "test_batch.xz",
        (),
        "a3e496156d30bb77b0069657fe3c6cc8ee592cc0a887845cf2a308fa9698dd74",
        16_873_168,
    ),
)
_ADULT = (
    RemoteFile(
        "adult.data",
        ("https://archive.ics.uci.edu/ml/machine-learning-databases/adult/adult.data",),
        "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
        3_974_305,
    ),
)
_MOOD_ESSAYS_URL = "https://raw.githubusercontent.com/semeval2026task2/EmotionValArouTimeVariation2026/main/datasets/"
_MOOD_ESSAYS = (
    RemoteFile(
        "train_subtask1.csv",
        (f"{_MOOD_ESSAYS_URL}TRAIN_RELEASE_3SEP2025/train_subtask1.csv",),
        "e1f09b16526a3e6620a55c01550438088f364c57706b557db550aa9fde4d8634",
        569_970,
    ),
    RemoteFile(
        "test_labels_subtask1.csv",
        (f"{_MOOD_ESSAYS_URL}TEST_LABELS_RELEASE_23FEB2026/test_labels_subtask1.csv",),
        "9d4734b93112c9db07144f404e013f55abb3f847c96b3cfd2550d8340cf5be3c",
        364_649,
    ),
)
_VQAV2 = (
    RemoteFile(
        "images.zip",
        (),
        "20d0723a7469783e24da049c6f6c4776ca7340b9bbf9f0189e6b6ee6f3e7027b",
        38_098_730,
    ),
    RemoteFile(
        "vqa_annotatons_test.gzip",
        (),
        "d652e158e709fe95e5836b2b251e02e3419c97ddbf5baf8a2a85e8508bc26cb3",
        129_847,
    ),
    RemoteFile(
        "vqa_annotatons_train.gzip",
        (),
        "457435882537cedfec09672cf342831f08dde8d6baad5ad2052e96e91cfe6d98",
        2_107_079,
    ),
    RemoteFile(
        "vqa_annotatons_valid.gzip",
        (),
        "eb102dee80b553a4e706e0205c49d4ec85fe1983db317ec6154aca5b630f92c4",
        397_925,
    ),
    RemoteFile(
        "vqa_questions_test.gzip",
        (),
        "14d030b0ffadca31e61ac3a3e6b2977331b461e257105483df3202b4a164bbba",
        57_415,
    ),
    RemoteFile(
        "vqa_questions_train.gzip",
        (),
        "8145e6378c4019f7835fcb9b20a0a115930e89783f7c9aa79a60eae89db2c41d",
        915_127,
    ),
    RemoteFile(
        "vqa_questions_valid.gzip",
        (),
        "ea54fcc66ef3ece04c9f46ac83daa8e22a3f20a123e5bb75b275427f764218be",
        173_000,
    ),
)
_EASY_VQA = (
    RemoteFile(
        "test_images.npy.xz",
        (),
        "66825dc6229da8376e32f7e8e5421cf6fbaaab1af006caa15c83a1457c9cbf2f",
        165_784,
    ),
    RemoteFile(
        "test_questions.json.xz",
        (),
        "6e050aa9ef2ebbb254ec7a8bf0f60f1e15006ee4cbddd1694f2f6737b8d76664",
        33_244,
    ),
    RemoteFile(
        "train_images.npy.xz",
        (),
        "f1c984e7740b8c25865376608c2cd0d094d52cfa8efb88f64377d4d79b97a067",
        659_128,
    ),
    RemoteFile(
        "train_questions.json.xz",
        (),
        "25afc3278c698404b81eb232c5a3fb3db1721cf11069c5d734d3bf23c490fec4",
        128_992,
    ),
)

SOURCES: dict[str, Source] = {
    "digits": Source(
        "digits", "1,797 handwritten digits, 8x8 grey, bundled with scikit-learn", (), _load_digits
    ),
    "mnist": Source(
        "mnist", "70,000 handwritten digits, 28x28 grey, 10 classes (11 MB)", _MNIST, _load_mnist
    ),
    "cifar10": Source(
        "cifar10",
        "60,000 photographs, 32x32 RGB, 10 classes (170 MB)",
        _CIFAR10,
        _load_cifar10,
        _CIFAR10_REPACKED,
    ),
    "adult": Source(
        "adult",
        "30,940 people of the 1994 census, 93 columns: income, beside race and sex (4 MB)",
        _ADULT,
        _load_adult,
        attributes=ATTRIBUTES,
    ),
    "mood_essays": Source(
        "mood_essays",
        "4,501 short essays of 182 people with their own mood in 5 classes, SemEval-2026 (1 MB)",
        _MOOD_ESSAYS,
        _load_mood_essays,
    ),
    "vqav2": Source(
        "vqav2",
        "33,183 questions about 12,606 photographs, 128x128, VQA v2; not to be downloaded (42 MB)",
        _VQAV2,
        _load_vqav2,
    ),
    "easy_vqa": Source(
        "easy_vqa",
        "48,248 questions about 5,000 coloured shapes, 64x64; not to be downloaded (1 MB)",
        _EASY_VQA,
        _load_easy_vqa,
    ),
}
