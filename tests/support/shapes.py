"""Test data: questions about tiny pictures of one colour, in the official format of VQA."""

import json
import os
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from glocal.datasets import Dataset
from glocal.datasets.vqa import read_vqa

COLOURS = {
    "red": (220, 40, 30),
    "green": (30, 200, 60),
    "blue": (40, 60, 220),
    "white": (240, 240, 240),
}


def colour_question(number, image, colour):
    """One of three questions about a picture, and its answer."""
    if number % 3 == 0:
        return {"question_id": number, "image_id": image, "question": "What color is it?"}, colour
    named = [*COLOURS][(number // 3 + image) % len(COLOURS)]
    begun = "Is it" if number % 3 == 1 else "Does this look"
    return {
        "question_id": number,
        "image_id": image,
        "question": f"{begun} {named}?",
    }, "yes" if named == colour else "no"


def annotation(question, answer, people=None):
    texts = people or [answer] * 10
    answers = [
        {"answer": each, "answer_confidence": "yes", "answer_id": place}
        for place, each in enumerate(texts, start=1)
    ]
    return {
        **{key: question[key] for key in ("question_id", "image_id")},
        "multiple_choice_answer": answer,
        "answers": answers,
    }


def picture(colour, noise):
    pixels = np.array(COLOURS[colour]) + noise.integers(-20, 20, (16, 16, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def packed(image):
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_world(folder, *, pictures=24, questions=480):
    """Files of a training and a test part, and a zip of pictures; returns what `read_vqa` takes."""
    noise, colours = np.random.default_rng(0), [*COLOURS]
    shown = {image: colours[image % len(colours)] for image in range(1, pictures + 1)}
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for image, colour in shown.items():
            archive.writestr(f"COCO_train2014_{image:012d}.png", packed(picture(colour, noise)))
    pairs = []
    for part, first, count in (("train", 0, questions), ("test", 12_000, questions // 4)):
        about = noise.integers(1, pictures + 1, count).tolist()
        rows = [
            colour_question(number, image, shown[image])
            for number, image in enumerate(about, start=first)
        ]
        paths = folder / f"q_{part}.json", folder / f"a_{part}.json"
        write_pair(paths, rows)
        pairs.append(paths)
    return [pairs[0]], [pairs[1]], folder / "images.zip"


def write_pair(paths, rows, *, version="2.0", people=None):
    info = {"info": {"version": version}, "data_type": "mscoco"}
    paths[0].write_text(json.dumps({**info, "questions": [question for question, _ in rows]}))
    annotations = [annotation(question, answer, people) for question, answer in rows]
    paths[1].write_text(json.dumps({**info, "annotations": annotations}))


def dataset():
    """As a study's own `data.source`; its files lie where the environment says."""
    train, test, questions = read_vqa(*write_world(Path(os.environ["SHAPES"])), size=16)
    return Dataset(train, test, len(questions.answers), questions)
