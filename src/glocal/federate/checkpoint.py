"""A checkpoint: all that training needs to go on to the same bits.

All randomness is addressed by (seed, round, device), so the random state is two numbers: the seed and how many rounds are done.
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
    """How far training has come: rounds done; state, ledger, and best (validation score, rounds done, state) of each place.

    A place is a seed, or a kind of device. `choices` are what the engines settled on, so that a run that goes on does so with the
    same rounding: one for all seeds, or one for each kind.
    """

    done: int
    states: list[State]
    ledgers: list[Ledger]
    best: list[tuple[float, int, State] | None]
    choices: tuple[ExecutionPlan | None, ...] = (None,)

    def of(self, place: int) -> "Progress":
        """What concerns one of several kinds."""
        return Progress(
            self.done,
            [self.states[place]],
            [self.ledgers[place]],
            [self.best[place]],
            (self.choices[place],),
        )

    @classmethod
    def joined(cls, parts: Sequence["Progress"]) -> "Progress":
        """Kinds that have come equally far, as one."""
        return cls(
            parts[0].done,
            [state for part in parts for state in part.states],
            [ledger for part in parts for ledger in part.ledgers],
            [best for part in parts for best in part.best],
            tuple(choice for part in parts for choice in part.choices),
        )


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint and the rows of one case, in its folder."""

    folder: Path
    fingerprint: Json

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "checkpoint.safetensors"

    def append(self, rows: Iterable[Json]) -> None:
        """Keep a round's rows; those after the last checkpoint are dropped when training goes on from there."""
        append_rows(self.folder / "rows.jsonl", rows)

    def save(self, progress: Progress) -> int:
        """Replace the checkpoint; returns how many rounds it holds."""
        tensors: Params = {}
        for place, state in enumerate(progress.states):
            tensors |= _flatten(f"{place}/last", state)
        for place, best in enumerate(progress.best):
            tensors |= _flatten(f"{place}/best", best[2]) if best else {}
        write_tensors(self.path, _unshare(tensors), self._header(progress))
        return progress.done

    def drop_tensors(self, progress: Progress | None = None) -> None:
        """Keep what the checkpoint says and let its tensors go: a finished case is known as such, and cannot go on."""
        about = (
            self._header(progress)
            if progress
            else read_metadata(self.path)
            if self.path.exists()
            else {}
        )
        if about and not about.get("tensors_dropped"):
            write_tensors(self.path, {}, {**about, "tensors_dropped": True})

    def require_tensors(self) -> None:
        """Refuse to go on from a checkpoint that was lightened."""
        if self.path.exists() and read_metadata(self.path).get("tensors_dropped"):
            raise InputError(
                f"resume: {self.folder} kept its figures only, so it cannot go on; start a new run in another folder"
            )

    def _header(self, progress: Progress) -> Json:
        kept = [best and best[:2] for best in progress.best]
        ledgers = [ledger.as_dict() for ledger in progress.ledgers]
        about = {
            "done": progress.done,
            "ledgers": ledgers,
            "best": kept,
            "fingerprint": self.fingerprint,
        }
        engines = [choice and _without_reason(choice) for choice in progress.choices]
        return {**about, "engine": engines if len(engines) > 1 else engines[0]}

    def rounds_done(self) -> int:
        """How many rounds the checkpoint holds, 0 if there is none; refused if it was made with something else."""
        if not self.path.exists():
            return 0
        about = read_metadata(self.path)
        if not isinstance(about.get("fingerprint"), dict):
            raise InputError(
                f"resume: {self.path} was not written by glocal; give the folder of a run"
            )
        _require_same_fingerprint(about["fingerprint"], self.fingerprint, self.folder)
        return int(about["done"])

    def load(self) -> Progress | None:
        """The progress that was saved, or None; rows written after it are dropped, they will come again."""
        progress = self.read()
        if progress is None:
            (self.folder / "rows.jsonl").unlink(missing_ok=True)
        else:
            self._drop_rows_after(self.fingerprint["plan"]["first_round"] + progress.done)
        return progress

    def read(self) -> Progress | None:
        """The progress that was saved, in the host's memory, or None; nothing on disk is changed."""
        if not self.rounds_done():
            return None
        self.require_tensors()
        tensors, about = read_tensors(self.path)
        states = [
            _unflatten(tensors, f"{place}/last", self._names(place))
            for place in range(len(about["ledgers"]))
        ]
        best = [
            (*kept, _unflatten(tensors, f"{place}/best", self._names(place))) if kept else None
            for place, kept in enumerate(about["best"])
        ]
        ledgers = [Ledger.from_dict(ledger) for ledger in about["ledgers"]]
        choices = tuple(map(_read_plan, _as_list(about.get("engine"))))
        return Progress(about["done"], states, ledgers, best, choices)

    def read_plan(self, part: str) -> ExecutionPlan | None:
        """What a part of the run, such as its rounds, settled on before its first step."""
        return _read_plan(self._engines().get(part))

    def save_plan(self, part: str, choice: ExecutionPlan) -> None:
        """Write down what a part settled on: a measurement after a stop might find another form."""
        engines = {**self._engines(), part: _without_reason(choice)}
        write_json(self.folder / "engine.json", {"fingerprint": self._digest(), "engines": engines})

    def _engines(self) -> Json:
        """What is written down, if it is of this run: a folder may be begun anew."""
        path = self.folder / "engine.json"
        kept: Json = read_json(path, dict) if path.exists() else {}
        engines = kept.get("engines")
        return (
            engines
            if kept.get("fingerprint") == self._digest() and isinstance(engines, dict)
            else {}
        )

    def _digest(self) -> str:
        """The fingerprint as one word."""
        told = json.dumps(self.fingerprint, sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def _names(self, place: int) -> Json:
        """The tensors of a place: all seeds have one model, each kind has its own."""
        models = _as_list(self.fingerprint["model"])
        names: Json = models[place if len(models) > 1 else 0]
        return names

    def _drop_rows_after(self, next_round: int) -> None:
        path = self.folder / "rows.jsonl"
        rows = [row for row in read_rows(path) if row["round"] < next_round]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _without_reason(choice: ExecutionPlan) -> Json:
    """A choice without its reason: how long each form took is another every time."""
    return {name: value for name, value in choice.as_dict().items() if name != "reason"}


def _read_plan(kept: object) -> ExecutionPlan | None:
    choice = ExecutionPlan.from_dict(kept)
    return choice and replace(choice, reason="as the run began")


def _as_list(one_or_more: Any) -> list[Any]:
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]


def _unshare(tensors: Params) -> Params:
    """Each tensor with memory of its own: a frozen one may be the same on all devices, and a file holds none twice."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return apart


def _flatten(prefix: str, state: State) -> Params:
    """A state as one flat tree: prefix/shared/NAME, prefix/initial/NAME, prefix/DEVICE/NAME."""
    parts = {"shared": state.shared, "initial": state.private.initial}
    parts |= {str(client): tree for client, tree in state.private.trained.items()}
    flat = {
        f"{prefix}/{part}/{name}": tensor
        for part, tree in parts.items()
        for name, tensor in tree.items()
    }
    # a device without private tensors has trained all the same
    return {
        **flat,
        f"{prefix}/trained": torch.tensor(sorted(state.private.trained), dtype=torch.int64),
    }


def _unflatten(tensors: Params, prefix: str, names: Json) -> State:
    """The state that was flattened; names come in the model's order, for the file has an order of its own."""

    def tree(part: str, side: str) -> Params:
        return {name: tensors[f"{prefix}/{part}/{name}"] for name in names[side]}

    trained = {
        client: tree(str(client), "private") for client in tensors[f"{prefix}/trained"].tolist()
    }
    return State(tree("shared", "shared"), PrivateStates(tree("initial", "private"), trained))


def _require_same_fingerprint(saved: Json, now: Json, folder: Path) -> None:
    """Refuse to continue a run with something else, and say what differs."""
    for key in dict.fromkeys([*now, *saved]):
        if saved.get(key) != now.get(key):
            was, is_ = (
                _first_difference(saved, now) if key == "model" else (saved.get(key), now.get(key))
            )
            raise InputError(
                f"resume: {folder} was made with another {key} ({was}) than the one given ({is_}); "
                f"go back to the old {key}, or start a new run in another folder"
            )


def _first_difference(saved: Json, now: Json) -> tuple[str, str]:
    """What differs between the first two models that are not the same."""
    models = zip(
        _as_list(saved["model"]), _as_list(now["model"]), strict=True
    )  # as many: kinds are compared first
    return next(_difference(was, is_) for was, is_ in models if was != is_)


def _difference(saved: Json, now: Json) -> tuple[str, str]:
    """The first tensor that differs, as it was and as it is."""
    for side in ("shared", "private"):
        for name in sorted({*saved[side], *now[side]}):
            was, is_ = saved[side].get(name), now[side].get(name)
            if was != is_:
                return _describe(side, name, was), _describe(side, name, is_)
    return "the same tensors in another order", "this order"


def _describe(side: str, name: str, shape: list[int] | None) -> str:
    return f"{side} '{name}' {tuple(shape)}" if shape is not None else f"no {side} '{name}'"
