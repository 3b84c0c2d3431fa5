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
from glocal.deploy.flower.contract import Order
from glocal.deploy.project import Kit

NEVER = -1


class Kept(NamedTuple):
    """Private state before and after a round, the rounds these are of (-1: none yet), and the shared part seen last."""

    before: Params
    before_round: int
    after: Params
    after_round: int
    shared: Params


@dataclass(frozen=True)
class PrivateFile:
    """The private state of one device in one run."""

    path: Path
    kit: Kit
    device: int

    def load(self) -> Kept | None:
        """What was kept, or None; a file of another model, split, algorithm or device is refused by name."""
        if not self.path.exists():
            return None
        tensors, about = read_tensors(self.path)
        self._require_own(about)
        shared, private = self.kit.algorithm.init(self.kit.params)
        expected = {"before": private, "after": private, "shared": shared}
        trees = {part: self._part(tensors, part, like) for part, like in expected.items()}
        return Kept(trees["before"], about["before_round"], trees["after"], about["after_round"], trees["shared"])

    def start(self, order: Order) -> tuple[Params, str]:
        """The private state that a round starts from, and what is odd about it, if anything is."""
        kept = self.load()
        if kept is None:
            gone = f"its private state is gone, it begins anew (round {order.counted + 1} had counted)"
            return self.kit.algorithm.init(self.kit.params)[1], gone if order.counted > NEVER else ""
        if order.counted == kept.after_round:
            return kept.after, ""
        if order.counted == kept.before_round:
            return kept.before, ""
        was, counted = (f"round {number + 1}" if number > NEVER else "no round" for number in (kept.after_round, order.counted))
        return kept.after, f"its private state is of {was}, but {counted} was the last to count"

    def keep(self, kept: Kept) -> None:
        """Replace the file, in a folder that nobody else on the machine can read."""
        with suppress(OSError):  # writing says what is wrong
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.with_name(f"{self.path.name}.half").touch(mode=0o600)
        parts = {"before": kept.before, "after": kept.after, "shared": kept.shared}
        tensors = {f"{part}/{name}": tensor.clone() for part, tree in parts.items() for name, tensor in tree.items()}
        rounds = {"before_round": kept.before_round, "after_round": kept.after_round}
        write_tensors(self.path, tensors, {**rounds, "device": self.device, **self.kit.about()})

    def _part(self, tensors: Params, part: str, like: Params) -> Params:
        """One of the three trees; a file whose tensors are not what its header says is refused."""
        found = {name: tensors.get(f"{part}/{name}") for name in like}
        for name, tensor in found.items():
            if tensor is None or tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
                told = "missing" if tensor is None else f"{[*tensor.shape]} {tensor.dtype}"
                raise InputError(f"private state: {self.path} is damaged ('{part}/{name}' is {told}); restore it or move it away")
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _require_own(self, about: Json) -> None:
        if not {*self.kit.about(), "device", "before_round", "after_round"} <= about.keys():
            raise InputError(f"private state: {self.path} was not written by glocal; move it away")
        for key, now in {**self.kit.about(), "device": self.device}.items():
            if about[key] != now:
                was, is_ = (_told(about[key], now), _told(now, about[key])) if key == "model" else (about[key], now)
                raise InputError(
                    f"private state: {self.path} belongs to another {key} ({was}) than this one ({is_}); "
                    "move it away, or go back to the settings that it was made with"
                )


def _told(one: Json, other: Json) -> str:
    """The first tensor in which two models or splits differ, as one of them has it."""
    for side in ("shared", "private"):
        for name in sorted({*one[side], *other[side]}):
            if one[side].get(name) != other[side].get(name):
                return f"{side} '{name}' {one[side][name]}" if name in one[side] else f"no {side} '{name}'"
    return "the same tensors in another order"
