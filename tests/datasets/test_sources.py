"""Data sets: where files are searched for, what is refused, and that the published data load."""

import gzip
import hashlib
import io
import lzma
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor

from glocal.core.errors import InputError
from glocal.core.paths import cache_folder
from glocal.datasets import (
    SOURCES,
    Dataset,
    RemoteFile,
    fetch_source,
    formats,
    load_dataset,
    source_status,
    verify_source,
)
from glocal.datasets.adult import read_adult
from tests.support.real_data import REAL_DATA, needs_data


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own data or cache."""
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("glocal.datasets.fetch._BACKOFF", 0)


def as_idx(array: npt.NDArray[np.uint8]) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}i", *array.shape)
        + array.tobytes()
    )


def published(files: dict[str, bytes], site: str) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(name, (f"{site}/{name}",), hashlib.sha256(content).hexdigest(), len(content))
        for name, content in files.items()
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A web site that serves the folder `site`."""
    (tmp_path / "site").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "site"))
    ) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def small_mnist(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """MNIST with 6 + 3 images of 2x2 pixels, published on the site; returns its files' content."""
    arrays = {
        "train-images-idx3-ubyte.gz": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        "train-labels-idx1-ubyte.gz": np.array([5, 0, 4, 1, 9, 2], dtype=np.uint8),
        "t10k-images-idx3-ubyte.gz": np.arange(100, 112, dtype=np.uint8).reshape(3, 2, 2),
        "t10k-labels-idx1-ubyte.gz": np.array([7, 2, 1], dtype=np.uint8),
    }
    files = {name: gzip.compress(as_idx(array), mtime=0) for name, array in arrays.items()}
    for name, content in files.items():
        (tmp_path / "site" / name).write_bytes(content)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], files=published(files, site)))
    return files


def data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, files: dict[str, bytes]
) -> Path:
    """A folder GLOCAL_DATA that holds these files of one source."""
    folder = tmp_path / "given" / source
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    monkeypatch.setenv("GLOCAL_DATA", str(folder.parent))
    return folder


def test_importing_the_data_package_does_not_import_scikit_learn() -> None:
    code = "import sys, glocal.datasets; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_source_goes_by_its_own_name_and_a_summary_of_one_line() -> None:
    assert {name: source.name for name, source in SOURCES.items()} == {
        name: name
        for name in ("digits", "mnist", "cifar10", "adult", "mood_essays", "vqav2", "easy_vqa")
    }
    assert all(source.summary and "\n" not in source.summary for source in SOURCES.values())


def test_a_misspelt_name_is_answered_with_the_nearest_one() -> None:
    for function in (load_dataset, source_status, verify_source, fetch_source):
        with pytest.raises(
            InputError,
            match="no data set 'cifar'; did you mean 'cifar10'\\? "
            "known: adult, cifar10, digits, easy_vqa, mnist",
        ):
            function("cifar")


def test_digits_are_split_three_to_one_within_every_class() -> None:
    train, test, classes, _ = load_dataset("digits")
    assert (train.x.shape, test.x.shape, classes) == ((1347, 1, 8, 8), (450, 1, 8, 8), 10)
    assert (train.x.dtype, train.y.dtype) == (torch.float32, torch.int64)
    in_train, in_test = train.y.bincount(), test.y.bincount()
    # class counts of scikit-learn's load_digits
    assert (in_train + in_test).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (in_train - 0.75 * (in_train + in_test)).abs().max() <= 0.5
    assert abs(float(train.x.mean())) < 1e-4
    assert abs(float(train.x.std()) - 1) < 1e-3


def test_digits_are_the_same_every_time() -> None:
    assert torch.equal(load_dataset("digits").train.x, load_dataset("digits").train.x)
    assert (source_status("digits"), verify_source("digits")) == ("bundled", [])


def test_a_source_is_downloaded_once_and_then_read_from_the_cache(
    small_mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (source_status("mnist"), verify_source("mnist")) == ("not downloaded", [])
    reported: set[str] = set()
    downloaded = load_dataset("mnist", report=lambda name, done, total: reported.add(name))
    assert reported == set(small_mnist)
    assert source_status("mnist") == "in the cache"
    assert verify_source("mnist") == [(name, True) for name in small_mnist]
    for name in small_mnist:
        (tmp_path / "site" / name).unlink()
    assert torch.equal(load_dataset("mnist").train.x, downloaded.train.x)
    assert fetch_source("mnist") == tmp_path / "cache" / "mnist"


def test_mnist_is_scaled_by_its_mean_and_deviation(small_mnist: dict[str, bytes]) -> None:
    train, test, classes, _ = load_dataset("mnist")
    assert (train.x.shape, test.x.shape, classes) == ((6, 1, 2, 2), (3, 1, 2, 2), 10)
    assert train.y.tolist() == [5, 0, 4, 1, 9, 2]
    assert test.y.dtype == torch.int64
    assert train.x.dtype == torch.float32
    assert float(test.x[0, 0, 0, 1]) == pytest.approx((101 / 255 - 0.1307) / 0.3081, abs=1e-6)


def test_a_wrong_file_in_the_cache_is_downloaded_again(
    small_mnist: dict[str, bytes], tmp_path: Path
) -> None:
    folder = fetch_source("mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"rot")
    assert verify_source("mnist")[-1] == ("t10k-labels-idx1-ubyte.gz", False)
    assert load_dataset("mnist").test.y.tolist() == [7, 2, 1]
    assert all(right for _, right in verify_source("mnist"))


def test_what_cannot_be_downloaded_is_one_line(
    small_mnist: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "site" / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(
        InputError, match=r"could not download t10k-images-idx3-ubyte\.gz .* 404 .* set GLOCAL_DATA"
    ):
        load_dataset("mnist")
    assert source_status("mnist") == "not downloaded"
    assert verify_source("mnist") == [
        ("train-images-idx3-ubyte.gz", True),
        ("train-labels-idx1-ubyte.gz", True),
    ]


def test_the_data_folder_is_read_before_the_cache(
    small_mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_folder(tmp_path, monkeypatch, "mnist", small_mnist)
    assert source_status("mnist") == "in GLOCAL_DATA"
    assert load_dataset("mnist").train.y.tolist() == [5, 0, 4, 1, 9, 2]
    assert fetch_source("mnist") == folder
    assert not (tmp_path / "cache").exists()


def test_a_data_folder_that_lacks_a_file_is_ignored(
    small_mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_folder(tmp_path, monkeypatch, "mnist", small_mnist)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    assert source_status("mnist") == "not downloaded"
    assert fetch_source("mnist") == tmp_path / "cache" / "mnist"
    assert source_status("mnist") == "in the cache"


def test_a_data_folder_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOCAL_DATA", str(tmp_path / "gone"))
    for function in (load_dataset, source_status, verify_source):
        with pytest.raises(InputError, match=r"GLOCAL_DATA is .*gone, which is not a folder"):
            function("mnist")


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GLOCAL_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "glocal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "glocal"


@settings(max_examples=30)
@given(data=st.data())
def test_any_damage_to_a_file_in_the_data_folder_is_one_line_that_names_it(
    data: st.DataObject,
) -> None:
    content = gzip.compress(as_idx(np.zeros((3, 2, 2), dtype=np.uint8)), mtime=0)
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = (
        content[:place]
        + bytes([content[place] ^ data.draw(st.integers(1, 255))])
        + content[place + 1 :]
    )
    damaged = data.draw(st.sampled_from([flipped, content[:place], content + b"x"]))
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        files = published({"train-images-idx3-ubyte.gz": content}, "http://127.0.0.1")
        patch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], files=files))
        folder = data_folder(Path(name), patch, "mnist", {"train-images-idx3-ubyte.gz": damaged})
        with pytest.raises(InputError) as caught:
            load_dataset("mnist")
        assert str(caught.value).startswith(
            f"data: {folder / 'train-images-idx3-ubyte.gz'} has {len(damaged)} bytes and checksum "
        )
        assert f"expected {len(content)} bytes" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert verify_source("mnist") == [("train-images-idx3-ubyte.gz", False)]


@settings(max_examples=60)
@given(content=st.binary(max_size=60), packed=st.booleans())
def test_bytes_that_are_no_array_are_refused_without_a_traceback(
    content: bytes, packed: bool
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "labels.gz"
        path.write_bytes(gzip.compress(content) if packed else content)
        refusal = ""
        try:
            formats.read_idx(path)
        except InputError as error:
            refusal = str(error)
        assert refusal.startswith(f"data: {path} could not be decoded (") or (
            packed and not refusal
        )
        assert "\n" not in refusal


@pytest.mark.parametrize(
    "damage", [lambda packed: packed[:-20], lambda packed: packed[:20] + b"rot" * 5 + packed[35:]]
)
def test_an_array_whose_compression_is_damaged_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    (tmp_path / "images.gz").write_bytes(damage(gzip.compress(as_idx(noise // 16))))
    with pytest.raises(InputError, match=r"images\.gz could not be decoded \((EOFError|error): "):
        formats.read_idx(tmp_path / "images.gz")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        gzip.compress(b"not an archive"),
        gzip.compress(bytes(10240)),
        gzip.compress(bytes(5000))[:20],
    ],
    ids=["empty", "text", "gzipped text", "no members", "cut short"],
)
def test_what_is_no_cifar_archive_is_refused_without_a_traceback(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(InputError, match="archive could not be decoded"):
        formats.read_cifar_binary(tmp_path / "archive")
    with pytest.raises(InputError, match="archive could not be decoded"):
        formats.read_cifar_repacked(
            {f"{name}.xz": tmp_path / "archive" for name in formats.CIFAR_BATCHES}
        )


@pytest.mark.parametrize("raw", [b"", bytes(10), bytes(30730 + 1)])
def test_a_repacked_batch_of_the_wrong_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    monkeypatch.setattr(formats, "CIFAR_IMAGES", 10)
    (tmp_path / "batch.xz").write_bytes(lzma.compress(raw))
    with pytest.raises(InputError, match=r"batch\.xz could not be decoded"):
        formats.read_cifar_repacked(
            {f"{name}.xz": tmp_path / "batch.xz" for name in formats.CIFAR_BATCHES}
        )


def archive_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def repacked(x: npt.NDArray[np.uint8], y: npt.NDArray[np.uint8]) -> bytes:
    """The inverse of `read_cifar_repacked`.

    Planes G, R-G and B-G, each less its neighbours above and to the left (mod 256).
    """
    planes = np.stack([x[:, 1], x[:, 0] - x[:, 1], x[:, 2] - x[:, 1]])
    planes = np.diff(planes, axis=2, prepend=np.uint8(0))
    return lzma.compress(
        y.tobytes() + np.diff(planes, axis=3, prepend=np.uint8(0)).tobytes(), preset=0
    )


@pytest.fixture
def small_cifar10(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Random images and labels for six batches of 7 instead of 10,000."""
    monkeypatch.setattr(formats, "CIFAR_IMAGES", 7)
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (42, 3, 32, 32), dtype=np.uint8), generator.integers(
        0, 10, 42, dtype=np.uint8
    )


def official(x: npt.NDArray[np.uint8], y: npt.NDArray[np.uint8]) -> bytes:
    """The archive of the binary version, out of order and with more in it than is read."""
    records = np.concatenate([y[:, None], x.reshape(len(x), -1)], axis=1)
    batches = zip(formats.CIFAR_BATCHES, np.split(records, 6), strict=True)
    members = {f"cifar-10-batches-bin/{name}.bin": batch.tobytes() for name, batch in batches}
    return archive_of(
        {
            "../evil": b"?",
            "cifar-10-batches-bin/readme.html": b"?",
            **dict(reversed(members.items())),
        }
    )


def test_both_packings_of_cifar_give_the_same_arrays_and_nothing_is_extracted(
    small_cifar10: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], tmp_path: Path
) -> None:
    x, y = small_cifar10
    (tmp_path / "official").write_bytes(official(x, y))
    for name, images, labels in zip(
        formats.CIFAR_BATCHES, np.split(x, 6), np.split(y, 6), strict=True
    ):
        (tmp_path / f"{name}.xz").write_bytes(repacked(images, labels))
    before = sorted(tmp_path.parent.rglob("*"))
    from_archive = formats.read_cifar_binary(tmp_path / "official")
    from_repacked = formats.read_cifar_repacked(
        {f"{name}.xz": tmp_path / f"{name}.xz" for name in formats.CIFAR_BATCHES}
    )
    for read in (from_archive, from_repacked):
        np.testing.assert_array_equal(read[0], x)
        np.testing.assert_array_equal(read[1], y)
    assert sorted(tmp_path.parent.rglob("*")) == before


@pytest.fixture
def decoded(
    small_cifar10: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Path]:
    """Small CIFAR-10 in GLOCAL_DATA; returns the list of archives decoded so far."""
    calls: list[Path] = []
    decode = formats.read_cifar_binary

    def counted(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        calls.append(path)
        return decode(path)

    archive = {"cifar-10-binary.tar.gz": official(*small_cifar10)}
    data_folder(tmp_path, monkeypatch, "cifar10", archive)
    monkeypatch.setattr(formats, "read_cifar_binary", counted)
    monkeypatch.setitem(
        SOURCES,
        "cifar10",
        replace(SOURCES["cifar10"], files=published(archive, "http://127.0.0.1")),
    )
    return calls


def test_a_decoded_copy_is_cached_and_used(
    decoded: list[Path],
    small_cifar10: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
    tmp_path: Path,
) -> None:
    x, y = small_cifar10
    for train, test, classes, _ in (load_dataset("cifar10"), load_dataset("cifar10")):
        assert (train.x.shape, test.x.shape, classes) == ((35, 3, 32, 32), (7, 3, 32, 32), 10)
        assert train.y.tolist() + test.y.tolist() == y.tolist()
        scaled = (x[0, :, 5, 9] / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]
        assert train.x[0, :, 5, 9].tolist() == pytest.approx(scaled.tolist(), abs=1e-5)
    assert len(decoded) == 1
    assert sorted(path.name[-6:] for path in (tmp_path / "cache" / "cifar10").iterdir()) == [
        "-x.npy",
        "-y.npy",
    ]


@pytest.mark.parametrize("damage", ["emptied", "cut short", "of another shape"])
def test_a_damaged_copy_is_decoded_again(decoded: list[Path], tmp_path: Path, damage: str) -> None:
    load_dataset("cifar10")
    (copy,) = (tmp_path / "cache" / "cifar10").glob("*-y.npy")
    right, other = copy.read_bytes(), io.BytesIO()
    np.save(other, np.zeros(5, dtype=np.uint8))
    copy.write_bytes(
        {"emptied": b"", "cut short": right[:-1], "of another shape": other.getvalue()}[damage]
    )
    load_dataset("cifar10")
    assert len(decoded) == 2
    assert copy.read_bytes() == right


def test_a_cache_that_cannot_be_written_costs_time_only(
    decoded: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert len(load_dataset("cifar10").train.y) == 35
    assert len(decoded) == 1


def loaded_from_real_data(name: str, cache: Path) -> Dataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOCAL_DATA", str(REAL_DATA))
        patch.setenv("GLOCAL_CACHE", str(cache))
        return load_dataset(name)


@needs_data("mnist")
def test_mnist_is_the_published_one_to_the_last_pixel(tmp_path: Path) -> None:
    train, test, *_ = loaded_from_real_data("mnist", tmp_path)
    assert train.y.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert test.y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(float(train.x.mean())) < 1e-3
    assert abs(float(train.x.std()) - 1) < 1e-3
    # md5 sums of the four unpacked files, as published with MNIST
    pixels = [
        ((part.x * 0.3081 + 0.1307) * 255).round().to(torch.uint8).squeeze(1)
        for part in (train, test)
    ]
    unpacked = [pixels[0], train.y.to(torch.uint8), pixels[1], test.y.to(torch.uint8)]
    assert [hashlib.md5(as_idx(array.numpy())).hexdigest() for array in unpacked] == [
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ]


@needs_data("cifar10")
@pytest.mark.slow
def test_cifar10_is_the_published_one_to_the_last_pixel(tmp_path: Path) -> None:
    train, test, *_ = loaded_from_real_data("cifar10", tmp_path)
    assert (train.y.bincount().tolist(), test.y.bincount().tolist()) == ([5000] * 10, [1000] * 10)
    deviations, means = torch.std_mean(train.x, dim=(0, 2, 3))
    assert means.abs().max() < 1e-3
    assert (deviations - 1).abs().max() < 1e-3
    mean, deviation = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).reshape(
        2, 3, 1, 1
    )

    def binary(x: Tensor, y: Tensor) -> bytes:
        pixels = (x * (255 * deviation)).add_(255 * mean + 0.5).byte()
        return torch.cat([y[:, None].byte(), pixels.flatten(1)], dim=1).numpy().tobytes()

    # sha256 sums of data_batch_1.bin .. data_batch_5.bin and test_batch.bin of the official
    # binary version
    batches = [*zip(train.x.chunk(5), train.y.chunk(5), strict=True), (test.x, test.y)]
    assert [hashlib.sha256(binary(x, y)).hexdigest() for x, y in batches] == [
        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    ]
    again = loaded_from_real_data("cifar10", tmp_path)
    assert torch.equal(again.train.x, train.x)
    assert torch.equal(again.test.y, test.y)


def test_adult_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adult.data").write_text("nothing\n")
    with pytest.raises(InputError, match="holds no rows of Adult"):
        read_adult(tmp_path / "adult.data")


def test_adult_is_read_row_by_row(tmp_path: Path) -> None:
    """Two rows for each half, one of another race, an empty line at the end."""
    words = "39, State-gov, 1, Bachelors, 13, Divorced, {}, Husband, {}, {}, 0, 0, {}, Cuba, {}"
    people = [
        ("Sales", "White", "Male", 40),
        ("?", "Black", "Female", 20),
        ("Sales", "White", "Male", 30),
        ("?", "White", "Female", 10),
    ]
    rows = [words.format(*person, income) for person in people for income in ("<=50K", ">50K")]
    (tmp_path / "adult.data").write_text(
        "\n".join([*rows, words.format("Sales", "Other", "Male", 1, "<=50K"), ""])
    )
    train, test = read_adult(tmp_path / "adult.data")
    assert len(train.y) == len(test.y) == 4
    assert train.y.sum() == test.y.sum() == 2
    whole = torch.cat([train.group, test.group])  # type: ignore[list-item]
    assert whole.sum(0).tolist() == [6, 4]
    assert train.x.shape[1] == 6, "five numbers, and one dummy for two occupations"


def test_the_digits_are_those_of_scikit_learn_without_its_import() -> None:
    """It takes seconds and 100 MB, which a small machine may not have."""
    script = "import sys, glocal; glocal.load_dataset('digits'); print('sklearn' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "False"
    theirs, ours = load_digits(), load_dataset("digits")
    everything = torch.cat([ours.train.x, ours.test.x]) * 0.3759 + 0.3049
    expected = torch.from_numpy(theirs.images[:, None] / 16).float()
    key = lambda images: sorted(images.mul(16).round().int().flatten(1).tolist())  # noqa: E731
    assert key(everything) == key(expected)
    counts = torch.bincount(torch.cat([ours.train.y, ours.test.y])).tolist()
    assert counts == np.bincount(theirs.target).tolist()
