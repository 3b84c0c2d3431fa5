"""A deployed client: the simulator's functions on its own data, its private state on its disk."""

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
from glocal.core.sampling import client_key
from glocal.core.store import PrivateStates, State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.deploy.flower.protocol import ClientResult, DataError, Instructions
from glocal.deploy.private_state import NO_ROUND, PrivateState, PrivateStateFile
from glocal.deploy.project import Project, TrainingSetup
from glocal.deploy.settings import ClientSettings
from glocal.engines import ClientTask
from glocal.engines.looped import LoopedEngine
from glocal.evaluate import Evaluator, local_test
from glocal.federate.outputs import validate_task_data
from glocal.federate.rounds import rows_for_round
from glocal.personalize.onboarding import JoinPlan, TrainedFederation, join
from glocal.studies.run import slug
from glocal.wire import Upload, UploadError

STATE, JOURNAL = "state", "journal.jsonl"
P = ParamSpec("P")
R = TypeVar("R")


def journal_failures(
    method: Callable[Concatenate["RunClient", P], R],
) -> Callable[Concatenate["RunClient", P], R]:
    """The same method; a failure's full reason goes to the owner's journal, then it is raised."""

    @wraps(method)
    def journaled(client: "RunClient", /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(client, *args, **kwargs)
        except Exception as error:
            instructions = next(value for value in args if isinstance(value, Instructions))
            is_ours = isinstance(error, InputError | UploadError)
            reason = str(error) if is_ours else describe_error(error)
            client._write_journal("could not do the task", instructions, {"reason": reason})
            raise

    return journaled


def _ignore_entry(entry: Json) -> None:
    pass


@dataclass(frozen=True)
class RunClient:
    """A client of a deployed federation, as its folder describes it.

    `on_entry` gets every entry of the journal.
    """

    project: Project
    settings: ClientSettings
    on_entry: Callable[[Json], None] = _ignore_entry

    @classmethod
    def from_folder(
        cls, folder: Path, *, on_entry: Callable[[Json], None] = _ignore_entry
    ) -> "RunClient":
        """The client of a folder."""
        project = Project.from_folder(folder)
        return cls(project, project.client_settings(), on_entry)

    @property
    def setup(self) -> TrainingSetup:
        """Algorithm and model; an error may quote data, which the owner's module may have read."""
        try:
            return self.project.setup
        except InputError as error:
            raise DataError(str(error)) from error

    @property
    def secure_aggregation(self) -> bool:
        """Whether uploads leave the client only masked."""
        return self.project.deployment.secure_aggregation

    @property
    def equal_weights(self) -> bool:
        """Whether all clients weigh the same, so that none reports its number of examples."""
        return self.project.study.plan.weighting == "equal"

    @property
    def shared_names(self) -> list[str]:
        """The names of the shared tensors, in order."""
        return [*self.setup.algorithm.init(self.setup.params)[0]]

    def data(self) -> FederatedData:
        """The client's own examples; data that cannot be trained on are refused."""
        return self._data

    @cached_property
    def _data(self) -> FederatedData:
        try:
            data = self.project.client_data(self.settings.number)
            validate_task_data(self.setup.task, data)
        except InputError as error:
            raise DataError(str(error)) from error
        return data

    def private(self, run: str) -> PrivateStateFile:
        """The file of its private state in a run; a run name with a path in it is refused."""
        if slug(run) != run:
            raise InputError(f"client {self.settings.number}: '{run}' is not a valid run name")
        path = self.project.folder / STATE / f"{run}.safetensors"
        return PrivateStateFile(path, self.setup, self.settings.number)

    @journal_failures
    def handshake(self, instructions: Instructions) -> Json:
        """Its identity and weight; unusable data and another client's state are refused here."""
        self.private(instructions.run).load()
        identity = {
            "client": self.settings.number,
            "fingerprint": self.setup.fingerprint,
            "weight": self.weight(self.data()),
        }
        self._write_journal("introduced itself to the server", instructions, identity)
        return identity

    @journal_failures
    def train(self, shared: Params, instructions: Instructions) -> ClientResult:
        """One round of `client_update`; the private state is on disk before the result is sent."""
        shared, file = self._check_shared(shared), self.private(instructions.run)
        private, odd = file.starting_state(instructions)
        data, plan, number = self.data(), self.project.plan, self.settings.number
        round_index = instructions.round_index
        row_order = rows_for_round(plan, data.train, round_index, 0, number=number)
        task = ClientTask(shared, private, row_order, client_key(plan, round_index, number))
        engine = LoopedEngine(self.setup.algorithm.client_update)
        outcome = engine([task], data.train.examples, round_index)
        assert outcome.rows is not None
        update = outcome.rows[0]
        upload = Upload(update.upload, shared)
        before_round = instructions.last_included
        file.save(PrivateState(private, before_round, update.private, round_index, shared))
        metrics = self._shareable({"loss": float(update.loss)})
        note = {"note": odd} if odd else {}
        sent = {
            "bytes": upload.nbytes,
            "tensors": [*upload.tensors],
            "num_examples": self.weight(data),
            "metrics": metrics,
            **note,
        }
        self._write_journal("trained and sent its shared part", instructions, sent)
        return ClientResult(upload, self.weight(data), {**metrics, **note})

    def weight(self, data: FederatedData) -> int:
        """Its weight in the average."""
        return 1 if self.equal_weights else int(data.train.sizes[0])

    @journal_failures
    def adapt(self, shared: Params, instructions: Instructions) -> ClientResult:
        """What `join` does for a new client: fit the private part alone, and upload nothing."""
        shared, data, number = self._check_shared(shared), self.data().train, self.settings.number
        initial = self.setup.algorithm.init(self.setup.params)[1]
        state = State(shared, PrivateStates(initial, {}))
        federation = TrainedFederation(
            self.setup.algorithm, self.setup.task, self.project.plan, state, number
        )
        join_plan = JoinPlan(epochs=instructions.adapt_epochs)
        joined = join(federation, data.of(0), join_plan=join_plan, engine="looped")
        private = joined.state.private.of(number)
        file = self.private(instructions.run)
        file.save(PrivateState(private, NO_ROUND, private, NO_ROUND, shared))
        self._write_journal("adapted its private part and sent nothing", instructions, {})
        return ClientResult(None, 0, {})

    @journal_failures
    def evaluate(self, shared: Params, instructions: Instructions) -> ClientResult:
        """Evaluate its own model; save the valid private state and the shared part."""
        shared, file = self._check_shared(shared), self.private(instructions.run)
        private, odd = file.starting_state(instructions)
        last = instructions.last_included
        file.save(PrivateState(private, last, private, last, shared))
        metrics = self.accuracies(shared, private) if self.settings.share_metrics else {}
        note = {"note": odd} if odd else {}
        self._write_journal("evaluated its model", instructions, {"metrics": metrics, **note})
        return ClientResult(None, 0, {**metrics, **note})

    def accuracies(self, shared: Params, private: Params) -> Json:
        """Accuracy on its validation and test data, and the sizes of its three parts."""
        data, state = self.data(), State(shared, PrivateStates(private, {}))
        evaluator = Evaluator(self.setup.algorithm, self.setup.task, engine="looped")
        metrics: Json = {}
        for name, examples in (("validation", data.val), ("test", data.test)):
            accuracy = float(local_test(evaluator, state, examples)[0])
            if not np.isnan(accuracy):
                metrics[name] = accuracy
        metrics["train_size"] = int(data.train.sizes[0])
        metrics["validation_size"] = int(data.val.sizes[0])
        metrics["test_size"] = int(data.test.sizes[0])
        return metrics

    def personal_params(self, run: str) -> Params:
        """The parameters of its own model after the last round it has seen of a run."""
        state = self.private(run).load()
        if state is None or trees.numel(state.shared) + trees.numel(state.after) == 0:
            raise InputError(
                f"predict: this client has taken part in no round of '{run}' yet; "
                "wait for one, or give another --run"
            )
        return self.setup.algorithm.personal(state.shared, state.after)

    def _check_shared(self, shared: Params) -> Params:
        """The server's shared part, in the order of this client's own model."""
        expected = self.setup.algorithm.init(self.setup.params)[0]
        try:
            tensors = Upload(shared, expected).tensors
        except UploadError as error:
            raise InputError(
                f"client {self.settings.number}: the server's shared part does not fit its model "
                f"({error})"
            ) from error
        return {name: tensors[name] for name in expected}

    def _shareable(self, metrics: Json) -> Json:
        """Metrics leave the client only if its owner allows it."""
        return metrics if self.settings.share_metrics else {}

    def _write_journal(self, event: str, instructions: Instructions, details: Json) -> None:
        """Append one line to the owner's journal: what was done, and all that left the client."""
        row = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "run": instructions.run,
            "round": instructions.round_index,
            "event": event,
            **details,
        }
        if instructions.missed_rounds:
            row["missed_rounds"] = instructions.missed_rounds
        append_rows(self.project.folder / JOURNAL, [row])
        self.on_entry(row)


def predict_classes(client: RunClient, run: str, inputs: torch.Tensor) -> list[int]:
    """The classes that the client's own model predicts for inputs (rows, ...)."""
    params = client.personal_params(run)
    with torch.no_grad():
        every_row = torch.ones(len(inputs), dtype=torch.bool)
        outputs = client.setup.task.predictor()(params, inputs, every_row)
    classes: list[int] = outputs.argmax(-1).tolist()
    return classes
