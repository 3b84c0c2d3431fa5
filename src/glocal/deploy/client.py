"""One device: the simulator's functions, called on its own data, with its private state on its own disk."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from glocal.core import trees
from glocal.core.errors import InputError, describe_error
from glocal.core.files import Json, append_rows
from glocal.core.modules import predictor
from glocal.core.sampling import client_key
from glocal.core.store import PrivateStates, State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData, validate_data
from glocal.deploy.flower.protocol import ClientResult, DataError, Instructions
from glocal.deploy.private_state import NO_ROUND, PrivateState, PrivateStateFile
from glocal.deploy.project import Project, TrainingSetup
from glocal.deploy.settings import ClientSettings
from glocal.engines import ClientTask
from glocal.engines.looped import LoopedEngine
from glocal.evaluate import Evaluator, local_test
from glocal.federate.fitting import num_classes
from glocal.federate.rounds import rows_for_round
from glocal.personalize.onboarding import JoinPlan, TrainedFederation, join
from glocal.studies.run import slug
from glocal.wire import Upload, UploadError

STATE, JOURNAL = "state", "journal.jsonl"
P = ParamSpec("P")
R = TypeVar("R")


def journal_failures(
    work: Callable[Concatenate["RunClient", P], R],
) -> Callable[Concatenate["RunClient", P], R]:
    """The same, and the owner reads in the journal why it could not be done; the server may be told less."""

    @wraps(work)
    def noted(member: "RunClient", /, *given: P.args, **more: P.kwargs) -> R:
        try:
            return work(member, *given, **more)
        except Exception as error:
            order = next(value for value in given if isinstance(value, Instructions))
            why = (
                str(error) if isinstance(error, InputError | UploadError) else describe_error(error)
            )
            member._write_journal("could not do what it was asked", order, {"reason": why})
            raise

    return noted


@dataclass(frozen=True)
class RunClient:
    """A device of a deployed federation, as its folder describes it."""

    project: Project
    settings: ClientSettings
    on_entry: Callable[[Json], None] = lambda row: None  # who is shown every line of the journal

    @classmethod
    def from_folder(
        cls, folder: Path, *, on_entry: Callable[[Json], None] = lambda row: None
    ) -> "RunClient":
        """The device of a folder."""
        project = Project.from_folder(folder)
        return cls(project, project.client_settings(), on_entry)

    @property
    def setup(self) -> TrainingSetup:
        """Algorithm and model; the owner's own code makes it, and may read data while it is imported."""
        try:
            return self.project.setup
        except InputError as error:
            raise DataError(str(error)) from error

    @property
    def secure_aggregation(self) -> bool:
        """Whether its uploads leave it only masked."""
        return self.project.deployment.secure_aggregation

    @property
    def equal_weights(self) -> bool:
        """Whether it counts as much as every other, and need not say how many examples it has."""
        return self.project.study.plan.weighting == "equal"

    @property
    def shared_names(self) -> list[str]:
        """The names of what is shared, in their order."""
        return [*self.setup.algorithm.init(self.setup.params)[0]]

    def data(self) -> FederatedData:
        """Its own examples; what cannot be trained on is refused."""
        return self._data

    @cached_property
    def _data(self) -> FederatedData:
        try:
            data = self.project.client_data(self.settings.number)
            validate_data(data, num_classes(self.setup.model, data))
        except InputError as error:
            raise DataError(str(error)) from error
        return data

    def private(self, run: str) -> PrivateStateFile:
        """Its private state in a run; a name that would lead out of the folder is refused."""
        if slug(run) != run:
            raise InputError(f"device {self.settings.number}: '{run}' is no plain name of a run")
        return PrivateStateFile(
            self.project.folder / STATE / f"{run}.safetensors", self.setup, self.settings.number
        )

    @journal_failures
    def handshake(self, order: Instructions) -> Json:
        """Who it is; a private state that is not its own, and data that do not fit, are refused here already."""
        self.private(order.run).load()
        told = {
            "client": self.settings.number,
            "fingerprint": self.setup.fingerprint,
            "weight": self.weight(self.data()),
        }
        self._write_journal("greeted the server", order, told)
        return told

    @journal_failures
    def train(self, shared: Params, order: Instructions) -> ClientResult:
        """One round, by the algorithm's own `client_update`; private state is on disk before anything is sent."""
        shared, file = self._check_shared(shared), self.private(order.run)
        private, odd = file.starting_state(order)
        data, plan, number = self.data(), self.project.plan, self.settings.number
        order_of_rows = rows_for_round(plan, data.train, order.round_index, 0, number=number)
        task = ClientTask(
            shared, private, order_of_rows, client_key(plan, order.round_index, number)
        )
        outcome = LoopedEngine(self.setup.algorithm.client_update)(
            [task], data.train.examples, order.round_index
        )
        assert outcome.rows is not None
        update = outcome.rows[0]
        upload = Upload(update.upload, shared)
        file.save(
            PrivateState(private, order.last_included, update.private, order.round_index, shared)
        )
        metrics = self._shareable({"loss": float(update.loss)})
        note = {"note": odd} if odd else {}
        told = {
            "bytes": upload.nbytes,
            "tensors": [*upload.tensors],
            "num_examples": self.weight(data),
            "metrics": metrics,
            **note,
        }
        self._write_journal("trained and sent its shared part", order, told)
        return ClientResult(upload, self.weight(data), {**metrics, **note})

    def weight(self, data: FederatedData) -> int:
        """How much it counts in the average."""
        return 1 if self.equal_weights else int(data.train.sizes[0])

    @journal_failures
    def adapt(self, shared: Params, order: Instructions) -> ClientResult:
        """What `join` does for a newcomer: the private part is learnt against the shared one as it is, and nothing is sent."""
        shared, data, number = self._check_shared(shared), self.data().train, self.settings.number
        initial = self.setup.algorithm.init(self.setup.params)[1]
        trained_federation = TrainedFederation(
            self.setup.algorithm,
            self.setup.model,
            self.project.plan,
            State(shared, PrivateStates(initial, {})),
            number,
        )
        joined = join(
            trained_federation,
            data.of(0),
            join_plan=JoinPlan(epochs=order.adapt_epochs),
            engine="looped",
        )
        private = joined.state.private.of(number)
        self.private(order.run).save(PrivateState(private, NO_ROUND, private, NO_ROUND, shared))
        self._write_journal("learnt its private part, and sent nothing", order, {})
        return ClientResult(None, 0, {})

    @journal_failures
    def evaluate(self, shared: Params, order: Instructions) -> ClientResult:
        """Its own model on its own data; what counts of its private state is settled, and the shared part kept to predict with."""
        shared, file = self._check_shared(shared), self.private(order.run)
        private, odd = file.starting_state(order)
        file.save(PrivateState(private, order.last_included, private, order.last_included, shared))
        metrics = (
            self._shareable(self.accuracies(shared, private)) if self.settings.share_metrics else {}
        )
        note = {"note": odd} if odd else {}
        self._write_journal("tested its model", order, {"metrics": metrics, **note})
        return ClientResult(None, 0, {**metrics, **note})

    def accuracies(self, shared: Params, private: Params) -> Json:
        """Accuracy on its validation and test data, and how many examples these are."""
        data, state = self.data(), State(shared, PrivateStates(private, {}))
        evaluation = Evaluator(self.setup.algorithm, predictor(self.setup.model), engine="looped")
        found = {
            part: float(local_test(evaluation, state, held)[0])
            for part, held in (("validation", data.val), ("test", data.test))
        }
        sizes = {
            "train_size": data.train.sizes,
            "validation_size": data.val.sizes,
            "test_size": data.test.sizes,
        }
        known = {part: accuracy for part, accuracy in found.items() if not np.isnan(accuracy)}
        return {**known, **{name: int(size[0]) for name, size in sizes.items()}}

    def personal_params(self, run: str) -> Params:
        """What it predicts with after what it has seen of a run."""
        kept = self.private(run).load()
        if kept is None or trees.numel(kept.shared) + trees.numel(kept.after) == 0:
            raise InputError(
                f"predict: this device has taken part in no round of '{run}' yet; wait for one, or give another --run"
            )
        return self.setup.algorithm.personal(kept.shared, kept.after)

    def _check_shared(self, shared: Params) -> Params:
        """What the server sent, if it is the shared part of this device's own model."""
        expected = self.setup.algorithm.init(self.setup.params)[0]
        try:
            received = Upload(shared, expected).tensors
        except UploadError as error:
            raise InputError(
                f"device {self.settings.number}: the server's shared part does not fit its model ({error})"
            ) from error
        return {name: received[name] for name in expected}

    def _shareable(self, metrics: Json) -> Json:
        """Figures leave the device only if its owner has said so."""
        return metrics if self.settings.share_metrics else {}

    def _write_journal(self, what: str, order: Instructions, told: Json) -> None:
        """One line in the owner's journal for everything that was done, with all that left the device."""
        away = {"missed_rounds": order.missed_rounds} if order.missed_rounds else {}
        row = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "run": order.run,
            "round": order.round_index,
            "what": what,
            **told,
            **away,
        }
        append_rows(self.project.folder / JOURNAL, [row])
        self.on_entry(row)


def predict_classes(member: RunClient, run: str, inputs: torch.Tensor) -> list[int]:
    """The classes that the device's own model gives to inputs (rows, ...)."""
    with torch.no_grad():
        outputs = predictor(member.setup.model)(
            member.personal_params(run), inputs, torch.ones(len(inputs), dtype=torch.bool)
        )
    classes: list[int] = outputs.argmax(-1).tolist()
    return classes
