"""Questions about pictures: official files become rows of numbers, and what is wrong with them is told in one line."""

import gzip
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from glocal import data
from glocal.data.pictures import Pictures, in_place
from glocal.data.vqa import read_asked, read_vqa
from glocal.errors import InputError
from glocal.measure import agreeing
from tests import shapes


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
    seen = questions.pictures.table[first[0]].float().mean((1, 2))
    assert int(np.abs(np.array([*shapes.COLOURS.values()]) - seen.numpy()).sum(1).argmin()) == [*shapes.COLOURS].index(answer)


def test_words_and_answers_come_from_training_questions_alone(world):
    paths = world[1][0]
    new = {"question_id": 7, "image_id": 1, "question": "Is it purple or what is it really then?"}
    shapes.write_pair(paths, [(new, "zebra")])
    _, test, questions = read_vqa(*world, size=16)
    assert "purple" not in questions.words
    assert "zebra" not in questions.answers
    longest = test.x.shape[1] - 1
    assert test.x[0, 1:].tolist()[:3] == [questions.words.index("is"), questions.words.index("it"), 1]
    assert longest == 4  # a longer question is cut
    assert test.group.tolist() == [[-1] * 10]  # nobody can get it right, and it still counts
    assert not agreeing(torch.arange(len(questions.answers)), test.y, test.group.expand(len(questions.answers), 10)).any()


def test_a_rare_answer_gives_way_to_what_some_people_said_or_is_left_out_of_training(world):
    paths = world[0][0]
    told = [shapes.asked(number, 1, "red") for number in range(30)]
    few = [({"question_id": number, "image_id": 2, "question": "What is it?"}, "scarlet") for number in (900, 901)]
    shapes.write_pair(paths, [*told, *few])
    table = json.loads(paths[1].read_text())
    table["annotations"][-1]["answers"][0]["answer"] = "red"
    paths[1].write_text(json.dumps(table))
    train, _, questions = read_vqa(*world, answers=3, size=16)
    assert questions.without_answer == 1
    assert questions.answers[train.y[-1]] == "red"
    assert len(train.y) == 31


@pytest.mark.parametrize(("votes", "worth"), [(0, 0.0), (1, 1 / 3), (2, 2 / 3), (3, 1.0), (10, 1.0)])
def test_an_answer_counts_as_much_as_people_agree(votes, worth):
    people = torch.tensor([[5] * votes + [6] * (10 - votes)])
    assert agreeing(torch.tensor([5]), torch.tensor([6]), people).item() == pytest.approx(worth)


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
    monkeypatch.setattr("glocal.data.pictures._pixels", None)
    assert torch.equal(read_vqa(*world, size=16)[2].pictures.table, first.table)


def test_a_cache_that_cannot_be_written_costs_memory_only(world, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "file"))
    assert len(read_vqa(*world, size=16)[2].pictures) == 24


def test_pictures_are_brought_to_one_size(world):
    assert read_vqa(*world, size=8)[2].pictures.shape == (3, 8, 8)


def test_questions_without_a_picture_are_left_out_and_counted(world, tmp_path):
    fewer = tmp_path / "fewer.zip"
    with zipfile.ZipFile(world[2]) as archive, zipfile.ZipFile(fewer, "w") as kept:
        for name in archive.namelist()[:12]:
            kept.writestr(name, archive.read(name))
    train, test, questions = read_vqa(*world[:2], fewer, size=16)
    assert questions.without_picture == 600 - len(train.y) - len(test.y) > 0
    assert int(train.x[:, 0].max()) == len(questions.pictures) - 1 == 11


def test_no_picture_of_any_question_is_an_error(world, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has the picture of no question"):
        read_vqa(*world[:2], tmp_path / "empty")


def test_a_corrupt_picture_is_named(world):
    with zipfile.ZipFile(world[2]) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    broken = next(iter(content))
    with zipfile.ZipFile(world[2], "w") as archive:
        for name, raw in content.items():
            archive.writestr(name, raw[:60] if name == broken else raw)
    with pytest.raises(InputError, match=f"the picture {broken} cannot be decoded"):
        read_vqa(*world, size=16)


def test_a_zip_of_something_else_is_refused(tmp_path):
    (tmp_path / "images.zip").write_bytes(b"no zip")
    with pytest.raises(InputError, match="no folder or zip of pictures"):
        in_place(tmp_path / "images.zip")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, a: q["info"].update(version="1.0"), "of version 1.0 of VQA; version 2.0 was expected"),
        (lambda q, a: a["info"].update(version="1.0"), "of version 1.0 of VQA"),
        (lambda q, a: q.pop("questions"), "holds no list of questions"),
        (lambda q, a: q["questions"][0].pop("image_id"), "has no 'image_id'"),
        (lambda q, a: q["questions"][3].update(question=" ?! "), "question 3 is ' \\?! ' and has no words"),
        (lambda q, a: q["questions"].pop(), "does not ask"),
        (lambda q, a: a["annotations"].pop(), "does not answer"),
        (lambda q, a: a["annotations"][0].update(answers=[]), "question 0 has 0 answers"),
        (lambda q, a: a["annotations"][0].update(answers=["yes"]), "the answers to question 0 are"),
        (lambda q, a: a["annotations"][0].pop("multiple_choice_answer"), "has no 'multiple_choice_answer'"),
    ],
)
def test_files_that_are_something_else_are_refused_with_the_reason(world, change, message):
    paths = world[0][0]
    tables = [json.loads(path.read_text()) for path in paths]
    change(*tables)
    for path, table in zip(paths, tables, strict=True):
        path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=message):
        read_asked(*paths)


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b"\x1f\x8b damaged"])
def test_bytes_that_are_no_json_are_refused(world, content):
    world[0][0][0].write_bytes(content)
    with pytest.raises(InputError, match=r"no JSON of VQA|no list of questions"):
        read_asked(*world[0][0])


def test_a_table_of_pictures_is_not_copied_and_a_number_below_zero_is_no_picture():
    table = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    pictures = Pictures(table)
    seen = pictures(torch.tensor([1, -1]))
    assert not seen[1].any()
    assert seen[0, 0, 0, 0] == pytest.approx((48 / 255 - 0.485) / 0.229, abs=1e-6)
    assert pictures.table.data_ptr() == table.ctypes.data


def test_questions_of_one_beginning_stay_together_in_training_and_test():
    generator = np.random.default_rng(0)
    kinds = generator.integers(0, 12, 600), generator.integers(0, 14, 200)
    labels = [np.zeros(len(part), dtype=np.int64) for part in kinds]
    train, test = data.kind_shards(6, *kinds)(*labels, generator)
    assert {len(rows) for rows in train} == {100}
    assert sorted(np.concatenate(train)) == [*range(600)]
    assert sorted(np.concatenate(test)) == [*range(200)]
    for mine, tested in zip(train, test, strict=True):
        assert len(np.unique(kinds[0][mine])) <= 4
        assert {kind for kind in kinds[1][tested] if kind < 12} <= {*kinds[0][mine]}


def test_what_is_not_to_be_downloaded_is_said_so(monkeypatch):
    monkeypatch.delenv("GLOCAL_DATA", raising=False)
    with pytest.raises(InputError, match=r"images\.zip is not to be downloaded; put the file into"):
        data.fetch_source("vqav2")


@pytest.mark.slow
@pytest.mark.skipif(not (Path(os.environ.get("GLOCAL_DATA", "")) / "vqav2").is_dir(), reason="GLOCAL_DATA has no vqav2")
def test_the_real_questions_are_as_hard_as_known():
    """Always "no" .223, the commonest answer by the first two words .361, at best .904: counted by hand once."""
    dataset = data.load("vqav2")
    questions, people = dataset.questions, dataset.test.group
    assert len(dataset.test.y) == 6585
    assert len(dataset.train.y) + questions.without_answer == 26598
    no = torch.full((len(people),), questions.answers.index("no"))
    assert agreeing(no, dataset.test.y, people).mean().item() == pytest.approx(0.223, abs=5e-4)
    commonest = np.full(max(part.max() for part in questions.kinds) + 1, int(dataset.train.y.mode().values))
    for kind in np.unique(questions.kinds[0]):
        commonest[kind] = np.bincount(dataset.train.y.numpy()[questions.kinds[0] == kind]).argmax()
    guesses = torch.from_numpy(commonest[questions.kinds[1]])
    assert agreeing(guesses, dataset.test.y, people).mean().item() == pytest.approx(0.361, abs=5e-4)
    best = torch.stack([agreeing(people[:, place], dataset.test.y, people) * (people[:, place] >= 0) for place in range(10)])
    assert best.amax(0).mean().item() == pytest.approx(0.904, abs=5e-4)
