"""Every method for a new client to join a saved federation, by number of labelled examples."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch

from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError
from glocal.core.files import FORMAT, Json, write_json, write_tensors, write_text
from glocal.core.sampling import make_rng
from glocal.core.trees import nbytes
from glocal.federate.scoring import personal_parts
from glocal.personalize.class_targets import count_classes, predicts_classes
from glocal.personalize.onboarding import (
    JoinPlan,
    JoinResult,
    has_private_part,
    join,
    new_client_ensemble_classes,
    new_client_ensemble_figure,
    new_client_ensemble_outputs,
    new_client_figure,
    sample_labeled,
    select_ensemble,
    train_alone,
)
from glocal.studies.metric_format import MetricFormat
from glocal.studies.new_client import NewClient
from glocal.studies.saved_experiment import SavedExperiment

ENSEMBLES = ("everyone", "confident", "nearest")
LABEL_COUNTS = (0, 1, 5, 10, 50, None)


@dataclass(frozen=True)
class JoinTrialSettings:
    """What is tried: numbers of labels (None: all), sizes of the ensemble and its sample, a plan.

    The small ensemble has `ensemble_size` members, chosen by their outputs on `sample_size` inputs;
    without classes there is none.
    """

    labels: tuple[int | None, ...] = LABEL_COUNTS
    ensemble_size: int = 10
    sample_size: int = 50
    join_plan: JoinPlan = JoinPlan()

    def __post_init__(self) -> None:
        if self.ensemble_size < 1 or self.sample_size < 1:
            raise InputError(
                f"join: ensemble_size is {self.ensemble_size} and sample_size {self.sample_size}; "
                "both must be at least 1"
            )


class JoinTrial:
    """One new client at one federation, with the data of existing clients that take part."""

    def __init__(
        self, saved: SavedExperiment, new_client: NewClient, joining: JoinTrialSettings
    ) -> None:
        device = saved.options.torch_device()
        self.trained_federation = saved.trained_federation
        self.config = joining
        self.engine = saved.options.engine_config()
        self.train, self.test = new_client.train.to(device), new_client.test.to(device)
        self.unlabeled = new_client.unlabeled.to(device)
        examples = saved.federation.train.examples
        task = self.trained_federation.task
        self.classes = count_classes(task, examples) if predicts_classes(task) else None
        train = saved.federation.train
        self.existing_data = ClientData(train.examples.to(device), train.rows, train.names)
        self.joined: dict[str, JoinResult] = {}

    def rows(self) -> Iterator[Json]:
        """One row per method and number of labels, each as it is measured."""
        if 0 in self.config.labels or not self.train.num_rows:
            yield from self._ensemble_rows()
        for labels in self._label_counts():
            some = sample_labeled(self.train, labels, seed=self.trained_federation.plan.seed)
            if some.num_rows:
                yield from self._training_rows(some, every=some.num_rows == self.train.num_rows)

    def missing_label_counts(self) -> list[int]:
        """Numbers of labels that were asked for, but that the client does not have."""
        return sorted(
            {
                labels
                for labels in self.config.labels
                if labels is not None and labels > self.train.num_rows
            }
        )

    def _label_counts(self) -> list[int | None]:
        """The numbers of labels that there are examples for, ascending; all of them once."""
        size = self.train.num_rows
        counts = {
            labels for labels in self.config.labels if labels is not None and 0 < labels < size
        }
        all_labels = size and (None in self.config.labels or size in self.config.labels)
        return [*sorted(counts), *([None] if all_labels else [])]

    def _ensemble_rows(self) -> Iterator[Json]:
        """No training: an ensemble of all clients, or of some that fit a sample of inputs."""
        order = make_rng(self.trained_federation.plan.seed, "sample").permutation(
            len(self.unlabeled)
        )[: self.config.sample_size]
        sample = self.unlabeled[torch.from_numpy(order).to(self.unlabeled.device)]
        for method in ENSEMBLES if self.classes else ENSEMBLES[:1]:
            chosen = select_ensemble(
                self.trained_federation, sample, by=method, count=self.config.ensemble_size
            )
            figure = None
            if self.test.num_rows:
                figure = new_client_ensemble_figure(self.trained_federation, chosen, self.test)
            yield {
                "method": method,
                "labels": 0,
                "figure": figure,
                "members": chosen,
                "bytes": self._ensemble_bytes(),
            }

    def _ensemble_bytes(self) -> int:
        """The bytes of the shared part and of every trained client's local part, once.

        All are needed even for a small ensemble, because its members are chosen by what all
        predict.
        """
        federation, state = self.trained_federation, self.trained_federation.state
        local, _ = personal_parts(federation.algorithm, state)
        return nbytes(state.shared) + len(state.private.stored) * nbytes(local)

    def _training_rows(self, some: Examples, *, every: bool) -> Iterator[Json]:
        """The local part alone, the same network without a federation, and joining the rounds.

        The latter is tried only with all labels.
        """
        trained_federation, join_plan, labels = (
            self.trained_federation,
            self.config.join_plan,
            some.num_rows,
        )
        if has_private_part(trained_federation.algorithm, trained_federation.state):
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
            joined = join(
                trained_federation,
                some,
                existing_data=self.existing_data,
                join_plan=join_plan,
                engine=self.engine,
            )
            yield self._row("in the rounds", labels, self._remember("in the rounds", joined))

    def _remember(self, method: str, joined: JoinResult) -> JoinResult:
        self.joined[method] = joined
        return joined

    def _row(self, method: str, labels: int, joined: JoinResult) -> Json:
        figure = None
        if self.test.num_rows:
            figure = new_client_figure(self.trained_federation, joined, self.test)
        sent = 0 if method == "alone" else joined.ledger.total.bytes
        return {"method": method, "labels": labels, "figure": figure, "bytes": sent}

    def save(self, folder: Path, rows: list[Json], about: Json) -> None:
        """Write the metrics, and the new client's last model of each method.

        A new client without labels gets predictions.
        """
        for method, joined in self.joined.items():
            write_tensors(
                folder / f"{method.replace(' ', '-')}.safetensors",
                joined.state_dict(self.trained_federation),
                {"method": method},
            )
        if "in the rounds" in self.joined:
            write_tensors(
                folder / "shared.safetensors",
                self.joined["in the rounds"].state.shared,
                {"method": "in the rounds"},
            )
        if not self.train.num_rows:
            write_text(folder / "predictions.csv", self._predictions())
        new_client = {
            "examples": self.train.num_rows,
            "test_examples": self.test.num_rows,
            "classes": sorted({*self.train.y.tolist()}) if self.classes else None,
            "client": self.trained_federation.clients,
        }
        metric = MetricFormat.of(self.trained_federation.task.metric)
        write_json(
            folder / "join.json",
            {
                "format": FORMAT,
                **about,
                "metric": metric._asdict(),
                "new_client": new_client,
                "settings": asdict(self.config),
                "rows": rows,
            },
        )

    def _predictions(self) -> str:
        """What the ensemble of everyone predicts for every input, as CSV: classes, or outputs."""
        members = select_ensemble(self.trained_federation, self.unlabeled)
        question = (self.trained_federation, members, self.unlabeled)
        if self.classes:
            head, columns = "row,class", [new_client_ensemble_classes(*question)]
        else:
            outputs = new_client_ensemble_outputs(*question).flatten(1)
            columns = outputs.T.tolist()
            head = ",".join(["row", *(f"output_{place}" for place in range(len(columns)))])
        lines = [",".join(map(str, row)) for row in zip(count(), *columns, strict=False)]
        return "\n".join([head, *lines, ""])
