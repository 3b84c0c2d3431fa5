"""A checkpoint: everything that training needs to resume with the same bits.

All randomness is addressed by (seed, round, client). So the random state is two numbers: the seed,
and how many rounds are done.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
from glocal.core.store import PrivateStates, State
from glocal.core.trees import Params
from glocal.engines import ExecutionPlan
from glocal.wire import Ledger


class Progress(NamedTuple):
    """The state of training: rounds done, and for each place a state, a ledger and the best round.

    A place is a seed, or a kind of client. The best round is its validation score, the number of
    rounds done, and the state. `choices` are the execution plans, so that a resumed run has the
    same rounding: one for all seeds, or one for each kind.
    """

    done: int
    states: list[State]
    ledgers: list[Ledger]
    best: list[tuple[float, int, State] | None]
    choices: tuple[ExecutionPlan | None, ...] = (None,)

    def of(self, place: int) -> "Progress":
        """The part of one of several kinds."""
        return Progress(
            self.done,
            [self.states[place]],
            [self.ledgers[place]],
            [self.best[place]],
            (self.choices[place],),
        )

    @classmethod
    def joined(cls, parts: Sequence["Progress"]) -> "Progress":
        """Several kinds as one; all have done the same number of rounds."""
        states, ledgers, best = list[State](), list[Ledger](), []
        choices = list[ExecutionPlan | None]()
        for part in parts:
            states += part.states
            ledgers += part.ledgers
            best += part.best
            choices += part.choices
        return cls(parts[0].done, states, ledgers, best, tuple(choices))


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint and the rows of one experiment, in its folder."""

    folder: Path
    fingerprint: Json

    @property
    def path(self) -> Path:
        """The checkpoint file."""
        return self.folder / "checkpoint.safetensors"

    def append(self, rows: Iterable[Json]) -> None:
        """Append a round's rows; a resumed run drops the rows after its checkpoint."""
        append_rows(self.folder / "rows.jsonl", rows)

    def save(self, progress: Progress) -> int:
        """Replace the checkpoint; return its number of rounds."""
        tensors: Params = {}
        for place, state in enumerate(progress.states):
            tensors |= flatten_state(f"{place}/last", state)
        for place, best in enumerate(progress.best):
            tensors |= flatten_state(f"{place}/best", best[2]) if best else {}
        write_tensors(self.path, unshare(tensors), self._header(progress))
        return progress.done

    def drop_tensors(self, progress: Progress | None = None) -> None:
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

    def require_tensors(self) -> None:
        """Refuse to resume from a checkpoint without tensors."""
        if self.path.exists() and read_metadata(self.path).get("tensors_dropped"):
            raise InputError(
                f"resume: {self.folder} has only the metrics of its run, so it cannot go on; "
                "start a new run in another folder"
            )

    def _header(self, progress: Progress) -> Json:
        engines = [plan and _without_reason(plan) for plan in progress.choices]
        return {
            "done": progress.done,
            "ledgers": [ledger.as_dict() for ledger in progress.ledgers],
            "best": [best and best[:2] for best in progress.best],
            "fingerprint": self.fingerprint,
            "engine": engines if len(engines) > 1 else engines[0],
        }

    def rounds_done(self) -> int:
        """The number of rounds in the checkpoint, 0 if there is none; checks the fingerprint."""
        if not self.path.exists():
            return 0
        header = read_metadata(self.path)
        if not isinstance(header.get("fingerprint"), dict):
            raise InputError(
                f"resume: {self.path} was not written by glocal; give the folder of a run"
            )
        _require_same_fingerprint(header["fingerprint"], self.fingerprint, self.folder)
        return int(header["done"])

    def load(self) -> Progress | None:
        """The saved progress or None; rows after it are dropped and will be written again."""
        progress = self.read()
        if progress is None:
            (self.folder / "rows.jsonl").unlink(missing_ok=True)
        else:
            self._drop_rows_after(self.fingerprint["plan"]["first_round"] + progress.done)
        return progress

    def read(self) -> Progress | None:
        """The saved progress on the CPU, or None; nothing on disk changes."""
        if not self.rounds_done():
            return None
        self.require_tensors()
        tensors, header = read_tensors(self.path)
        states, bests = list[State](), list[tuple[float, int, State] | None]()
        for place, best in enumerate(header["best"]):
            names = self._names(place)
            states.append(unflatten_state(tensors, f"{place}/last", names))
            bests.append((*best, unflatten_state(tensors, f"{place}/best", names)) if best else None)
        ledgers = [Ledger.from_dict(ledger) for ledger in header["ledgers"]]
        plans = tuple(map(_read_plan, _as_list(header.get("engine"))))
        return Progress(header["done"], states, ledgers, bests, plans)

    def read_plan(self, part: str) -> ExecutionPlan | None:
        """The execution plan of a part of the run, saved before its first step."""
        return _read_plan(self._plans().get(part))

    def save_plan(self, part: str, plan: ExecutionPlan) -> None:
        """Save the execution plan of a part: after a stop, a measurement could give another."""
        plans = {**self._plans(), part: _without_reason(plan)}
        write_json(self.folder / "engine.json", {"fingerprint": self._digest(), "engines": plans})

    def _plans(self) -> Json:
        """The saved plans, if they are of this run: a folder can be used for a new run."""
        path = self.folder / "engine.json"
        saved: Json = read_json(path, dict) if path.exists() else {}
        plans = saved.get("engines")
        is_same = saved.get("fingerprint") == self._digest()
        return plans if is_same and isinstance(plans, dict) else {}

    def _digest(self) -> str:
        """A short hash of the fingerprint."""
        text = json.dumps(self.fingerprint, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _names(self, place: int) -> Json:
        """The names of a place's tensors: seeds have one model, kinds have one each."""
        models = _as_list(self.fingerprint["model"])
        names: Json = models[place if len(models) > 1 else 0]
        return names

    def _drop_rows_after(self, next_round: int) -> None:
        path = self.folder / "rows.jsonl"
        rows = [row for row in read_rows(path) if row["round"] < next_round]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _without_reason(plan: ExecutionPlan) -> Json:
    """A plan without its reason, which has measured times and so differs between runs."""
    return {name: value for name, value in plan.as_dict().items() if name != "reason"}


def _read_plan(saved: object) -> ExecutionPlan | None:
    plan = ExecutionPlan.from_dict(saved)
    return plan and replace(plan, reason="as the run began")


def _as_list(one_or_more: Any) -> list[Any]:
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def unshare(tensors: Params) -> Params:
    """Each tensor with memory of its own, as safetensors requires.

    A frozen tensor may be the same object on all clients.
    """
    addresses: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if address in addresses else tensor
        addresses.add(address)
    return unshared


def flatten_state(prefix: str, state: State) -> Params:
    """A state as one flat tree: prefix/shared/NAME, prefix/initial/NAME, prefix/CLIENT/NAME."""
    parts = {"shared": state.shared, "initial": state.private.initial}
    parts |= {str(client): tree for client, tree in state.private.trained.items()}
    flat = Params()
    for part, tree in parts.items():
        for name, tensor in tree.items():
            flat[f"{prefix}/{part}/{name}"] = tensor
    # Listed by themselves, as a client without private tensors may have trained too.
    flat[f"{prefix}/trained"] = torch.tensor(sorted(state.private.trained), dtype=torch.int64)
    return flat


def unflatten_state(tensors: Params, prefix: str, names: Json) -> State:
    """The state of a flat tree; names are in the model's order, which a file does not keep."""

    def tree(part: str, side: str) -> Params:
        return {name: tensors[f"{prefix}/{part}/{name}"] for name in names[side]}

    clients = tensors[f"{prefix}/trained"].tolist()
    trained = {client: tree(str(client), "private") for client in clients}
    return State(tree("shared", "shared"), PrivateStates(tree("initial", "private"), trained))


def _require_same_fingerprint(saved: Json, now: Json, folder: Path) -> None:
    """Refuse to resume a run with another fingerprint, and say what differs."""
    for key in dict.fromkeys([*now, *saved]):
        before, after = saved.get(key), now.get(key)
        if before == after:
            continue
        if key == "model":
            before, after = _first_difference(saved, now)
        raise InputError(
            f"resume: {folder} was made with another {key} ({before}) than the one given "
            f"({after}); go back to the old {key}, or start a new run in another folder"
        )


def _first_difference(saved: Json, now: Json) -> tuple[str, str]:
    """The difference between the first two models that are not the same."""
    # There are as many models in both, as kinds are compared first.
    models = zip(_as_list(saved["model"]), _as_list(now["model"]), strict=True)
    return next(_difference(before, after) for before, after in models if before != after)


def _difference(saved: Json, now: Json) -> tuple[str, str]:
    """The first tensor that differs, before and after."""
    for side in ("shared", "private"):
        for name in sorted({*saved[side], *now[side]}):
            before, after = saved[side].get(name), now[side].get(name)
            if before != after:
                return _describe(side, name, before), _describe(side, name, after)
    return "the same tensors in another order", "this order"


def _describe(side: str, name: str, shape: list[int] | None) -> str:
    return f"{side} '{name}' {tuple(shape)}" if shape is not None else f"no {side} '{name}'"
