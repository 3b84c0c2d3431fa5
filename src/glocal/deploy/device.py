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
from glocal.core.errors import InputError, brief
from glocal.core.files import Json, append_rows
from glocal.core.modules import predictor
from glocal.core.sampling import noise_key
from glocal.core.store import PrivateRows, State
from glocal.core.trees import Params
from glocal.datasets.federated import Federation, check
from glocal.deploy.flower.contract import Answer, DataError, Order
from glocal.deploy.private import NEVER, Kept, PrivateFile
from glocal.deploy.project import Kit, Project
from glocal.deploy.settings import DeviceSettings
from glocal.engines import Task
from glocal.engines.looped import Looped
from glocal.evaluate import Evaluation, local_test
from glocal.federate.fitting import classes_of
from glocal.federate.rounds import visited
from glocal.personalize.onboarding import Host, Welcome, join
from glocal.studies.run import slug
from glocal.wire import Upload, UploadError

STATE, JOURNAL = "state", "journal.jsonl"
Asked = ParamSpec("Asked")
Told = TypeVar("Told")


def noting_failure(work: Callable[Concatenate["Member", Asked], Told]) -> Callable[Concatenate["Member", Asked], Told]:
    """The same, and the owner reads in the journal why it could not be done; the server may be told less."""

    @wraps(work)
    def noted(member: "Member", /, *given: Asked.args, **more: Asked.kwargs) -> Told:
        try:
            return work(member, *given, **more)
        except Exception as error:
            order = next(value for value in given if isinstance(value, Order))
            why = str(error) if isinstance(error, InputError | UploadError) else brief(error)
            member._note("could not do what it was asked", order, {"why": why})
            raise

    return noted


@dataclass(frozen=True)
class Member:
    """A device of a deployed federation, as its folder describes it."""

    project: Project
    settings: DeviceSettings
    tell: Callable[[Json], None] = lambda row: None  # who is shown every line of the journal

    @classmethod
    def at(cls, folder: Path, *, tell: Callable[[Json], None] = lambda row: None) -> "Member":
        """The device of a folder."""
        project = Project.at(folder)
        return cls(project, project.device(), tell)

    @property
    def kit(self) -> Kit:
        """Algorithm and model; the owner's own code makes it, and may read data while it is imported."""
        try:
            return self.project.kit
        except InputError as error:
            raise DataError(str(error)) from error

    @property
    def secure(self) -> bool:
        """Whether its uploads leave it only masked."""
        return self.project.deployment.secure

    @property
    def equal(self) -> bool:
        """Whether it counts as much as every other, and need not say how many examples it has."""
        return self.project.study.plan.weights == "equal"

    @property
    def shared_names(self) -> list[str]:
        """The names of what is shared, in their order."""
        return [*self.kit.algorithm.init(self.kit.params)[0]]

    def data(self) -> Federation:
        """Its own examples; what cannot be trained on is refused."""
        return self._data

    @cached_property
    def _data(self) -> Federation:
        try:
            data = self.project.own_data(self.settings.number)
            check(data, classes_of(self.kit.model, data))
        except InputError as error:
            raise DataError(str(error)) from error
        return data

    def private(self, run: str) -> PrivateFile:
        """Its private state in a run; a name that would lead out of the folder is refused."""
        if slug(run) != run:
            raise InputError(f"device {self.settings.number}: '{run}' is no plain name of a run")
        return PrivateFile(self.project.folder / STATE / f"{run}.safetensors", self.kit, self.settings.number)

    @noting_failure
    def greet(self, order: Order) -> Json:
        """Who it is; a private state that is not its own, and data that do not fit, are refused here already."""
        self.private(order.run).load()
        told = {"device": self.settings.number, "fingerprint": self.kit.fingerprint, "weight": self.weight(self.data())}
        self._note("greeted the server", order, told)
        return told

    @noting_failure
    def train(self, shared: Params, order: Order) -> Answer:
        """One round, by the algorithm's own `client_update`; private state is on disk before anything is sent."""
        shared, file = self._received(shared), self.private(order.run)
        private, odd = file.start(order)
        data, plan, number = self.data(), self.project.plan, self.settings.number
        order_of_rows = visited(plan, data.train, order.round_index, 0, number=number)
        task = Task(shared, private, order_of_rows, noise_key(plan, order.round_index, number))
        outcome = Looped(self.kit.algorithm.client_update)([task], data.train.examples, order.round_index)
        assert outcome.rows is not None
        update = outcome.rows[0]
        upload = Upload(update.upload, shared)
        file.keep(Kept(private, order.counted, update.private, order.round_index, shared))
        figures = self._consented({"loss": float(update.loss)})
        note = {"note": odd} if odd else {}
        told = {"bytes": upload.nbytes, "tensors": [*upload.tensors], "examples": self.weight(data), "figures": figures, **note}
        self._note("trained and sent its shared part", order, told)
        return Answer(upload, self.weight(data), {**figures, **note})

    def weight(self, data: Federation) -> int:
        """How much it counts in the average."""
        return 1 if self.equal else int(data.train.sizes[0])

    @noting_failure
    def settle(self, shared: Params, order: Order) -> Answer:
        """What `join` does for a newcomer: the private part is learnt against the shared one as it is, and nothing is sent."""
        shared, data, number = self._received(shared), self.data().train, self.settings.number
        initial = self.kit.algorithm.init(self.kit.params)[1]
        host = Host(self.kit.algorithm, self.kit.model, self.project.plan, State(shared, PrivateRows(initial, {})), number)
        joined = join(host, data.of(0), welcome=Welcome(epochs=order.epochs), engine="looped")
        private = joined.state.private.of(number)
        self.private(order.run).keep(Kept(private, NEVER, private, NEVER, shared))
        self._note("learnt its private part, and sent nothing", order, {})
        return Answer(None, 0, {})

    @noting_failure
    def test(self, shared: Params, order: Order) -> Answer:
        """Its own model on its own data; what counts of its private state is settled, and the shared part kept to predict with."""
        shared, file = self._received(shared), self.private(order.run)
        private, odd = file.start(order)
        file.keep(Kept(private, order.counted, private, order.counted, shared))
        figures = self._consented(self.accuracies(shared, private)) if self.settings.metrics else {}
        note = {"note": odd} if odd else {}
        self._note("tested its model", order, {"figures": figures, **note})
        return Answer(None, 0, {**figures, **note})

    def accuracies(self, shared: Params, private: Params) -> Json:
        """Accuracy on its validation and test data, and how many examples these are."""
        data, state = self.data(), State(shared, PrivateRows(private, {}))
        evaluation = Evaluation(self.kit.algorithm, predictor(self.kit.model), engine="looped")
        found = {
            part: float(local_test(evaluation, state, held)[0]) for part, held in (("validation", data.val), ("test", data.test))
        }
        sizes = {"train": data.train.sizes, "validation_size": data.val.sizes, "test_size": data.test.sizes}
        known = {part: accuracy for part, accuracy in found.items() if not np.isnan(accuracy)}
        return {**known, **{name: int(size[0]) for name, size in sizes.items()}}

    def personal(self, run: str) -> Params:
        """What it predicts with after what it has seen of a run."""
        kept = self.private(run).load()
        if kept is None or trees.count(kept.shared) + trees.count(kept.after) == 0:
            raise InputError(f"predict: this device has taken part in no round of '{run}' yet; wait for one, or give another --run")
        return self.kit.algorithm.personal(kept.shared, kept.after)

    def _received(self, shared: Params) -> Params:
        """What the server sent, if it is the shared part of this device's own model."""
        expected = self.kit.algorithm.init(self.kit.params)[0]
        try:
            received = Upload(shared, expected).tensors
        except UploadError as error:
            raise InputError(f"device {self.settings.number}: the server's shared part does not fit its model ({error})") from error
        return {name: received[name] for name in expected}

    def _consented(self, figures: Json) -> Json:
        """Figures leave the device only if its owner has said so."""
        return figures if self.settings.metrics else {}

    def _note(self, what: str, order: Order, told: Json) -> None:
        """One line in the owner's journal for everything that was done, with all that left the device."""
        away = {"missed": order.missed} if order.missed else {}
        row = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "run": order.run,
            "round": order.round_index,
            "what": what,
            **told,
            **away,
        }
        append_rows(self.project.folder / JOURNAL, [row])
        self.tell(row)


def predicted(member: Member, run: str, inputs: torch.Tensor) -> list[int]:
    """The classes that the device's own model gives to inputs (rows, ...)."""
    with torch.no_grad():
        outputs = predictor(member.kit.model)(member.personal(run), inputs, torch.ones(len(inputs), dtype=torch.bool))
    classes: list[int] = outputs.argmax(-1).tolist()
    return classes
