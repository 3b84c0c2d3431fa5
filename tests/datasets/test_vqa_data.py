"""Questions about pictures: official files become rows of numbers, and errors name the reason."""

import gzip
import json
import os
import re
import time
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from glocal import datasets
from glocal.cli import main
from glocal.core.errors import InputError
from glocal.datasets.features import extract_features, standardize
from glocal.datasets.image_table import ImageTable, find_images
from glocal.datasets.vqa import read_vqa
from glocal.datasets.vqa_questions import read_questions
from glocal.evaluate import vqa_accuracy
from tests.support import shapes
from tests.support.real_data import needs_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def world(tmp_path):
    return shapes.write_world(tmp_path)


def test_an_example_is_the_number_of_its_picture_and_the_words_of_its_question(world):
    train, _, questions = read_vqa(*world, size=16)
    first = train.x[0].tolist()
    assert [questions.words[word] for word in first[1:] if word] == ["what", "color", "is", "it"]
    answer = questions.answers[train.y[0]]
    colour = questions.pictures.table[first[0]].float().mean((1, 2)).numpy()
    distances = np.abs(np.array([*shapes.COLOURS.values()]) - colour).sum(1)
    assert [*shapes.COLOURS][int(distances.argmin())] == answer


def test_words_and_answers_come_from_training_questions_alone(world):
    paths = world[1][0]
    new = {"question_id": 7, "image_id": 1, "question": "Is it purple or what is it really then?"}
    shapes.write_pair(paths, [(new, "zebra")])
    _, test, questions = read_vqa(*world, size=16)
    assert "purple" not in questions.words
    assert "zebra" not in questions.answers
    longest = test.x.shape[1] - 1
    assert test.x[0, 1:].tolist()[:3] == [
        questions.words.index("is"),
        questions.words.index("it"),
        1,
    ]
    assert longest == 4  # a longer question is cut
    assert test.group.tolist() == [[-1] * 10]  # nobody can get it right, and it still counts
    nobody = test.group.expand(len(questions.answers), 10)
    assert not vqa_accuracy(torch.arange(len(questions.answers)), nobody).any()


def test_a_rare_answer_gives_way_to_another_persons_or_is_left_out_of_training(world):
    paths = world[0][0]
    frequent = [shapes.colour_question(number, 1, "red") for number in range(30)]
    few = [
        ({"question_id": number, "image_id": 2, "question": "What is it?"}, "scarlet")
        for number in (900, 901)
    ]
    shapes.write_pair(paths, [*frequent, *few])
    table = json.loads(paths[1].read_text())
    table["annotations"][-1]["answers"][0]["answer"] = "red"
    paths[1].write_text(json.dumps(table))
    train, _, questions = read_vqa(*world, answers=3, size=16)
    assert questions.dropped_without_answer == 1
    assert questions.answers[train.y[-1]] == "red"
    assert len(train.y) == 31


@pytest.mark.parametrize(
    ("votes", "worth"), [(0, 0.0), (1, 1 / 3), (2, 2 / 3), (3, 1.0), (10, 1.0)]
)
def test_an_answer_counts_as_much_as_people_agree(votes, worth):
    people = torch.tensor([[5] * votes + [6] * (10 - votes)])
    assert vqa_accuracy(torch.tensor([5]), people).item() == pytest.approx(worth)


def test_gzipped_files_and_folders_of_pictures_are_read_alike(world, tmp_path):
    unpacked = tmp_path / "pictures"
    with zipfile.ZipFile(world[2]) as archive:
        archive.extractall(unpacked)
    for path in world[0][0]:
        path.write_bytes(gzip.compress(path.read_bytes()))
    one, other = (read_vqa(*world[:2], place, size=16) for place in (world[2], unpacked))
    assert torch.equal(one[0].x, other[0].x)
    assert torch.equal(one[2].pictures.table, other[2].pictures.table)


def test_pictures_are_decoded_once_and_mapped_from_then_on(world, monkeypatch):
    first = read_vqa(*world, size=16)[2].pictures
    monkeypatch.setattr("glocal.datasets.image_table._decode_into", None)
    assert torch.equal(read_vqa(*world, size=16)[2].pictures.table, first.table)


def zeros_from_the_middle_on(raw):
    return raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2)


@pytest.mark.parametrize(
    "damage",
    [
        zeros_from_the_middle_on,
        lambda raw: raw.replace(b"'fortran_order': False", b"'fortran_order': True "),
    ],
    ids=["zeros", "order"],
)
def test_cached_pictures_that_are_damaged_are_decoded_anew(world, tmp_path, damage):
    first = read_vqa(*world, size=16)[2].pictures.table.clone()
    [cached] = (tmp_path / "cache" / "pictures").iterdir()
    whole = cached.read_bytes()
    assert damage(whole) != whole
    cached.write_bytes(damage(whole))
    assert torch.equal(read_vqa(*world, size=16)[2].pictures.table, first)
    assert cached.read_bytes() == whole


def test_what_a_killed_process_left_in_the_cache_is_cleared_after_a_day(world, tmp_path):
    for name, age in (("half-old", 90_000), ("half-young", 0)):
        left = tmp_path / "cache" / "pictures" / name
        left.mkdir(parents=True)
        (left / "part.npy").write_bytes(b"0" * 100)
        os.utime(left, (time.time() - age, time.time() - age))
    read_vqa(*world, size=16)
    assert sorted(
        path.name for path in (tmp_path / "cache" / "pictures").iterdir() if path.is_dir()
    ) == ["half-young"]


def test_a_cache_that_cannot_be_written_costs_memory_only(world, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "file"))
    assert len(read_vqa(*world, size=16)[2].pictures) == 24


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to ask for room on disk")
def test_a_full_disk_costs_memory_only(world, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert len(read_vqa(*world, size=16)[2].pictures) == 24
    assert not [*(tmp_path / "cache" / "pictures").iterdir()]


def test_pictures_are_brought_to_one_size(world):
    assert read_vqa(*world, size=8)[2].pictures.shape == (3, 8, 8)


def test_questions_without_a_picture_are_left_out_counted_and_logged(world, tmp_path, caplog):
    caplog.set_level("INFO", "glocal")
    fewer = tmp_path / "fewer.zip"
    with zipfile.ZipFile(world[2]) as archive, zipfile.ZipFile(fewer, "w") as smaller:
        for name in archive.namelist()[:12]:
            smaller.writestr(name, archive.read(name))
    train, test, questions = read_vqa(*world[:2], fewer, size=16)
    assert caplog.messages == [
        f"questions left out: {questions.dropped_without_image} without their picture, "
        "0 for training without a known answer"
    ]
    assert questions.dropped_without_image == 600 - len(train.y) - len(test.y) > 0
    assert int(train.x[:, 0].max()) == len(questions.pictures) - 1 == 11


def test_no_picture_of_any_question_is_an_error(world, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has the picture of no training question"):
        read_vqa(*world[:2], tmp_path / "empty")


def test_no_picture_of_any_test_question_is_an_error_that_says_so(world):
    question = {"question_id": 7, "image_id": 99, "question": "Is it red?"}
    shapes.write_pair(world[1][0], [(question, "no")])
    with pytest.raises(
        InputError, match=r"has the picture of no test question .question 7 is about 99"
    ):
        read_vqa(*world, size=16)


def test_pictures_may_lie_in_folders_within_a_folder_as_the_official_ones_do(world, tmp_path):
    with zipfile.ZipFile(world[2]) as archive:
        for place, name in enumerate(archive.namelist()):
            archive.extract(name, tmp_path / "pictures" / ("train2014" if place % 2 else "val2014"))
    one, other = (
        read_vqa(*world[:2], place, size=16)[2].pictures.table
        for place in (world[2], tmp_path / "pictures")
    )
    assert torch.equal(one, other)


def test_a_corrupt_picture_is_named(world):
    with zipfile.ZipFile(world[2]) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    broken = next(iter(content))
    with zipfile.ZipFile(world[2], "w") as archive:
        for name, raw in content.items():
            archive.writestr(name, raw[:60] if name == broken else raw)
    with pytest.raises(InputError, match=f"the picture {broken} cannot be decoded"):
        read_vqa(*world, size=16)


def test_a_picture_in_a_locked_zip_is_named(world):
    raw = bytearray(world[2].read_bytes())
    raw[6] |= 1
    raw[raw.find(b"PK\x01\x02") + 8] |= 1
    world[2].write_bytes(raw)
    with pytest.raises(InputError, match=r"000001.png cannot be decoded .*encrypted"):
        read_vqa(*world, size=16)


def test_a_picture_that_changed_in_its_folder_is_decoded_again(world, tmp_path):
    unpacked = tmp_path / "pictures"
    with zipfile.ZipFile(world[2]) as archive:
        archive.extractall(unpacked)
    before = read_vqa(*world[:2], unpacked, size=16)[2].pictures.table.clone()
    Image.new("RGB", (16, 16), (1, 2, 3)).save(min(unpacked.iterdir()))
    after = read_vqa(*world[:2], unpacked, size=16)[2].pictures.table
    assert after[0].unique().tolist() == [1, 2, 3]
    assert torch.equal(before[1:], after[1:])


def test_pictures_of_every_kind_become_red_green_and_blue(world, tmp_path):
    palette = Image.new("P", (5, 9))
    palette.putpalette([10, 20, 30] * 256)
    kinds = {
        "1.png": (Image.new("L", (5, 9), 77), {}, [77, 77, 77]),
        "2.png": (Image.new("RGBA", (5, 9), (1, 2, 3, 0)), {}, [1, 2, 3]),
        "3.jpg": (Image.new("CMYK", (5, 9)), {}, [255, 255, 255]),
        "4.png": (Image.fromarray(np.full((9, 5), 77 * 256, np.uint16)), {}, [77, 77, 77]),
        "5.png": (palette, {"transparency": b"\0\1"}, [10, 20, 30]),
        "6.png": (Image.new("LA", (5, 9), (77, 1)), {}, [77, 77, 77]),
        "7.tif": (Image.fromarray(np.full((9, 5), 77, np.int32)), {}, [77, 77, 77]),
        "8.tif": (Image.fromarray(np.full((9, 5), 77 * 256, np.int32)), {}, [77, 77, 77]),
    }
    (tmp_path / "kinds").mkdir()
    for name, (image, how, _) in kinds.items():
        image.save(tmp_path / "kinds" / name, **how)
    table = read_vqa(*world[:2], tmp_path / "kinds", size=4)[2].pictures.table
    assert table[:, :, 0, 0].tolist() == [colour for _, _, colour in kinds.values()]


def test_a_picture_of_fractions_is_refused(world, tmp_path):
    (tmp_path / "kinds").mkdir()
    Image.fromarray(np.full((9, 5), 0.5, np.float32)).save(tmp_path / "kinds" / "1.tif")
    with pytest.raises(
        InputError, match=r"picture 1.tif cannot be decoded .*its pixels are fractions"
    ):
        read_vqa(*world[:2], tmp_path / "kinds", size=4)


def test_only_pictures_count_as_pictures(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for name in (
            "all/",
            "all/train_1.jpg",
            "__MACOSX/all/._train_1.jpg",
            "all/train_1.txt",
            "part_2/",
            "all/readme.jpg",
            f"{10**18}.jpg",
        ):
            archive.writestr(name, b"")
    assert find_images(tmp_path / "images.zip") == {1: "all/train_1.jpg"}


def test_two_pictures_of_one_id_are_refused(tmp_path):
    for name in ("COCO_train2014_000000000009.jpg", "9.png"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"two pictures of id 9, .*; take one of them away"):
        find_images(tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_one_name_twice_in_a_zip_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for _ in range(2):
            archive.writestr("5.png", b"")
    with pytest.raises(InputError, match=r"two pictures of id 5, 5.png and 5.png"):
        find_images(tmp_path / "images.zip")


def later_version(path):
    """A zip that asks, in its directory, for a version that nobody has."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("1.png", b"")
    raw = path.read_bytes()
    place = raw.index(b"PK\x01\x02") + 6
    return raw[:place] + b"\x71\x00" + raw[place + 2 :]


@pytest.mark.parametrize(
    "content", [lambda path: b"no zip", later_version], ids=["no zip", "of a later version"]
)
def test_a_zip_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "images.zip").write_bytes(content(tmp_path / "images.zip"))
    with pytest.raises(InputError, match="no folder or zip of pictures"):
        find_images(tmp_path / "images.zip")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, a: q["info"].update(version="1.0"),
            "of version 1.0 of VQA; version 2.0 was expected",
        ),
        (lambda q, a: a["info"].update(version="1.0"), "of version 1.0 of VQA"),
        (lambda q, a: (q.pop("info"), q.update(version=1)), "of version 1 of VQA"),
        (
            lambda q, a: a["annotations"][0].update(multiple_choice_answer=True),
            "in short True; ten words were expected",
        ),
        (lambda q, a: q.pop("questions"), "holds no list of questions"),
        (lambda q, a: q["questions"][0].pop("image_id"), "has no 'image_id'"),
        (
            lambda q, a: q["questions"][3].update(question=" ?! "),
            "question 3 is ' \\?! ' and has no words",
        ),
        (lambda q, a: q["questions"].pop(), "does not ask"),
        (lambda q, a: a["annotations"].pop(), "does not answer"),
        (
            lambda q, a: a["annotations"][4].update(image_id=999),
            "question 4 is about picture 999 in .*a_train.json and about",
        ),
        (lambda q, a: a["annotations"][0].update(answers=[]), "question 0 has 0 answers"),
        (lambda q, a: a["annotations"][0].update(answers=["yes"]), "the answers to question 0 are"),
        (
            lambda q, a: a["annotations"][0].pop("multiple_choice_answer"),
            "has no 'multiple_choice_answer'",
        ),
        (
            lambda q, a: a["annotations"][0].update(multiple_choice_answer=None),
            "in short None; ten words were expected",
        ),
        (
            lambda q, a: a["annotations"][0]["answers"][4].update(answer=None),
            "the answers to question 0 are",
        ),
        (
            lambda q, a: q["questions"][3].update(question=None),
            "question 3 is None and has no words",
        ),
        (
            lambda q, a: q["questions"][0].update(question_id=[1]),
            "'question_id' is \\[1\\] .*a whole number was expected",
        ),
        (
            lambda q, a: q["questions"][0].update(image_id="1"),
            "'image_id' is '1' .*a whole number was expected",
        ),
        (
            lambda q, a: q["questions"].append(q["questions"][5]),
            "q_train.json has question 5 twice",
        ),
        (
            lambda q, a: a["annotations"].append(a["annotations"][5]),
            "a_train.json has question 5 twice",
        ),
    ],
)
def test_files_that_are_something_else_are_refused_with_the_reason(world, change, message):
    paths = world[0][0]
    tables = [json.loads(path.read_text()) for path in paths]
    change(*tables)
    for path, table in zip(paths, tables, strict=True):
        path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=message):
        read_questions(*paths)


def test_a_file_that_is_not_there_or_still_packed_is_named(world):
    questions, annotations = world[0][0]
    with pytest.raises(
        InputError, match=r"absent.json cannot be read \(No such file or directory\)"
    ):
        read_questions(questions.with_name("absent.json"), annotations)
    with pytest.raises(
        InputError, match=r"images.zip is a zip; unpack it, and give the JSON in it"
    ):
        read_questions(world[2], annotations)


def test_files_that_name_no_version_are_read(world):
    table = json.loads(world[0][0][0].read_text())
    world[0][0][0].write_text(json.dumps({**table, "info": "ours"}))
    assert len(read_questions(*world[0][0])) == 480


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": 0}, "answers is 0; a whole number from 1 on was expected"),
        ({"answers": True}, "answers is True; a whole number"),
        ({"size": 0}, "size is 0; a whole number"),
        ({"size": 16.0}, "size is 16.0; a whole number"),
        ({"size": 200_000}, "size is 200000; a whole number from 1 to 2048"),
        ({"train": []}, "the files are \\[\\]; a list of pairs was expected"),
        (
            {"test": ("q.json", "a.json")},
            "the files are .'q.json', 'a.json'.; a list of pairs was expected",
        ),
        ({"test": None}, "the files are None; a list of pairs"),
    ],
)
def test_what_cannot_be_read_from_is_refused(world, change, message):
    arguments = {"train": world[0], "test": world[1], "pictures": world[2], "size": 16}
    with pytest.raises(InputError, match=message):
        read_vqa(**{**arguments, **change})


@pytest.mark.parametrize(
    "twice", [lambda train, test: (train * 2, test), lambda train, test: (train, test + train)]
)
def test_a_question_in_two_pairs_of_files_is_refused(world, twice):
    with pytest.raises(
        InputError, match="question 0 is in two pairs of files; let each question be in one"
    ):
        read_vqa(*twice(*world[:2]), world[2], size=16)


def test_paths_may_be_plain_text(world):
    pairs = [[tuple(map(str, pair)) for pair in part] for part in world[:2]]
    assert len(read_vqa(*pairs, str(world[2]), size=16)[0].y) == 480


def test_words_may_be_of_any_script_and_an_endless_question_is_cut(world):
    shapes.write_pair(
        world[0][0],
        [
            ({"question_id": 1, "image_id": 1, "question": "Où est l’éléphant ?"}, "là"),
            ({"question_id": 2, "image_id": 2, "question": "这是什么"}, "象"),
            ({"question_id": 3, "image_id": 2, "question": "why " * 5000}, "no"),
            ({"question_id": 4, "image_id": 2, "question": "यह किस की है"}, "café"),
            ({"question_id": 5, "image_id": 2, "question": "यह किस का है"}, "cafe\u0301"),
        ],
    )
    train, _, questions = read_vqa(*world, size=16)
    hindi = ("का", "किस", "की", "यह", "है")
    assert questions.words == ("", "?", "est", "l'éléphant", "où", "why", *hindi, "这是什么")
    assert train.x.shape == (5, 1 + 64)
    assert sorted(questions.answers) == ["café", "là", "no", "象"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[]",
        b"\x1f\x8b damaged",
        gzip.compress(b"{}" * 90)[:-12] + b"\xff" * 12,
        b"[" * 99999,
    ],
    # by name: compressed bytes hold the second they were written in
    ids=["empty", "text", "another kind", "damaged", "damaged at its end", "too deep"],
)
def test_bytes_that_are_no_json_are_refused(world, content):
    world[0][0][0].write_bytes(content)
    with pytest.raises(InputError, match=r"no JSON of VQA|no list of questions"):
        read_questions(*world[0][0])


def test_a_table_of_pictures_is_not_copied_and_a_number_below_zero_is_no_picture():
    table = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    pictures = ImageTable(table)
    picture_rows = pictures(torch.tensor([1, -1]))
    assert not picture_rows[1].any()
    assert picture_rows[0, 0, 0, 0] == pytest.approx((48 / 255 - 0.485) / 0.229, abs=1e-6)
    assert pictures.table.data_ptr() == table.ctypes.data


def test_features_of_a_single_picture_are_numbers():
    assert standardize(np.ones((1, 3), np.float32)).table.tolist() == [[0, 0, 0]]
    two = standardize(np.array([[1], [3]], np.float32)).table.flatten().tolist()
    assert two == pytest.approx([-(0.5**0.5), 0.5**0.5])


class Scaled(nn.Module):
    """The mean of each colour, times its weight and `turn`; counts the pictures it encodes."""

    def __init__(self, weight=1.0, turn=1.0):
        super().__init__()
        self.weight, self.turn, self.encoded = nn.Parameter(torch.tensor(weight)), turn, 0

    def forward(self, pictures):
        self.encoded += len(pictures)
        means = pictures.mean((2, 3))
        return self.weight * torch.stack(
            [means[:, 0], self.turn * means[:, 1] + (1 - self.turn) * means[:, 2]], 1
        )


def some_pictures(seed=0):
    return ImageTable(np.random.default_rng(seed).integers(0, 256, (40, 3, 4, 4), dtype=np.uint8))


@pytest.fixture
def on_cpu(tmp_path, monkeypatch):
    """A network's features, and how many pictures it encoded for them; with an empty cache."""
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "own"))

    def extract(network, pictures=None, report=lambda *_: None):
        table = extract_features(
            pictures or some_pictures(), network, torch.device("cpu"), report=report
        ).table
        return table, network.encoded

    return extract


def test_a_frozen_encoder_encodes_every_picture_once_and_only_a_few_from_then_on(on_cpu):
    first, encoded = on_cpu(Scaled())
    assert (encoded, first.shape) == (16 + 40, (40, 2))
    again, encoded = on_cpu(Scaled())
    assert encoded == 16
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "other", [{"network": Scaled(weight=2.0)}, {"network": Scaled(), "pictures": some_pictures(1)}]
)
def test_features_of_other_weights_or_of_other_pictures_are_not_used(on_cpu, other):
    on_cpu(Scaled())
    assert on_cpu(**other)[1] == 16 + 40


def test_an_encoder_that_computes_something_else_with_the_same_weights_encodes_anew(on_cpu):
    before, _ = on_cpu(Scaled())
    after, encoded = on_cpu(Scaled(turn=0.5))
    assert encoded == 16 + 40
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:100],
        lambda raw: b"PK\x03\x04" + raw[4:],
        lambda raw: raw[:10] + b"\xd7" + raw[11:],
        zeros_from_the_middle_on,
    ],
    ids=["cut", "a zip", "a header that is none", "zeros from the middle on"],
)
def test_cached_features_that_are_damaged_are_computed_anew(on_cpu, tmp_path, damage):
    first, _ = on_cpu(Scaled())
    (cached,) = (tmp_path / "own" / "features").iterdir()
    cached.write_bytes(damage(cached.read_bytes()))
    again, encoded = on_cpu(Scaled())
    assert encoded == 16 + 40
    assert torch.equal(first, again)


def test_features_that_cannot_be_cached_cost_the_next_run_only(on_cpu, tmp_path):
    (tmp_path / "own").write_text("")
    assert [on_cpu(Scaled())[1] for _ in range(2)] == [16 + 40, 16 + 40]


class Reusing(Scaled):
    """Writes its output into the same place each time, as networks that save memory do."""

    def forward(self, pictures):
        self.place = getattr(self, "place", torch.empty(40, 2))
        self.place[: len(pictures)] = super().forward(pictures)
        return self.place[: len(pictures)]


def test_features_are_copied_out_of_an_encoder_that_reuses_their_place(on_cpu):
    assert torch.allclose(on_cpu(Reusing(weight=3.0))[0], on_cpu(Scaled(weight=3.0))[0])


class Odd(nn.Module):
    """An encoder with any output: `output(pictures, number of calls)`."""

    def __init__(self, output):
        super().__init__()
        self.output, self.encoded = output, 0

    def forward(self, pictures):
        self.encoded += 1
        return self.output(pictures, self.encoded)

    def get_extra_state(self):
        return {"of": "no tensor"}

    def set_extra_state(self, state):
        pass

    def train(self, mode=True):
        super().train(mode)  # returns nothing


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            lambda x, turn: x.flatten(1) * torch.nan,
            "its output for picture 0 is not finite; check its weights",
        ),
        (
            lambda x, turn: x.flatten(1)[:, :0],
            "it returned (16, 0) of torch.float32 for 16 pictures; real numbers (pictures, width)",
        ),
        (
            lambda x, turn: torch.complex(x.mean((2, 3)), x.mean((2, 3))),
            "of torch.complex64 for 16 pictures; real numbers",
        ),
        (lambda x, turn: (x.flatten(1),), "it returned tuple for 16 pictures"),
        (
            lambda x, turn: x.flatten(1)[:, :turn],
            "2 numbers for each of the first pictures and 3 for picture 16; "
            "the same width was expected",
        ),
    ],
    ids=["not finite", "nothing", "complex", "several", "of another width"],
)
def test_the_output_of_an_encoder_must_be_numbers(on_cpu, output, message):
    with pytest.raises(InputError, match=re.escape(message)):
        on_cpu(Odd(output))


def test_an_encoder_may_hold_more_than_tensors_and_its_train_method_may_return_nothing(
    on_cpu,
):
    assert on_cpu(Odd(lambda x, turn: x.mean((2, 3)).double()))[0].shape == (40, 3)


def test_a_feature_that_is_the_same_everywhere_is_zero_and_a_tiny_one_is_not():
    same = np.full((1000, 1), 1000.1, np.float32)
    tiny = np.random.default_rng(0).normal(size=(1000, 1)).astype(np.float32) * 1e-9
    table = standardize(np.concatenate([same, tiny], 1)).table
    assert not table[:, 0].any()
    assert table[:, 1].std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            np.zeros((2, 4, 4, 3), np.uint8),
            "the table is uint8 (2, 4, 4, 3); bytes (pictures, 3, height, width) or float32",
        ),
        (np.zeros((0, 5), np.float32), "the table is float32 (0, 5)"),
        (np.zeros((2, 5)), "the table is float64 (2, 5)"),
        (np.full((2, 5), np.inf, np.float32), "a feature is not finite"),
    ],
)
def test_a_table_of_something_else_is_refused(table, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ImageTable(table)


def test_a_table_in_another_order_of_memory_gives_the_same_features(on_cpu):
    table = some_pictures().table.numpy()
    turned = np.ascontiguousarray(table.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert torch.equal(on_cpu(Scaled())[0], on_cpu(Scaled(), ImageTable(turned))[0])


def test_progress_of_decoding_is_logged_where_it_takes_long(world, monkeypatch, caplog):
    caplog.set_level("INFO", "glocal")
    monkeypatch.setattr("glocal.datasets.image_table._LOG_EVERY", 10)
    read_vqa(*world, size=12)
    assert caplog.messages == [
        f"decoding 24 pictures, once: {done} are done" for done in (0, 10, 20)
    ]


def test_progress_of_an_encoder_is_reported(on_cpu):
    reports = []
    on_cpu(Scaled(), report=lambda *progress: reports.append(progress))
    assert reports == [("pictures encoded", 48 * done, 48 * 40) for done in (16, 32, 40)]


def test_questions_of_one_beginning_stay_together_in_training_and_test():
    generator = np.random.default_rng(0)
    kinds = generator.integers(0, 12, 600), generator.integers(0, 14, 200)
    labels = [np.zeros(len(part), dtype=np.int64) for part in kinds]
    train, test = datasets.question_type_shards(6, *kinds)(*labels, generator)
    assert {len(rows) for rows in train} == {100}
    assert sorted(np.concatenate(train)) == [*range(600)]
    assert sorted(np.concatenate(test)) == [*range(200)]
    for mine, tested in zip(train, test, strict=True):
        assert len(np.unique(kinds[0][mine])) <= 4
        assert {kind for kind in kinds[1][tested] if kind < 12} <= {*kinds[0][mine]}


def test_the_error_names_a_file_that_is_not_to_be_downloaded(monkeypatch):
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    with pytest.raises(InputError, match=r"images\.zip is not to be downloaded; put the file into"):
        datasets.fetch_source("vqav2")


def test_no_error_says_to_delete_what_cannot_be_downloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLOCAL_DATA", str(tmp_path))
    (tmp_path / "easy_vqa").mkdir()
    for remote in datasets.SOURCES["easy_vqa"].files:
        (tmp_path / "easy_vqa" / remote.name).write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"copy it again from its origin$"):
        datasets.load_any("easy_vqa")
    with pytest.raises(SystemExit, match="2"):
        main(["data", "check", "easy_vqa"])
    assert (
        "easy_vqa has damaged files; copy them again from their origin\n" in capsys.readouterr().err
    )


@pytest.mark.slow
@needs_data("vqav2")
def test_the_real_questions_are_as_hard_as_known():
    """Always "no" .223, the most_frequent answer per question type .361, at best .904; by hand."""
    dataset = datasets.load_dataset("vqav2")
    questions, people = dataset.questions, dataset.test.group
    assert len(dataset.test.y) == 6585
    assert len(dataset.train.y) + questions.dropped_without_answer == 26598
    no = torch.full((len(people),), questions.answers.index("no"))
    assert vqa_accuracy(no, people).mean().item() == pytest.approx(0.223, abs=5e-4)
    most_frequent = np.full(
        max(part.max() for part in questions.question_types) + 1, int(dataset.train.y.mode().values)
    )
    for kind in np.unique(questions.question_types[0]):
        most_frequent[kind] = np.bincount(
            dataset.train.y.numpy()[questions.question_types[0] == kind]
        ).argmax()
    guesses = torch.from_numpy(most_frequent[questions.question_types[1]])
    assert vqa_accuracy(guesses, people).mean().item() == pytest.approx(0.361, abs=5e-4)
    best = torch.stack(
        [vqa_accuracy(people[:, place], people) * (people[:, place] >= 0) for place in range(10)]
    )
    assert best.amax(0).mean().item() == pytest.approx(0.904, abs=5e-4)
