"""From the verified files of a public data set to tensors: one loader per data set."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.paths import cache_folder
from glocal.core.sampling import make_rng
from glocal.datasets import formats
from glocal.datasets.adult import read_adult
from glocal.datasets.cache import load_array, save_array
from glocal.datasets.dataset import Dataset
from glocal.datasets.formats import Bytes
from glocal.datasets.texts import Texts, read_texts
from glocal.datasets.vqa import read_easy_vqa, read_vqa

_MNIST_SCALE = ((0.1307,), (0.3081,))  # mean and standard deviation per channel
_CIFAR10_SCALE = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class LocalFiles(NamedTuple):
    """The verified files of a source: their paths by name, and a hash of their checksums."""

    paths: Mapping[str, Path]
    version: str


def load_digits(files: LocalFiles) -> Dataset:
    """scikit-learn's digits, split 3 to 1 within every class; they need no files."""
    images, labels = _read_digits()
    # mean and standard deviation of the 1,347 training images' pixels, after division by 16
    x = (torch.from_numpy(images / 16).float() - 0.3049) / 0.3759
    examples = Examples(x, torch.from_numpy(labels))
    train = _stratified_rows(labels, share=0.75)
    test = np.setdiff1d(np.arange(len(labels)), train)
    return Dataset(examples.take(train), examples.take(test), 10)


def load_mnist(files: LocalFiles) -> Dataset:
    """The four files of MNIST."""
    train, test = _mnist_part(files, "train"), _mnist_part(files, "t10k")
    return Dataset(train, test, 10)


def load_cifar10(files: LocalFiles) -> Dataset:
    """CIFAR-10 from the official archive, or from six repacked batches."""
    x, y = _read_cifar10(files)
    end = len(x) - formats.CIFAR_IMAGES  # the last batch is the test set
    train = Examples(_normalize(x[:end], *_CIFAR10_SCALE), _labels(y[:end]))
    test = Examples(_normalize(x[end:], *_CIFAR10_SCALE), _labels(y[end:]))
    return Dataset(train, test, 10)


def load_adult(files: LocalFiles) -> Dataset:
    """UCI Adult with race and sex as groups."""
    train, test = read_adult(files.paths["adult.data"])
    return Dataset(train, test, 2)


def load_mood_essays(files: LocalFiles) -> Texts:
    """The essays of SemEval-2026 Task 2, training and test files together."""
    names = ("train_subtask1.csv", "test_labels_subtask1.csv")
    return read_texts(files.paths[name] for name in names)


def load_vqav2(files: LocalFiles) -> Dataset:
    """The subset of VQA v2.

    The test examples are its validation and test parts together, because validation examples are
    held out of the training part.
    """
    train, test, questions = read_vqa(
        [_vqa_files(files, "train")],
        [_vqa_files(files, "valid"), _vqa_files(files, "test")],
        files.paths["images.zip"],
    )
    return Dataset(train, test, len(questions.answers), questions)


def load_easy_vqa(files: LocalFiles) -> Dataset:
    """easy-VQA: questions about coloured shapes."""
    train, test, questions = read_easy_vqa(files.paths)
    return Dataset(train, test, len(questions.answers), questions)


def _read_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Images (1797, 1, 8, 8) with pixels from 0 to 16, and labels (1797,)."""
    table = np.loadtxt(_digits_file(), delimiter=",")
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)


def _digits_file() -> Path:
    """The file of digits in scikit-learn; importing scikit-learn takes seconds and 100 MB."""
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        path = Path(package.origin).parent / "datasets/data/digits.csv.gz"
        if path.is_file():
            return path
    raise InputError("data: scikit-learn's digits are missing; install scikit-learn anew")


def _stratified_rows(labels: npt.NDArray[np.int64], *, share: float) -> npt.NDArray[np.int64]:
    """Random rows, the same share of every class, in ascending order."""
    generator = make_rng(0, "digits")
    chosen: list[npt.NDArray[np.int64]] = []
    for label in range(10):
        rows = generator.permutation(np.flatnonzero(labels == label))
        chosen.append(rows[: round(share * len(rows))])
    return np.sort(np.concatenate(chosen))


def _mnist_part(files: LocalFiles, part: str) -> Examples:
    images = formats.read_idx(files.paths[f"{part}-images-idx3-ubyte.gz"])
    labels = formats.read_idx(files.paths[f"{part}-labels-idx1-ubyte.gz"])
    return Examples(_normalize(images[:, None], *_MNIST_SCALE), _labels(labels))


def _read_cifar10(files: LocalFiles) -> tuple[Bytes, Bytes]:
    """Images (60000, 3, 32, 32) and labels (60000,).

    Decoding takes seconds, so the cache keeps a copy.
    """
    x_path, y_path = _decoded_path(files, "x"), _decoded_path(files, "y")
    images = len(formats.CIFAR_BATCHES) * formats.CIFAR_IMAGES
    x = load_array(x_path, np.uint8, (images, 3, 32, 32))
    y = load_array(y_path, np.uint8, (images,))
    if x is None or y is None:
        x, y = _decode_cifar10(files.paths)
        save_array(x_path, x)
        save_array(y_path, y)
    return x, y


def _decoded_path(files: LocalFiles, part: str) -> Path:
    return cache_folder() / "cifar10" / f"decoded-{files.version}-{part}.npy"


def _decode_cifar10(paths: Mapping[str, Path]) -> tuple[Bytes, Bytes]:
    """The official archive is one file, the repacked version six."""
    if len(paths) == 1:
        return formats.read_cifar_binary(*paths.values())
    return formats.read_cifar_repacked(paths)


def _vqa_files(files: LocalFiles, part: str) -> tuple[Path, Path]:
    """Questions and annotations of one part, whose published name is spelt like this."""
    return files.paths[f"vqa_questions_{part}.gzip"], files.paths[f"vqa_annotatons_{part}.gzip"]


def _normalize(images: Bytes, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes (rows, channels, height, width) as float32 with mean 0 and std 1 per channel."""
    x = torch.tensor(images, dtype=torch.float32)
    return x.div_(255).sub_(_per_channel(mean)).div_(_per_channel(std))


def _per_channel(values: tuple[float, ...]) -> Tensor:
    """Values as (1, channels, 1, 1)."""
    return torch.tensor(values).reshape(1, -1, 1, 1)


def _labels(values: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
