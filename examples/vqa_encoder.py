"""Weights for the picture encoder where no pretrained ones can be had: ResNet-18 from CIFAR-10, then from words, if asked.

python examples/vqa_encoder.py --out encoder.safetensors --cifar 30 --words 40 --device cuda
glocal run paper-vqa --set model.weights=encoder.safetensors

CIFAR-10 is public, as ImageNet is: nothing of the devices goes into it. `--words` goes on with the pictures of the training
questions and learns which words are asked and answered about each; it looks at all devices' training data in one place, so that
figures with it say what an encoder for such pictures is worth, not what a federation has learnt. Test questions are never looked
at; those that a study sets aside for validation are, for they are training questions here.
"""

import argparse
import math
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from glocal import data
from glocal.studies.vqa_model import ResNet

BATCH, RARE = 256, 20
SIDE = 64  # to which the 32 x 32 of CIFAR-10 are enlarged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cifar", type=int, default=30, help="epochs")
    parser.add_argument("--words", type=int, default=0, help="epochs")
    parser.add_argument("--limit", type=int, help="so many examples only, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    where, resnet = torch.device(given.device), ResNet()
    if given.cifar:
        learn(resnet, *photographs(where, given.limit), epochs=given.cifar, rate=0.1)
    if given.words:
        learn(resnet, *told_of_pictures(where, given.limit), epochs=given.words, rate=0.05)
    kept = {name: tensor.contiguous().cpu() for name, tensor in resnet.state_dict().items() if not name.startswith("fc.")}
    save_file(kept, given.out)
    print(f"written: {given.out}")


Look = Callable[[Tensor], Tensor]


def photographs(where: torch.device, limit: int | None) -> tuple[Look, Tensor]:
    """CIFAR-10's training pictures by number, and their classes one-hot (rows, 10)."""
    train = data.load("cifar10").train
    x, y = train.x[:limit].to(where), functional.one_hot(train.y[:limit], 10).float().to(where)
    return lambda rows: functional.interpolate(x[rows], SIDE, mode="bilinear", align_corners=False), y


def told_of_pictures(where: torch.device, limit: int | None) -> tuple[Look, Tensor]:
    """The pictures of training questions by number, and which words, and answers as words, are said of each (rows, words)."""
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
    numbers = seen.to(where)
    return lambda rows: questions.pictures(numbers[rows]), said[seen].to(where)


def learn(resnet: ResNet, look: Look, targets: Tensor, *, epochs: int, rate: float) -> None:
    """SGD with a rate that fades along a cosine; targets (rows, things) of ones and zeros, one or several ones to a row."""
    where, rows = targets.device, len(targets)
    head = nn.Linear(resnet.fc.in_features, targets.shape[1]).to(where)
    resnet.to(where, memory_format=torch.channels_last).train()
    weights = [*(p for name, p in resnet.named_parameters() if not name.startswith("fc.")), *head.parameters()]
    rule = torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * math.ceil(rows / BATCH)
    fading = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    one_each = bool((targets.sum(1) == 1).all())
    for epoch in range(epochs):
        losses = []
        for batch in shuffled(rows, where):
            with torch.autocast(where.type, dtype=torch.bfloat16, enabled=where.type == "cuda"):
                seen = moved(look(batch)).contiguous(memory_format=torch.channels_last)
                said = head(resnet.trunk(seen))
            loss = loss_of(said.float(), targets[batch], one_each=one_each)
            rule.zero_grad()
            loss.backward()
            rule.step()
            fading.step()
            losses.append(loss.detach())
        print(f"epoch {epoch + 1} of {epochs}: loss {torch.stack(losses).mean().item():.4f}", flush=True)


def loss_of(said: Tensor, targets: Tensor, *, one_each: bool) -> Tensor:
    """Of one class each the cross entropy; of several words that of a share each, which no word that is rare is lost in."""
    shares = targets if one_each else targets / targets.sum(1, keepdim=True)
    return functional.cross_entropy(said, shares)


def shuffled(rows: int, where: torch.device) -> Iterator[Tensor]:
    yield from torch.randperm(rows, device=where).split(BATCH)


def moved(pictures: Tensor) -> Tensor:
    """Pictures (rows, 3, height, width), shifted by up to an eighth, all of a batch alike, and mirrored or not, each."""
    reach = pictures.shape[-1] // 8
    down, along = torch.randint(-reach, reach + 1, (2,)).tolist()
    mirrored = torch.rand(len(pictures), 1, 1, 1, device=pictures.device) < 0.5
    shifted = torch.roll(pictures, (down, along), (2, 3))
    return torch.where(mirrored, shifted.flip(3), shifted)


if __name__ == "__main__":
    main()
