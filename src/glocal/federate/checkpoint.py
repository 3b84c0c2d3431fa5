"""A checkpoint: everything that training needs to resume with the same bits.

All randomness is addressed by (seed, round, client). So the random state is two numbers: the seed,
and how many rounds are done.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import (
    Json,
    append_rows,
    read_json,
    read_metadata,
    read_rows,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)
from glocal.core.spec import Spec, describe_spec, fingerprint, first_difference
from glocal.core.store import PerClient, TrainingState
from glocal.core.trees import Params
from glocal.engines import ExecutionPlan
from glocal.federate.row_files import Index, Place, RowFiles, Rows, StatePart
from glocal.wire import Ledger

KeyT = TypeVar("KeyT")


class Best(NamedTuple):
    """The best round so far on validation data: its score, rounds done, and the state after it."""

    score: float
    done: int
    state: TrainingState


@dataclass(frozen=True)
class RunProgress:
    """The state of training: rounds done, and a state for each seed.

    `ledgers` and `best` are by seed and group, `dropped` by seed and client: in how many rounds it
    was left out because its upload was not finite. `plans` are the execution plans of the groups,
    so that a resumed run has the same rounding. `stopped` is why the run ended early, if it did.
    """

    done: int
    states: tuple[TrainingState, ...]
    ledgers: tuple[tuple[Ledger, ...], ...]
    best: tuple[tuple[Best | None, ...], ...]
    dropped: tuple[Mapping[int, int], ...]
    plans: tuple[ExecutionPlan | None, ...] = ()
    stopped: str = ""

    def named_states(self) -> dict[str, TrainingState]:
        """Every state by a name: the last one of a seed, and the best one of a seed and group."""
        named = {str(seed): state for seed, state in enumerate(self.states)}
        for seed, by_group in enumerate(self.best):
            for place, best in enumerate(by_group):
                if best:
                    named[_best_name(seed, place)] = best.state
        return named

    def with_states(self, named: Mapping[str, TrainingState]) -> "RunProgress":
        """The same with other states, by these names."""
        best: list[tuple[Best | None, ...]] = []
        for seed, by_group in enumerate(self.best):
            moved: list[Best | None] = []
            for place, each in enumerate(by_group):
                moved.append(each and each._replace(state=named[_best_name(seed, place)]))
            best.append(tuple(moved))
        states = tuple(named[str(seed)] for seed in range(len(self.states)))
        return replace(self, states=states, best=tuple(best))


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint and the rows of one experiment, in its folder.

    `spec` is what must not change when the run is resumed; `fresh` has the state of each seed
    before the first round, with the initial trees of all clients.
    """

    folder: Path
    spec: Spec
    fresh: tuple[TrainingState, ...]
    row_files: RowFiles = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_files", RowFiles(self.folder / "checkpoint"))

    @property
    def path(self) -> Path:
        """The checkpoint file."""
        return self.folder / "checkpoint.safetensors"

    def append(self, rows: Iterable[Json]) -> None:
        """Append a round's rows; a resumed run drops the rows after its checkpoint."""
        append_rows(self.folder / "rows.jsonl", rows)

    def save(self, progress: RunProgress, *, last: bool = False) -> int:
        """Replace the checkpoint; return its number of rounds.

        The `last` one has the same bytes however often the run was stopped and resumed.
        """
        named = progress.named_states()
        indices = self.row_files.save(_parts(named), anew=last)
        tensors: Params = {}
        for name, state in named.items():
            for side, tree in (("shared", state.shared), ("server", state.server)):
                tensors |= trees.with_prefix(f"{name}:{side}:", tree)
        for part, index in indices.items():
            tensors[f"{part.state}:index:{part.kind}"] = _index_to_tensor(index)
        write_tensors(self.path, _unshared(tensors), self._header(progress))
        self.row_files.remove_unused(indices.values())
        return progress.done

    def drop_tensors(self, progress: RunProgress | None = None) -> None:
        """Keep the header of the checkpoint and drop its tensors.

        The experiment is then known to be finished, and cannot be resumed.
        """
        header = Json()
        if progress:
            header = self._header(progress)
        elif self.path.exists():
            header = read_metadata(self.path)
        if header and not header.get("tensors_dropped"):
            write_tensors(self.path, {}, {**header, "tensors_dropped": True})
            self.row_files.remove_unused([])

    def require_tensors(self) -> None:
        """Refuse to resume from a checkpoint without tensors."""
        if self.path.exists() and read_metadata(self.path).get("tensors_dropped"):
            raise InputError(
                f"resume: {self.folder} has only the metrics of its run, so it cannot go on; "
                "start a new run in another folder"
            )

    def rounds_done(self) -> int:
        """The number of rounds in the checkpoint, 0 if there is none; checks the spec."""
        if not self.path.exists():
            return 0
        header = read_metadata(self.path)
        if not isinstance(header.get("spec"), dict) or not isinstance(header.get("done"), int):
            raise InputError(
                f"resume: {self.path} was not written by glocal; give the folder of a run"
            )
        _require_same_spec(header["spec"], self.spec, self.folder)
        return int(header["done"])

    def load(self, device: torch.device) -> RunProgress | None:
        """The saved progress or None; rows after it are dropped and will be written again."""
        saved = self._read()
        if saved is None:
            (self.folder / "rows.jsonl").unlink(missing_ok=True)
            return None
        progress, indices = saved
        moved: dict[str, TrainingState] = {}
        for name, state in progress.named_states().items():
            moved[name] = state.to(device, self._fresh(name))
        self.row_files.remember(_parts(moved), indices)
        self._drop_rows_after(self.spec["plan"]["first_round"] + progress.done)
        return progress.with_states(moved)

    def read(self) -> RunProgress | None:
        """The saved progress on the CPU, or None; nothing on disk changes."""
        saved = self._read()
        return saved[0] if saved else None

    def read_plan(self, part: str) -> ExecutionPlan | None:
        """The execution plan of a part of the run, saved before its first step."""
        return _read_plan(self._plans().get(part))

    def save_plan(self, part: str, plan: ExecutionPlan) -> None:
        """Save the execution plan of a part: after a stop, a measurement could give another."""
        plans = {**self._plans(), part: _without_reason(plan)}
        write_json(
            self.folder / "engine.json", {"fingerprint": fingerprint(self.spec), "engines": plans}
        )

    def _header(self, progress: RunProgress) -> Json:
        ledgers, best = list[list[Json]](), list[list[list[float] | None]]()
        for own_ledgers, own_best in zip(progress.ledgers, progress.best, strict=True):
            ledgers.append([ledger.as_dict() for ledger in own_ledgers])
            best.append([each and [*each[:2]] for each in own_best])
        return {
            "done": progress.done,
            "ledgers": ledgers,
            "best": best,
            "dropped": [_with_keys(str, own) for own in progress.dropped],
            "stopped": progress.stopped,
            "spec": self.spec,
            "engines": [plan and _without_reason(plan) for plan in progress.plans],
        }

    def _fresh(self, name: str) -> TrainingState:
        """The fresh state of the seed that a named state belongs to."""
        return self.fresh[int(name.partition("-")[0])]

    def _read(self) -> tuple[RunProgress, dict[StatePart, Index]] | None:
        if not self.rounds_done():
            return None
        self.require_tensors()
        tensors, header = read_tensors(self.path)
        progress = _read_header(header, self.fresh)
        names = progress.named_states()
        indices: dict[StatePart, Index] = {}
        for part in _parts(names):
            indices[part] = _index_from_tensor(
                self._tensor(tensors, f"{part.state}:index:{part.kind}")
            )
        rows = self.row_files.read(indices, _tensor_names(self.fresh[0]))
        states = {name: self._state(name, tensors, rows) for name in names}
        return progress.with_states(states), indices

    def _state(self, name: str, tensors: Params, rows: Mapping[StatePart, Rows]) -> TrainingState:
        """A state; the order of its tensors is that of the fresh one, which no file keeps."""
        fresh = self._fresh(name)
        trees_by_side: dict[str, Params] = {}
        for side, like in (("shared", fresh.shared), ("server", fresh.server)):
            own = {key: self._tensor(tensors, f"{name}:{side}:{key}") for key in like}
            trees_by_side[side] = own
        sides: list[tuple[PerClient, ...]] = []
        for side, per_client in (("private", fresh.private), ("profiles", fresh.profiles)):
            filled: list[PerClient] = []
            for place, each in enumerate(per_client):
                filled.append(replace(each, stored=rows[StatePart(name, _kind(side, place))]))
            sides.append(tuple(filled))
        return TrainingState(trees_by_side["shared"], trees_by_side["server"], *sides)

    def _tensor(self, tensors: Params, name: str) -> Tensor:
        if name not in tensors:
            raise InputError(
                f"run: {self.path} lacks the tensor '{name}'; "
                "restore it from a copy or start the run anew"
            )
        return tensors[name]

    def _plans(self) -> Json:
        """The saved plans, if they are of this run: a folder can be used for a new run."""
        path = self.folder / "engine.json"
        saved: Json = read_json(path, dict) if path.exists() else {}
        plans = saved.get("engines")
        is_same = saved.get("fingerprint") == fingerprint(self.spec)
        return plans if is_same and isinstance(plans, dict) else {}

    def _drop_rows_after(self, next_round: int) -> None:
        path = self.folder / "rows.jsonl"
        rows = [row for row in read_rows(path) if row["round"] < next_round]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _best_name(seed: int, place: int) -> str:
    return f"{seed}-best-{place}"


def _kind(side: str, place: int) -> str:
    """The trees that lie in one stack: those of one group."""
    return f"{side} {place}"


def _parts(named: Mapping[str, TrainingState]) -> dict[StatePart, Rows]:
    """The stored trees of every state."""
    parts: dict[StatePart, Rows] = {}
    for name, state in named.items():
        for side, per_client in (("private", state.private), ("profiles", state.profiles)):
            for place, each in enumerate(per_client):
                parts[StatePart(name, _kind(side, place))] = each.stored
    return parts


def _tensor_names(fresh: TrainingState) -> dict[str, list[str]]:
    """The names of each kind's tensors, in order."""
    names: dict[str, list[str]] = {}
    for side, per_client in (("private", fresh.private), ("profiles", fresh.profiles)):
        for place, each in enumerate(per_client):
            names[_kind(side, place)] = [*each.initial]
    return names


def _read_header(header: Json, fresh: tuple[TrainingState, ...]) -> RunProgress:
    """The progress of a header, with fresh states in the place of the saved ones."""
    best: list[tuple[Best | None, ...]] = []
    for seed, by_group in enumerate(header["best"]):
        own: list[Best | None] = []
        for each in by_group:
            own.append(each and Best(each[0], each[1], fresh[seed]))
        best.append(tuple(own))
    ledgers = tuple(tuple(map(Ledger.from_dict, own)) for own in header["ledgers"])
    dropped = tuple(_with_keys(int, own) for own in header["dropped"])
    plans = tuple(map(_read_plan, header["engines"]))
    stopped = header["stopped"]
    return RunProgress(header["done"], fresh, ledgers, tuple(best), dropped, plans, stopped)


def _with_keys(kind: Callable[[Any], KeyT], counts: Mapping[Any, int]) -> dict[KeyT, int]:
    """Counts whose keys are made numbers or words, as JSON has words alone."""
    return {kind(key): count for key, count in counts.items()}


def _index_to_tensor(index: Index) -> Tensor:
    """The client, file and row of every tree (trees, 3)."""
    rows = [(client, *place) for client, place in index.items()]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)


def _index_from_tensor(tensor: Tensor) -> Index:
    return {client: Place(file, row) for client, file, row in tensor.tolist()}


def _without_reason(plan: ExecutionPlan) -> Json:
    """A plan without its reason, which has measured times and so differs between runs."""
    return {name: value for name, value in plan.as_dict().items() if name != "reason"}


def _read_plan(saved: object) -> ExecutionPlan | None:
    plan = ExecutionPlan.from_dict(saved)
    return plan and replace(plan, reason="as the run began")


def _unshared(tensors: Params) -> Params:
    """Each tensor with memory of its own, as safetensors requires."""
    addresses: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return unshared


def _require_same_spec(saved: Spec, now: Spec, folder: Path) -> None:
    """Refuse to resume another run, and say what differs."""
    difference = first_difference(saved, now)
    if difference is None:
        return
    path, before, after = difference
    raise InputError(
        f"resume: {folder} was made with another {path} ({describe_spec(before)}) than the one "
        f"given ({describe_spec(after)}); go back to the old one, or start a new run in another "
        "folder"
    )
