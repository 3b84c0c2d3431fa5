"""Every way to take a new device into a saved federation, by how many labelled examples it has; kept in a folder of its own."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError
from glocal.core.files import Json, write_json, write_tensors, write_text
from glocal.core.sampling import make_rng
from glocal.core.trees import nbytes
from glocal.personalize.onboarding import (
    JoinPlan,
    JoinResult,
    join,
    new_client_accuracy,
    new_client_ensemble_accuracy,
    new_client_ensemble_classes,
    sample_labeled,
    select_ensemble,
    train_alone,
)
from glocal.studies.new_client import NewClient
from glocal.studies.saved_experiment import SavedExperiment

ENSEMBLES = ("everyone", "confident", "nearest")
LABEL_COUNTS = (0, 1, 5, 10, 50, None)


@dataclass(frozen=True)
class JoinTrialSettings:
    """What is tried: numbers of labels (None: all), members of a small ensemble, inputs they are judged by, and the welcome."""

    labels: tuple[int | None, ...] = LABEL_COUNTS
    ensemble_size: int = 10
    sample_size: int = 50
    join_plan: JoinPlan = JoinPlan()

    def __post_init__(self) -> None:
        if self.ensemble_size < 1 or self.sample_size < 1:
            raise InputError(
                f"join: members is {self.ensemble_size} and sample {self.sample_size}; both must be at least 1"
            )


class JoinTrial:
    """One newcomer at one host, with the host's data for those that are asked as guests."""

    def __init__(
        self, saved: SavedExperiment, new_client: NewClient, joining: JoinTrialSettings
    ) -> None:
        device = saved.options.torch_device()
        self.trained_federation, self.config, self.engine = (
            saved.trained_federation,
            joining,
            saved.options.engine_config(),
        )
        self.train, self.test = new_client.train.to(device), new_client.test.to(device)
        self.unlabeled = new_client.unlabeled.to(device)
        train = saved.federation.train
        self.existing_data = ClientData(train.examples.to(device), train.rows)
        self.joined: dict[str, JoinResult] = {}

    def rows(self) -> Iterator[Json]:
        """One row per way and number of labels, as they are measured."""
        if 0 in self.config.labels or not len(self.train.y):
            yield from self._ensemble_rows()
        for labels in self._label_counts():
            some = sample_labeled(self.train, labels, seed=self.trained_federation.plan.seed)
            if len(some.y):
                yield from self._training_rows(some, every=len(some.y) == len(self.train.y))

    def missing_label_counts(self) -> list[int]:
        """Numbers of labels that were asked for and that the device does not have."""
        return sorted(
            {
                labels
                for labels in self.config.labels
                if labels is not None and labels > len(self.train.y)
            }
        )

    def _label_counts(self) -> list[int | None]:
        """The numbers of labels that there are examples for, in ascending order; all of them once."""
        size = len(self.train.y)
        known = sorted(
            {labels for labels in self.config.labels if labels is not None and 0 < labels < size}
        )
        return (
            [*known, None]
            if size and (None in self.config.labels or size in self.config.labels)
            else [*known]
        )

    def _ensemble_rows(self) -> Iterator[Json]:
        """Nothing is trained: models of others, all of them or some that fit a sample of inputs."""
        order = make_rng(self.trained_federation.plan.seed, "sample").permutation(
            len(self.unlabeled)
        )[: self.config.sample_size]
        sample = self.unlabeled[torch.from_numpy(order).to(self.unlabeled.device)]
        for way in ENSEMBLES:
            chosen = select_ensemble(
                self.trained_federation, sample, by=way, count=self.config.ensemble_size
            )
            accuracy = (
                new_client_ensemble_accuracy(self.trained_federation, chosen, self.test)
                if len(self.test.y)
                else None
            )
            yield {
                "method": way,
                "labels": 0,
                "accuracy": accuracy,
                "members": chosen,
                "bytes": self._ensemble_bytes(),
            }

    def _ensemble_bytes(self) -> int:
        """What it takes to have the shared part and every trained device's local part once: some are judged by what all say."""
        state = self.trained_federation.state
        return nbytes(state.shared) + len(state.private.trained) * nbytes(state.private.initial)

    def _training_rows(self, some: Examples, *, every: bool) -> Iterator[Json]:
        """The local part alone, the same network without a federation, and with all labels also in the rounds."""
        trained_federation, join_plan, labels = (
            self.trained_federation,
            self.config.join_plan,
            len(some.y),
        )
        if trained_federation.algorithm.adapt is not None:
            only = JoinPlan(join_plan.epochs, start=join_plan.start)
            yield self._row(
                "local part",
                labels,
                self._remember(
                    "local part", join(trained_federation, some, join_plan=only, engine=self.engine)
                ),
            )
        yield self._row(
            "alone",
            labels,
            train_alone(trained_federation, some, epochs=join_plan.epochs, engine=self.engine),
        )
        if every and join_plan.rounds:
            met = join(
                trained_federation,
                some,
                existing_data=self.existing_data,
                join_plan=join_plan,
                engine=self.engine,
            )
            yield self._row("in the rounds", labels, self._remember("in the rounds", met))

    def _remember(self, way: str, joined: JoinResult) -> JoinResult:
        self.joined[way] = joined
        return joined

    def _row(self, way: str, labels: int, joined: JoinResult) -> Json:
        accuracy = (
            new_client_accuracy(self.trained_federation, joined, self.test)
            if len(self.test.y)
            else None
        )
        sent = 0 if way == "alone" else joined.ledger.total.bytes
        return {"method": way, "labels": labels, "accuracy": accuracy, "bytes": sent}

    def save(self, folder: Path, rows: list[Json], about: Json) -> None:
        """Figures, and the newcomer's model by each way, as last learnt; predictions for a newcomer without any label."""
        for way, joined in self.joined.items():
            write_tensors(
                folder / f"{way.replace(' ', '-')}.safetensors",
                joined.state_dict(self.trained_federation),
                {"method": way},
            )
        if "in the rounds" in self.joined:
            write_tensors(
                folder / "shared.safetensors",
                self.joined["in the rounds"].state.shared,
                {"after": "in the rounds"},
            )
        if not len(self.train.y):
            guesses = new_client_ensemble_classes(
                self.trained_federation,
                select_ensemble(self.trained_federation, self.unlabeled),
                self.unlabeled,
            )
            write_text(
                folder / "predictions.csv",
                "row,class\n" + "".join(f"{row},{guess}\n" for row, guess in enumerate(guesses)),
            )
        classes = sorted({*self.train.y.tolist()})
        told = {
            "examples": len(self.train.y),
            "test_examples": len(self.test.y),
            "classes": classes,
            "client": self.trained_federation.clients,
        }
        write_json(
            folder / "join.json",
            {**about, "new_client": told, "settings": asdict(self.config), "rows": rows},
        )
