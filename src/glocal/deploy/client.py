"""A deployed client: the simulator's functions on its own data, its private state on its disk."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from glocal.algorithms.adapt_only import AdaptReceived
from glocal.algorithms.contract import Algorithm, Message
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError, describe_error
from glocal.core.files import Json, append_rows
from glocal.core.sampling import Plan, client_key
from glocal.core.store import GroupState, PerClient
from glocal.core.trees import Params
from glocal.core.values import Values, num_rows
from glocal.datasets.federated import FederatedData
from glocal.deploy.flower.protocol import ClientResult, DataError, Instructions
from glocal.deploy.private_state import NO_ROUND, PrivateState, PrivateStateFile
from glocal.deploy.project import Project
from glocal.deploy.settings import ClientSettings
from glocal.deploy.setup import TrainingSetup
from glocal.engines import ClientTask
from glocal.engines.looped import LoopedEngine
from glocal.evaluate import Evaluator, local_figures
from glocal.federate.outputs import has_class_targets, validate_task_data
from glocal.federate.preparation import prepare_algorithm, prepare_data
from glocal.federate.rounds import Reply, client_order, client_step
from glocal.personalize.onboarding import JoinPlan, TrainedFederation, join
from glocal.studies.run import slug
from glocal.wire import WireError, require_finite, split_private, unpack

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
            is_ours = isinstance(error, InputError | WireError)
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

    def data(self) -> FederatedData:
        """The client's own examples; data that cannot be trained on are refused."""
        return self._data

    @cached_property
    def _data(self) -> FederatedData:
        try:
            task = self.setup.task
            data = prepare_data(self.project.client_data(self.settings.number), task)
            validate_task_data(task, data)
        except InputError as error:
            raise DataError(str(error)) from error
        return data

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm as it runs on this client's data, some of which may not count."""
        return prepare_algorithm(self.setup.algorithm, [self.data()])

    @cached_property
    def _engine(self) -> LoopedEngine[Reply]:
        return LoopedEngine(client_step(self.algorithm, self.setup.wire))

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.algorithm, engine="looped")

    @cached_property
    def _plan(self) -> Plan:
        return self.project.plan

    @property
    def weight(self) -> int:
        """Its weight in the aggregate: its number of examples, or 1 where all weigh the same."""
        return 1 if self.setup.equal_weights else int(self.data().train.sizes[0])

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
            "weight": self.weight,
        }
        self._write_journal("introduced itself to the server", instructions, identity)
        return identity

    @journal_failures
    def train(self, message: bytes, instructions: Instructions) -> ClientResult:
        """One client step; the private state is on disk before the result is sent.

        The simulator leaves out a client whose upload or loss is not finite: here it sends nothing,
        and its private state stays as it was.
        """
        received, file = self._read(message), self.private(instructions.run)
        private, odd = file.starting_state(instructions)
        reply = self._step(received, private, instructions.round_index)
        _require_finite(reply)
        before, after = instructions.last_included, instructions.round_index
        file.save(PrivateState(private, before, reply.private, after, received))
        metrics: Json = {}
        if self.settings.share_metrics:
            for name, (total, weight) in reply.metrics.items():
                metrics[name] = [float(total), float(weight)]
        note = {"note": odd} if odd else {}
        sent = {
            "bytes": trees.nbytes(reply.payload),
            "tensors": [*reply.payload],
            "num_examples": self.weight,
            "metrics": metrics,
            **note,
        }
        self._write_journal("trained and sent its update", instructions, sent)
        return ClientResult(reply.payload, self.weight, {**metrics, **note})

    def _step(self, message: Message, private: Params, round_index: int) -> Reply:
        """What the simulator's `assign` and an engine do, for this client alone."""
        plan, train, number = self._plan, self.data().train, self.settings.number
        epochs = self.algorithm.num_epochs(plan.local_epochs)
        order = client_order(plan, epochs, train, 0, round_index, number=number)
        task = ClientTask(message, private, order, client_key(plan, round_index, number))
        outcome = self._engine([task], train.examples, round_index)
        assert outcome.rows is not None
        return outcome.rows[0]

    @journal_failures
    def adapt(self, message: bytes, instructions: Instructions) -> ClientResult:
        """What `join` does for a new client: fit the private part alone, and upload nothing."""
        received, number, setup = self._read(message), self.settings.number, self.setup
        state = GroupState(received, PerClient(setup.private))
        algorithm = AdaptReceived.to(self.algorithm)
        federation = TrainedFederation(algorithm, self._plan, state, number, setup.codec)
        join_plan = JoinPlan(epochs=instructions.adapt_epochs)
        train = self.data().train.of(0)
        joined = join(federation, train, join_plan=join_plan, engine="looped")
        private = joined.state.private.of(number)
        file = self.private(instructions.run)
        file.save(PrivateState(private, NO_ROUND, private, NO_ROUND, received))
        self._write_journal("adapted its private part and sent nothing", instructions, {})
        return ClientResult(None, 0, {})

    @journal_failures
    def evaluate(self, message: bytes, instructions: Instructions) -> ClientResult:
        """Evaluate its own model; save the valid private state and the message."""
        received, file = self._read(message), self.private(instructions.run)
        private, odd = file.starting_state(instructions)
        last = instructions.last_included
        file.save(PrivateState(private, last, private, last, received))
        metrics = self._shared_figures(received, private) if self.settings.share_metrics else {}
        note = {"note": odd} if odd else {}
        self._write_journal("evaluated its model", instructions, {"metrics": metrics, **note})
        return ClientResult(None, 0, {**metrics, **note})

    def _shared_figures(self, message: Message, private: Params) -> Json:
        """Each of the task's metrics on validation and test data, and the sizes of all three parts.

        A metric that is undefined for these examples is left out.
        """
        data, model = self.data(), GroupState(message, PerClient(private))
        figures: Json = {}
        for part, examples in (("validation", data.val), ("test", data.test)):
            own = self.figures(model, examples)
            figures[part] = {name: value for name, value in own.items() if value is not None}
        figures["train_size"] = int(data.train.sizes[0])
        figures["validation_size"] = int(data.val.sizes[0])
        figures["test_size"] = int(data.test.sizes[0])
        return figures

    def figures(self, model: GroupState, data: ClientData) -> dict[str, float | None]:
        """Each of the task's metrics of its own model on data of its own; None where undefined."""
        [by_name] = local_figures(self._evaluator, [model], [data])
        figures: dict[str, float | None] = {}
        for name, each in by_name.items():
            value = float(each.by_client[0])
            figures[name] = value if np.isfinite(value) else None
        return figures

    def own_model(self, run: str) -> GroupState:
        """Its own model after the last round it has seen of a run: a message and private state."""
        state = self.private(run).load()
        if state is None or trees.numel(state.message) + trees.numel(state.after) == 0:
            raise InputError(
                f"predict: this client has taken part in no round of '{run}' yet; "
                "wait for one, or give another --run"
            )
        return GroupState(state.message, PerClient(state.after))

    def predict(self, run: str, inputs: Values) -> Tensor:
        """What its own model predicts for inputs (rows, ...).

        These are classes (rows,) where it learns classes, and else its outputs.
        """
        model, algorithm = self.own_model(run), self.setup.algorithm
        own, _ = split_private(model.private.initial)
        with torch.no_grad():
            every_row = torch.ones(num_rows(inputs), dtype=torch.bool)
            outputs = algorithm.predict(algorithm.personal(model.shared, own), inputs, every_row)
        return outputs.argmax(1) if has_class_targets(algorithm.task) else outputs

    def measure(self, run: str, examples: Examples) -> dict[str, float | None]:
        """Each of the task's metrics of its own model on any examples."""
        rows = np.arange(examples.num_rows, dtype=np.int64)
        return self.figures(self.own_model(run), ClientData(examples, (rows,)))

    def _read(self, message: bytes) -> Message:
        """What the server sends, if it fits this client's own model.

        Its tensors are copied: where they lie in memory changes how sums of products round.
        """
        try:
            received = unpack(message, self.setup.wire.download)
        except WireError as error:
            raise InputError(
                f"client {self.settings.number}: the server's message does not fit its model "
                f"({error})"
            ) from error
        return {name: tensor.clone() for name, tensor in received.items()}

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


def _require_finite(reply: Reply) -> None:
    """Refuse to send what the server would leave out."""
    require_finite(reply.payload)
    for name, (total, weight) in reply.metrics.items():
        if not bool(torch.isfinite(total) & torch.isfinite(weight)):
            raise WireError(f"wire: its {name} is not finite")
