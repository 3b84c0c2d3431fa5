"""The result of one seed and one group: each client's model, and its metrics."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np
from torch import nn

from glocal.algorithms.contract import Algorithm
from glocal.core.checks import require_path
from glocal.core.data import find_client
from glocal.core.errors import InputError, describe_error
from glocal.core.files import Json, read_tensors, write_tensors
from glocal.core.model_tensors import base_fingerprint, client_tensors, require_model
from glocal.core.modules import client_state_dict, state_dict
from glocal.core.one_line import one_line
from glocal.core.sampling import Plan
from glocal.core.store import GroupState
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.evaluate import Figures, Floats, NewTest, Summary
from glocal.wire import Codec, Identity, Ledger, split_private

_BASE = "base"  # in the header of a model's file: the fingerprint of the frozen tensors


@dataclass(frozen=True)
class GroupResult:
    """What one seed gives for the clients of one group.

    `plan` has the rounds that were done. `test` and `validation` have each metric of all clients'
    own models on their own data, `new` the figures of New Test. `stopped` is why the run ended
    early, if it did. What callbacks put into `extras` at the end of a run is saved with the rest.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> one = result.group(seed=0)
    >>> one.num_clients, one.rounds, sum(one.times_sampled)
    (10, 1, 2)
    """

    group: str
    algorithm: Algorithm
    plan: Plan
    state: GroupState
    selected_round: int
    test: dict[str, Figures]
    validation: dict[str, Figures]
    new: NewTest | None
    ledger: Ledger
    sizes: dict[str, list[int]]
    times_sampled: list[int]
    times_dropped: list[int]
    names: tuple[str, ...] = ()
    stopped: str = ""
    uplink: Codec = Identity()
    extras: Json = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def seed(self) -> int:
        """The seed."""
        return self.plan.seed

    @property
    def rounds(self) -> int:
        """The number of rounds, those of a warm start included."""
        return self.plan.total_rounds

    @property
    def task(self) -> Task:
        """The task of the group."""
        return self.algorithm.task

    @property
    def num_clients(self) -> int:
        """The number of its clients."""
        return len(self.times_sampled)

    @property
    def by_client(self) -> Floats:
        """The task's first metric of each client's own model on its own test data (clients,)."""
        return self.test[self.task.metric.name].by_client

    @property
    def local_spread(self) -> Summary:
        """The first metric of Local Test over clients."""
        return self.test[self.task.metric.name].summary()

    @property
    def local_test(self) -> float | None:
        """Local Test: the first metric, mean over clients of their own models on their own data."""
        return self.local_spread.mean

    @property
    def new_test(self) -> float | None:
        """New Test: the first metric of all trained models together on everybody's test data."""
        return self.new.figures[self.task.metric.name] if self.new else None

    def params(self, client: int | str) -> Params:
        """The tensors that a client predicts with, by its number or name."""
        number = find_client(client, self.names, self.num_clients)
        own, _ = split_private(self.state.private.of(number))
        return self.algorithm.personal(self.state.shared, own)

    def state_dict(self, client: int | str) -> Params:
        """One client's model, by number or name, as a plain state dict."""
        return state_dict(self.task.model, self.params(client))

    def model(self, client: int | str) -> nn.Module:
        """One client's own model, by number or name: a plain module in evaluation mode."""
        model = copy.deepcopy(self.task.model)
        model.load_state_dict(self.state_dict(client))
        return model.eval()

    def as_dict(self) -> Json:
        """For JSON: all figures, and the table of clients."""
        group = {"group": self.group} if self.group else {}
        return {
            "seed": self.seed,
            **group,
            "algorithm": self.algorithm.word,
            "rounds": self.rounds,
            "selected_round": self.selected_round,
            **({"stopped": self.stopped} if self.stopped else {}),
            "metric": self.task.metric.name,
            "local_test": self.local_spread._asdict(),
            "new_test": self._new_figures(),
            "validation": self.validation[self.task.metric.name].summary()._asdict(),
            "metrics": self._metrics(),
            "never_sampled": self.times_sampled.count(0),
            "ledger": self.ledger.as_dict(),
            "clients": self._client_rows(),
            **self.extras,
        }

    def _new_figures(self) -> Json | None:
        """The first metric of the three ensembles, and how many models are in them."""
        if self.new is None:
            return None
        figures = {"logits": self.new.logits, "votes": self.new.votes, "weights": self.new.weights}
        return {**figures, "members": self.new.members, "of": self.new.of}

    def _metrics(self) -> Json:
        """Every metric by name, in all three tests."""
        table: Json = {}
        for name, figures in self.test.items():
            table[name] = {
                "higher_is_better": figures.metric.higher_is_better,
                "is_fraction": figures.metric.is_fraction,
                "local_test": figures.summary()._asdict(),
                "new_test": self.new.figures[name] if self.new else None,
                "validation": self.validation[name].summary()._asdict(),
            }
        return table

    def _client_rows(self) -> list[Json]:
        columns: Json = {
            **self.sizes,
            "times_sampled": self.times_sampled,
            "local_test": _defined(self.by_client),
        }
        if any(self.times_dropped):
            columns["times_dropped"] = self.times_dropped
        for name, figures in list(self.test.items())[1:]:
            columns[name] = _defined(figures.by_client)
        if self.names:
            columns = {"name": list(self.names), **columns}
        columns = {"client": list(range(self.num_clients)), **columns}
        rows = zip(*columns.values(), strict=True)
        return [dict(zip(columns, row, strict=True)) for row in rows]


def _defined(figures: Floats) -> list[float | None]:
    """Figures (clients,); None where one is undefined."""
    return [None if np.isnan(figure) else figure for figure in figures.tolist()]


def save_models(result: GroupResult, folder: Path) -> None:
    """Write each client's model as a state dict; one file if all clients have the same model.

    Clients that never trained share a file too. Frozen tensors are left out: a file names their
    fingerprint, and `load_model` asks for it.
    """
    metadata: Json = {
        "algorithm": result.algorithm.word,
        "seed": result.seed,
        "round": result.selected_round,
    }
    if base := base_fingerprint(result.task.model):
        metadata[_BASE] = base
    own, _ = split_private(result.state.private.initial)
    if not own:
        tensors = _own_state_dict(result, 0)
        write_tensors(folder / "every-client.safetensors", tensors, metadata)
        return
    trained = result.state.private.stored
    for client in sorted(trained):
        name = quote(result.names[client], safe="") if result.names else f"{client:04d}"
        path = folder / f"client-{name}.safetensors"
        write_tensors(path, _own_state_dict(result, client), metadata)
    untrained = [client for client in range(result.num_clients) if client not in trained]
    if untrained:
        tensors = _own_state_dict(result, untrained[0])
        write_tensors(folder / "untrained.safetensors", tensors, metadata)


def _own_state_dict(result: GroupResult, client: int) -> Params:
    """A client's model without the frozen tensors."""
    return client_state_dict(result.task.model, result.params(client))


def load_model(path: str | Path, model: nn.Module) -> nn.Module:
    """A client's model from its file, as a plain module in evaluation mode.

    `model` has the same layers, and the frozen tensors if there are any; it stays as it is.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> with TemporaryDirectory() as folder:
    ...     settings = {"rounds": 1, "clients_per_round": 2, "progress": False}
    ...     result = glocal.fit(algorithm, data, folder=folder, **settings)
    ...     path = Path(folder) / "models/seed-0/every-client.safetensors"
    ...     loaded = glocal.load_model(path, model)
    >>> torch.equal(loaded[1].weight, result.model(0)[1].weight)
    True
    """
    require_model("model: the model", model)
    tensors, header = read_tensors(require_path("model: the path", path))
    saved, given = header.get(_BASE, ""), base_fingerprint(model)
    if saved != given:
        raise InputError(
            f"model: {path} belongs to a model with {_describe_base(saved)}, "
            f"the one given has {_describe_base(given)}; give the model that it was trained on"
        )
    loaded = copy.deepcopy(model)
    try:
        loaded.load_state_dict({**loaded.state_dict(), **tensors})
    except RuntimeError as error:
        raise InputError(
            f"model: {path} does not fit the model given ({describe_error(error)})"
        ) from error
    missing = {*client_tensors(model)} - tensors.keys() - _unsaved(model)
    if missing:
        raise InputError(
            f"model: {path} lacks {sorted(missing)[0]}; give the model that it was trained on"
        )
    return loaded.eval()


def _describe_base(fingerprint: str) -> str:
    return f"the frozen tensors {fingerprint}" if fingerprint else "no frozen tensors"


def _unsaved(model: nn.Module) -> set[str]:
    """Buffers that a module keeps out of its state dict."""
    return {*client_tensors(model)} - model.state_dict().keys()
