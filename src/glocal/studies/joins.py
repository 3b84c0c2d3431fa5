"""Every way to take a new device into a saved federation, by how many labelled examples it has; kept in a folder of its own."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from glocal.core.data import Examples, Holdings
from glocal.core.errors import InputError
from glocal.core.files import Json, write_json, write_tensors, write_text
from glocal.core.sampling import stream
from glocal.core.trees import nbytes
from glocal.personalize.onboarding import (
    Joined,
    Welcome,
    alone,
    borrowed_accuracy,
    borrowed_classes,
    few,
    join,
    joined_accuracy,
    members,
)
from glocal.studies.newcomer import Newcomer
from glocal.studies.saved import Saved

WAYS = ("everyone", "confident", "nearest")
LABELS = (0, 1, 5, 10, 50, None)


@dataclass(frozen=True)
class Joining:
    """What is tried: numbers of labels (None: all), members of a small ensemble, inputs they are judged by, and the welcome."""

    labels: tuple[int | None, ...] = LABELS
    members: int = 10
    sample: int = 50
    welcome: Welcome = Welcome()

    def __post_init__(self) -> None:
        if self.members < 1 or self.sample < 1:
            raise InputError(f"join: members is {self.members} and sample {self.sample}; both must be at least 1")


class Trial:
    """One newcomer at one host, with the host's data for those that are asked as guests."""

    def __init__(self, saved: Saved, newcomer: Newcomer, joining: Joining) -> None:
        device = saved.options.computing_device()
        self.host, self.how, self.engine = saved.host, joining, saved.options.how()
        self.train, self.test = newcomer.train.to(device), newcomer.test.to(device)
        self.unlabelled = newcomer.unlabelled.to(device)
        train = saved.federation.train
        self.old = Holdings(train.examples.to(device), train.rows)
        self.joined: dict[str, Joined] = {}

    def rows(self) -> Iterator[Json]:
        """One row per way and number of labels, as they are measured."""
        if 0 in self.how.labels or not len(self.train.y):
            yield from self._borrowed()
        for labels in self._numbers():
            some = few(self.train, labels, seed=self.host.plan.seed)
            if len(some.y):
                yield from self._learnt(some, every=len(some.y) == len(self.train.y))

    def left_out(self) -> list[int]:
        """Numbers of labels that were asked for and that the device does not have."""
        return sorted({labels for labels in self.how.labels if labels is not None and labels > len(self.train.y)})

    def _numbers(self) -> list[int | None]:
        """The numbers of labels that there are examples for, in ascending order; all of them once."""
        size = len(self.train.y)
        known = sorted({labels for labels in self.how.labels if labels is not None and 0 < labels < size})
        return [*known, None] if size and (None in self.how.labels or size in self.how.labels) else [*known]

    def _borrowed(self) -> Iterator[Json]:
        """Nothing is trained: models of others, all of them or some that fit a sample of inputs."""
        order = stream(self.host.plan.seed, "sample").permutation(len(self.unlabelled))[: self.how.sample]
        sample = self.unlabelled[torch.from_numpy(order).to(self.unlabelled.device)]
        for way in WAYS:
            chosen = members(self.host, sample, by=way, count=self.how.members)
            accuracy = borrowed_accuracy(self.host, chosen, self.test) if len(self.test.y) else None
            yield {"way": way, "labels": 0, "accuracy": accuracy, "members": chosen, "bytes": self._bytes_of_all()}

    def _bytes_of_all(self) -> int:
        """What it takes to have the shared part and every trained device's local part once: some are judged by what all say."""
        state = self.host.state
        return nbytes(state.shared) + len(state.private.trained) * nbytes(state.private.initial)

    def _learnt(self, some: Examples, *, every: bool) -> Iterator[Json]:
        """The local part alone, the same network without a federation, and with all labels also in the rounds."""
        host, welcome, labels = self.host, self.how.welcome, len(some.y)
        if host.algorithm.settle is not None:
            only = Welcome(welcome.epochs, start=welcome.start)
            yield self._row("local part", labels, self._kept("local part", join(host, some, welcome=only, engine=self.engine)))
        yield self._row("alone", labels, alone(host, some, epochs=welcome.epochs, engine=self.engine))
        if every and welcome.rounds:
            met = join(host, some, old=self.old, welcome=welcome, engine=self.engine)
            yield self._row("in the rounds", labels, self._kept("in the rounds", met))

    def _kept(self, way: str, joined: Joined) -> Joined:
        self.joined[way] = joined
        return joined

    def _row(self, way: str, labels: int, joined: Joined) -> Json:
        accuracy = joined_accuracy(self.host, joined, self.test) if len(self.test.y) else None
        sent = 0 if way == "alone" else joined.ledger.total.bytes
        return {"way": way, "labels": labels, "accuracy": accuracy, "bytes": sent}

    def keep(self, folder: Path, rows: list[Json], about: Json) -> None:
        """Figures, and the newcomer's model by each way, as last learnt; predictions for a newcomer without any label."""
        for way, joined in self.joined.items():
            write_tensors(folder / f"{way.replace(' ', '-')}.safetensors", joined.state_dict(self.host), {"way": way})
        if "in the rounds" in self.joined:
            write_tensors(folder / "shared.safetensors", self.joined["in the rounds"].state.shared, {"after": "in the rounds"})
        if not len(self.train.y):
            guesses = borrowed_classes(self.host, members(self.host, self.unlabelled), self.unlabelled)
            write_text(folder / "predictions.csv", "row,class\n" + "".join(f"{row},{guess}\n" for row, guess in enumerate(guesses)))
        classes = sorted({*self.train.y.tolist()})
        told = {"examples": len(self.train.y), "tested on": len(self.test.y), "classes": classes, "device": self.host.devices}
        write_json(folder / "join.json", {**about, "newcomer": told, "settings": asdict(self.how), "rows": rows})
