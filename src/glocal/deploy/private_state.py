"""What a device remembers, on its own disk: written whole or not at all, and refused if it belongs to something else.

A round's private state counts only once the server says that the device's answer did. Until then the state before it is kept as
well, so that a round that is asked for again, after a crash on either side, starts from where it did the first time.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from glocal.core.errors import InputError
from glocal.core.files import Json, read_tensors, write_tensors
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Instructions
from glocal.deploy.project import TrainingSetup

NO_ROUND = -1


class PrivateState(NamedTuple):
    """Private state before and after a round, the rounds these are of (-1: none yet), and the shared part seen last."""

    before: Params
    before_round: int
    after: Params
    after_round: int
    shared: Params


@dataclass(frozen=True)
class PrivateStateFile:
    """The private state of one device in one run."""

    path: Path
    setup: TrainingSetup
    client: int

    def load(self) -> PrivateState | None:
        """What was kept, or None; a file of another model, split, algorithm or device is refused by name."""
        if not self.path.exists():
            return None
        tensors, about = read_tensors(self.path)
        self._require_same_owner(about)
        shared, private = self.setup.algorithm.init(self.setup.params)
        expected = {"before": private, "after": private, "shared": shared}
        trees = {part: self._read_tree(tensors, part, like) for part, like in expected.items()}
        return PrivateState(
            trees["before"],
            about["before_round"],
            trees["after"],
            about["start_round"],
            trees["shared"],
        )

    def starting_state(self, order: Instructions) -> tuple[Params, str]:
        """The private state that a round starts from, and what is odd about it, if anything is."""
        kept = self.load()
        if kept is None:
            gone = f"its private state is gone, it begins anew (round {order.last_included + 1} had counted)"
            return self.setup.algorithm.init(self.setup.params)[
                1
            ], gone if order.last_included > NO_ROUND else ""
        if order.last_included == kept.after_round:
            return kept.after, ""
        if order.last_included == kept.before_round:
            return kept.before, ""
        was, last_included = (
            f"round {number + 1}" if number > NO_ROUND else "no round"
            for number in (kept.after_round, order.last_included)
        )
        return (
            kept.after,
            f"its private state is of {was}, but {last_included} was the last to count",
        )

    def save(self, kept: PrivateState) -> None:
        """Replace the file, in a folder that nobody else on the machine can read."""
        with suppress(OSError):  # writing says what is wrong
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.with_name(f"{self.path.name}.half").touch(mode=0o600)
        parts = {"before": kept.before, "after": kept.after, "shared": kept.shared}
        tensors = {
            f"{part}/{name}": tensor.clone()
            for part, tree in parts.items()
            for name, tensor in tree.items()
        }
        rounds = {"before_round": kept.before_round, "start_round": kept.after_round}
        write_tensors(self.path, tensors, {**rounds, "client": self.client, **self.setup.about()})

    def _read_tree(self, tensors: Params, part: str, like: Params) -> Params:
        """One of the three trees; a file whose tensors are not what its header says is refused."""
        found = {name: tensors.get(f"{part}/{name}") for name in like}
        for name, tensor in found.items():
            if (
                tensor is None
                or tensor.shape != like[name].shape
                or tensor.dtype != like[name].dtype
            ):
                told = "missing" if tensor is None else f"{[*tensor.shape]} {tensor.dtype}"
                raise InputError(
                    f"private state: {self.path} is damaged ('{part}/{name}' is {told}); restore it or move it away"
                )
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _require_same_owner(self, about: Json) -> None:
        if not {*self.setup.about(), "client", "before_round", "start_round"} <= about.keys():
            raise InputError(f"private state: {self.path} was not written by glocal; move it away")
        for key, now in {**self.setup.about(), "client": self.client}.items():
            if about[key] != now:
                was, is_ = (
                    (_first_difference(about[key], now), _first_difference(now, about[key]))
                    if key == "model"
                    else (about[key], now)
                )
                raise InputError(
                    f"private state: {self.path} belongs to another {key} ({was}) than this one ({is_}); "
                    "move it away, or go back to the settings that it was made with"
                )


def _first_difference(one: Json, other: Json) -> str:
    """The first tensor in which two models or splits differ, as one of them has it."""
    for side in ("shared", "private"):
        for name in sorted({*one[side], *other[side]}):
            if one[side].get(name) != other[side].get(name):
                return (
                    f"{side} '{name}' {one[side][name]}"
                    if name in one[side]
                    else f"no {side} '{name}'"
                )
    return "the same tensors in another order"
