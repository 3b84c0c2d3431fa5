"""An experiment as a value: algorithms and data, rounds, phases, seeds, evaluation.

Everything composes: several groups of clients with a model each, several seeds side by side,
phases in which clients come, go or drift, a warm start, pre-training, and what encodes uploads.
`Run` carries an experiment out.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, require_algorithm
from glocal.core import trees
from glocal.core.bounds import (
    MAX_EPOCHS,
    MAX_ROUNDS,
    MAX_SEED,
    count_field,
    require_count,
    require_counts,
)
from glocal.core.checks import require_flag, require_instance, require_items
from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError, describe_value
from glocal.core.files import Json
from glocal.core.one_line import one_line
from glocal.core.sampling import Availability, IntArray, Plan, sample_available, sample_clients
from glocal.core.spec import Spec, spec_of
from glocal.core.trees import Params
from glocal.core.values import tensors_of
from glocal.datasets.federated import FederatedData
from glocal.federate.options import Evaluation
from glocal.wire import Codec, Identity, Ledger, pack, require_codec

_SAMPLED_ROWS = 500  # of a store's inputs, in its hash


@dataclass(frozen=True)
class Group:
    """Clients with one model and one form of input; all groups train one shared part together.

    `data` has an entry per seed, or one for all. `params` are the weights to start from, per seed
    or one for all; the model's own where there are none. `spent` is the traffic behind these.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> Group(algorithm, (data,), name="hospitals").num_clients
    10
    """

    algorithm: Algorithm
    data: tuple[FederatedData, ...]
    name: str = ""
    params: tuple[Params, ...] = ()
    spent: tuple[Ledger, ...] = ()

    def __repr__(self) -> str:
        return one_line(self)

    def __post_init__(self) -> None:
        require_algorithm("group: algorithm", self.algorithm)
        require_items("group: data", self.data, FederatedData, "a tuple of glocal.FederatedData")
        require_instance("group: name", self.name, str, "a text")
        require_items("group: params", self.params, dict, "a tuple of dicts of tensors")
        require_items("group: spent", self.spent, Ledger, "a tuple of glocal.Ledger")
        if not self.data:
            raise InputError("group: there are no data; give one data set, or one per seed")

    @property
    def num_clients(self) -> int:
        """The number of its clients."""
        return self.data[0].num_clients

    def initial_params(self, seed_place: int) -> Params:
        """The weights that its clients start from."""
        own = self.algorithm.task.initial_params()
        if not self.params:
            return own
        given = self.params[min(seed_place, len(self.params) - 1)]
        if given.keys() != own.keys():
            raise InputError(
                f"{_of_group(self.name)}its params are of another model; "
                f"only one of the two has {sorted(given.keys() ^ own.keys())}"
            )
        return {name: given[name] for name in own}

    def initial_ledger(self, seed_place: int) -> Ledger:
        """The traffic behind its params."""
        return self.spent[min(seed_place, len(self.spent) - 1)] if self.spent else Ledger()

    def data_of(self, seed_place: int) -> FederatedData:
        """Its data for a seed."""
        return self.data[min(seed_place, len(self.data) - 1)]


@dataclass(frozen=True)
class Phase:
    """Rounds from `first_round` on with the same available clients and the same data.

    `data` are by group and seed, where they differ from the groups' own. A client that is absent
    keeps its test data, so that its model can be tested meanwhile.

    >>> phases = (Phase(0, Availability.of([0, 1, 2])), Phase(5, Availability.of([1, 2, 3])))
    >>> [sorted(phase.present()) for phase in phases]
    [[0, 1, 2], [1, 2, 3]]
    """

    first_round: int
    availability: Availability
    data: tuple[tuple[FederatedData, ...], ...] = ()

    def __repr__(self) -> str:
        return one_line(self)

    def __post_init__(self) -> None:
        require_count("phase: first_round", self.first_round, 0, MAX_ROUNDS)
        require_instance(
            "phase: availability", self.availability, Availability, "a glocal.Availability"
        )
        by_group = "a tuple with a tuple of glocal.FederatedData per group"
        require_items("phase: data", self.data, tuple, by_group)
        for by_seed in self.data:
            require_items("phase: data of a group", by_seed, FederatedData, by_group)

    def available(self) -> set[int]:
        """The clients that can be sampled, those that leave before they answer included."""
        return {*self.availability.available.tolist(), *self.availability.always.tolist()}

    def present(self) -> set[int]:
        """The clients that are present at the end of a round."""
        return self.available() - {*self.availability.dropouts.tolist()}


@dataclass(frozen=True)
class Pretraining:
    """Epochs before the first round, in which each client trains its private part alone.

    With `labels`, clients train on their training data, and without on all of their inputs.
    `algorithm` says how, by its `adapt`; by default that of the group.

    >>> Pretraining(epochs=3, labels=False).epochs
    3
    """

    epochs: int = count_field(maximum=MAX_EPOCHS)
    labels: bool = True
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        require_counts("pretraining: ", self)
        require_flag("pretraining: labels", self.labels)
        if self.algorithm is not None:
            require_algorithm("pretraining: algorithm", self.algorithm)


@dataclass(frozen=True)
class Experiment:
    """Groups of clients that train together for the rounds of a plan, with several seeds.

    `subgroups` are sets of clients that are reported by themselves in a run with phases. `about` is
    what else must not change when a run is resumed.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> plan = Plan(rounds=5, clients_per_round=2)
    >>> experiment = Experiment.of(algorithm, data, plan, seeds=(0, 1))
    >>> experiment.num_clients, [plan.seed for plan in experiment.plans()]
    (10, [0, 1])
    """

    groups: tuple[Group, ...]
    plan: Plan
    seeds: tuple[int, ...] = (0,)
    evaluation: Evaluation = Evaluation()
    uplink: Codec = Identity()
    phases: tuple[Phase, ...] = ()
    subgroups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pretraining: Pretraining | None = None
    about: Json = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self)

    def __post_init__(self) -> None:
        _require_types(self)
        _require_groups(self)
        _require_phases(self)
        require_codec(self.uplink)
        if len({*self.seeds}) != len(self.seeds) or not self.seeds:
            raise InputError(
                f"experiment: the seeds are {list(self.seeds)}; one or more, each once, expected"
            )

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        data: FederatedData | Sequence[FederatedData],
        plan: Plan,
        **settings: object,
    ) -> "Experiment":
        """Of one group; `data` is one data set for all seeds, or one per seed."""
        by_seed = [data] if isinstance(data, FederatedData) else data
        require_items("experiment: data", by_seed, FederatedData, "a list of glocal.FederatedData")
        return cls((Group(algorithm, tuple(by_seed)),), plan, **settings)  # type: ignore[arg-type]

    @property
    def algorithm(self) -> Algorithm:
        """The first group's algorithm; others differ in their task only."""
        return self.groups[0].algorithm

    @property
    def num_clients(self) -> int:
        """The number of clients of all groups."""
        return sum(group.num_clients for group in self.groups)

    @property
    def first_clients(self) -> list[int]:
        """The number of each group's first client among all."""
        counts = [group.num_clients for group in self.groups]
        return [int(first) for first in np.cumsum([0, *counts[:-1]])]

    def plans(self) -> list[Plan]:
        """The plan of each seed."""
        return [replace(self.plan, seed=seed) for seed in self.seeds]

    def names(self) -> list[str]:
        """How messages and tables call every client: by its name, or its number."""
        names: list[str] = []
        for group, first in zip(self.groups, self.first_clients, strict=True):
            own = group.data[0].names or [str(first + n) for n in range(group.num_clients)]
            names += own
        return names

    @cached_property
    def all_phases(self) -> tuple[Phase | None, ...]:
        """The phases; one None, in which everybody is available, where there are none."""
        return self.phases or (None,)

    def phase_at(self, round_index: int) -> int:
        """The place of the phase of a round."""
        starts = [phase.first_round for phase in self.phases] or [0]
        return int(np.searchsorted(starts, round_index, side="right")) - 1

    def stretches(self) -> Iterator[tuple[int, range]]:
        """Every phase that has rounds of the plan, by its place, with these rounds."""
        starts = [phase.first_round for phase in self.phases] or [0]
        ends = [*starts[1:], self.plan.total_rounds]
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
            first = max(start, self.plan.first_round)
            last = min(end, self.plan.total_rounds)
            if first < last:
                yield place, range(first, last)

    def data_at(self, phase: int, group: int, seed_place: int) -> FederatedData:
        """A group's data in a phase, for a seed."""
        own = self.phases[phase].data if self.phases else ()
        if not own:
            return self.groups[group].data_of(seed_place)
        by_seed = own[group]
        return by_seed[min(seed_place, len(by_seed) - 1)]

    def clients_until(self, round_index: int, *, since: int = 0) -> set[int]:
        """The clients that were available in a round, or before it and not before `since`."""
        first, last = self.phase_at(since), self.phase_at(round_index)
        return set[int]().union(*(phase.available() for phase in self.phases[first : last + 1]))

    def times_sampled(self, seed: int, rounds: int) -> IntArray:
        """How often each client took part in the first rounds (clients,)."""
        plan, counts = replace(self.plan, seed=seed), np.zeros(self.num_clients, dtype=np.int64)
        for index in range(plan.first_round, plan.first_round + rounds):
            phase = self.all_phases[self.phase_at(index)]
            if phase is None:
                counts[sample_clients(plan, self.num_clients, index)] += 1
            else:
                sampled = sample_available(plan, phase.availability, index)
                counts[np.setdiff1d(sampled, phase.availability.dropouts)] += 1
        return counts

    def map_data(self, change: Callable[[FederatedData], FederatedData]) -> "Experiment":
        """The same with every data set changed; one that is used twice is changed once."""
        changed: dict[int, FederatedData] = {}

        def changed_once(data: FederatedData) -> FederatedData:
            if id(data) not in changed:
                changed[id(data)] = change(data)
            return changed[id(data)]

        groups = [
            replace(group, data=tuple(map(changed_once, group.data))) for group in self.groups
        ]
        phases = []
        for phase in self.phases:
            by_group = [tuple(map(changed_once, by_seed)) for by_seed in phase.data]
            phases.append(replace(phase, data=tuple(by_group)))
        return replace(self, groups=tuple(groups), phases=tuple(phases))

    def to(self, device: torch.device) -> "Experiment":
        """The same with data and params on a device; one store of examples stays one."""
        stores: dict[int, Examples] = {}

        def moved(subset: ClientData) -> ClientData:
            key = id(subset.examples)
            if key not in stores:
                stores[key] = subset.examples.to(device)
            return replace(subset, examples=stores[key])

        moved_data = self.map_data(lambda data: data.map_subsets(moved))
        groups = []
        for group in moved_data.groups:
            params = tuple(trees.to(tree, device) for tree in group.params)
            groups.append(replace(group, params=params))
        return replace(moved_data, groups=tuple(groups))

    @cached_property
    def spec(self) -> Spec:
        """What must be the same when a run is resumed, as plain data."""
        plan = {
            name: value
            for name, value in asdict(self.plan).items()
            if name not in ("rounds", "seed") and value is not None
        }
        spec: Json = {
            **self.about,
            "algorithm": self.algorithm.spec,
            "plan": plan,
            "seeds": list(self.seeds),
            "evaluation": spec_of(self.evaluation),
            "uplink": spec_of(self.uplink),
        }
        if len(self.groups) > 1 or self.groups[0].name:
            tasks = {group.name: spec_of(group.algorithm.task) for group in self.groups}
            spec |= {"groups": list(tasks), "tasks": tasks}
        if self.phases:
            spec |= {"phases": [_phase_spec(phase) for phase in self.phases]}
            spec |= {"subgroups": {name: [*clients] for name, clients in self.subgroups.items()}}
        if self.pretraining:
            before = self.pretraining
            spec |= {"pretraining": {"epochs": before.epochs, "labels": before.labels}}
            if before.algorithm is not None:
                spec["pretraining"]["algorithm"] = before.algorithm.spec
        return {**spec, "data": self._data_hash()}

    def _data_hash(self) -> str:
        """A short hash of each client's rows, all targets, and a sample of the inputs."""
        digest, stores, seen = hashlib.sha256(), dict[int, Examples](), set[int]()
        every = [data for group in self.groups for data in group.data]
        every += [data for phase in self.phases for by_seed in phase.data for data in by_seed]
        for data in every:
            if id(data) in seen:
                continue
            seen.add(id(data))
            for subset in (data.train, data.val, data.test):
                digest.update(b"".join(rows.tobytes() for rows in subset.rows))
                stores[id(subset.examples)] = subset.examples
        for examples in stores.values():
            digest.update(pack(_hashed_tensors(examples)))
        return digest.hexdigest()[:16]


def _hashed_tensors(examples: Examples) -> Params:
    step = max(1, examples.num_rows // _SAMPLED_ROWS)
    hashed: dict[str, Tensor] = {}
    for place, tensor in enumerate(tensors_of(examples.x)):
        hashed[f"x{place}"] = tensor[::step]
    for place, tensor in enumerate(tensors_of(examples.y) if examples.has_targets else ()):
        hashed[f"y{place}"] = tensor
    if examples.group is not None:
        hashed["group"] = examples.group
    return hashed


def _phase_spec(phase: Phase) -> Json:
    clients = phase.availability._asdict()
    return {
        "first_round": phase.first_round,
        **{name: numbers.tolist() for name, numbers in clients.items()},
    }


def _of_group(name: str) -> str:
    return f"group '{name}': " if name else ""


def _require_types(experiment: Experiment) -> None:
    """Refuse parts of another type."""
    require_items("experiment: groups", experiment.groups, Group, "a tuple of glocal.Group")
    require_instance("experiment: plan", experiment.plan, Plan, "a glocal.Plan")
    require_instance("experiment: seeds", experiment.seeds, tuple | list, "a tuple of seeds")
    for seed in experiment.seeds:
        require_count("experiment: a seed", seed, 0, MAX_SEED)
    evaluation, before = experiment.evaluation, experiment.pretraining
    require_instance("experiment: evaluation", evaluation, Evaluation, "a glocal.Evaluation")
    require_items("experiment: phases", experiment.phases, Phase, "a tuple of glocal.Phase")
    require_instance("experiment: subgroups", experiment.subgroups, Mapping, "a dict of clients")
    for name, members in experiment.subgroups.items():
        of_name = f"experiment: the subgroup {describe_value(name)}"
        require_items(of_name, members, int | np.integer, "a tuple of clients' numbers")
    require_instance("experiment: pretraining", before, Pretraining | None, "a glocal.Pretraining")
    require_instance("experiment: about", experiment.about, dict, "a dict")


def _require_groups(experiment: Experiment) -> None:
    """Refuse groups that cannot train together: they may differ in their tasks only."""
    groups = experiment.groups
    if not groups:
        raise InputError("experiment: there are no groups; give at least one")
    for group in groups:
        _require_group_name(group.name, [each.name for each in groups])
        counts = {data.num_clients for data in group.data}
        if len(counts) != 1:
            raise InputError(
                f"{_of_group(group.name)}its data have {sorted(counts)} clients; "
                "all seeds need the same number"
            )
        if len(group.data) not in (1, len(experiment.seeds)):
            raise InputError(
                f"{_of_group(group.name)}{len(group.data)} data sets were given for "
                f"{len(experiment.seeds)} seeds; give one per seed, or one for all"
            )
    first = groups[0]
    for group in groups[1:]:
        own = replace(group.algorithm, task=first.algorithm.task)
        if type(own) is not type(first.algorithm) or own.spec != first.algorithm.spec:
            raise InputError(
                f"groups: '{group.name}' runs {group.algorithm!r}, but '{first.name}' runs "
                f"{first.algorithm!r}; their tasks may differ, and nothing else"
            )
    shared = [group.algorithm.init(group.initial_params(0)).shared for group in groups]
    for group, own_shared in zip(groups[1:], shared[1:], strict=True):
        _require_same_shared(group, own_shared, first, shared[0])


def _require_group_name(name: str, names: Sequence[str]) -> None:
    if names == [""]:
        return
    is_plain = name.isprintable() and "/" not in name
    if not is_plain or name.strip(". ") == "":
        raise InputError(f"groups: {name!r} was given as a name; use a plain word")
    if names.count(name) > 1:
        raise InputError(f"groups: {names.count(name)} are called '{name}'; give each another name")


def _require_same_shared(group: Group, own: Params, first: Group, expected: Params) -> None:
    """Shared parts need the same names, shapes and types; everything else may differ."""
    differ: list[str] = []
    for name in sorted({*own, *expected}):
        there, here = _form(expected, name), _form(own, name)
        if there != here:
            differ.append(f"'{name}' is {there} and {here}")
    if differ:
        raise InputError(
            f"groups: '{first.name}' and '{group.name}' do not share the same tensors: "
            f"{', '.join(differ)}; give both the same shared part, or keep what differs local"
        )


def _form(tree: Params, name: str) -> str:
    return f"{tuple(tree[name].shape)} {tree[name].dtype}" if name in tree else "absent"


def _require_phases(experiment: Experiment) -> None:
    phases = experiment.phases
    for name, members in experiment.subgroups.items():
        wrong = [client for client in members if not 0 <= client < experiment.num_clients]
        if wrong or not members:
            fault = f"has client {wrong[0]}" if wrong else "has no client"
            raise InputError(
                f"phases: the subgroup '{name}' {fault}; "
                f"name some of 0..{experiment.num_clients - 1}"
            )
    if not phases:
        return
    starts = [phase.first_round for phase in phases]
    if starts[0] != 0 or any(after <= before for before, after in pairwise(starts)):
        raise InputError(
            f"phases: they begin in rounds {starts}; begin with 0, each later than the one before"
        )
    if experiment.evaluation.selects:
        raise InputError(
            f"phases: select = '{experiment.evaluation.select}' compares rounds with different "
            "clients and data; use 'last'"
        )
    for place, group in enumerate(experiment.groups):
        stores = set[int]()
        for phase_place in range(len(phases)):
            for seed_place in range(len(experiment.seeds)):
                data = experiment.data_at(phase_place, place, seed_place)
                stores.add(id(data.train.examples.x))
                _require_as_many(data, group)
        if len(stores) > 1:
            raise InputError(
                "phases: they have different stores of examples; "
                "put all examples into one, and give clients other rows"
            )


def _require_as_many(data: FederatedData, group: Group) -> None:
    if data.num_clients != group.num_clients:
        raise InputError(
            f"phases: {_of_group(group.name)}the data have {data.num_clients} clients in one phase "
            f"and {group.num_clients} in another; give a client that is absent no rows"
        )
