"""A client's private state on its own disk: written whole or not at all, refused if not its own.

The private state of a round is valid only once the server says that its average includes the
client's upload. Until then the file also has the state before the round. A round that is repeated
after a crash, on either side, starts from that state again.
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
    """Private state before and after a round, and the shared part that came last.

    `before_round` and `after_round` are the rounds of the two states, NO_ROUND before the first.
    """

    before: Params
    before_round: int
    after: Params
    after_round: int
    shared: Params


@dataclass(frozen=True)
class PrivateStateFile:
    """The file with the private state of one client in one run."""

    path: Path
    setup: TrainingSetup
    client: int

    def load(self) -> PrivateState | None:
        """The stored state or None; one of another model, split, algorithm or client is refused."""
        if not self.path.exists():
            return None
        tensors, header = read_tensors(self.path)
        self._require_same_owner(header)
        shared, private = self.setup.algorithm.init(self.setup.params)
        return PrivateState(
            before=self._read_tree(tensors, "before", private),
            before_round=header["before_round"],
            after=self._read_tree(tensors, "after", private),
            after_round=header["after_round"],
            shared=self._read_tree(tensors, "shared", shared),
        )

    def starting_state(self, instructions: Instructions) -> tuple[Params, str]:
        """The private state that a round starts from, and a note if it is not as expected."""
        state, last = self.load(), instructions.last_included
        if state is None:
            initial = self.setup.algorithm.init(self.setup.params)[1]
            if last == NO_ROUND:
                return initial, ""
            return initial, f"its private state is gone, it starts anew after {_round_name(last)}"
        if last == state.after_round:
            return state.after, ""
        if last == state.before_round:
            return state.before, ""
        note = (
            f"its private state is of {_round_name(state.after_round)}, "
            f"but its last included upload is of {_round_name(last)}"
        )
        return state.after, note

    def save(self, state: PrivateState) -> None:
        """Replace the file, in a folder that only its owner can read."""
        with suppress(OSError):  # `write_tensors` reports the error
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.with_name(f"{self.path.name}.half").touch(mode=0o600)
        trees = {"before": state.before, "after": state.after, "shared": state.shared}
        tensors = {}
        for part, tree in trees.items():
            for name, tensor in tree.items():
                tensors[f"{part}/{name}"] = tensor.clone()
        rounds = {"before_round": state.before_round, "after_round": state.after_round}
        header = {**rounds, "client": self.client, **self.setup.about()}
        write_tensors(self.path, tensors, header)

    def _read_tree(self, tensors: Params, part: str, like: Params) -> Params:
        """One of the three trees; tensors that do not fit the header are refused."""
        tree = {}
        for name, expected in like.items():
            tensor = tensors.get(f"{part}/{name}")
            if tensor is None:
                raise self._damaged(f"'{part}/{name}' is missing")
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise self._damaged(f"'{part}/{name}' is {[*tensor.shape]} {tensor.dtype}")
            tree[name] = tensor
        return tree

    def _damaged(self, reason: str) -> InputError:
        return InputError(
            f"private state: {self.path} is damaged ({reason}); restore it or move it away"
        )

    def _require_same_owner(self, header: Json) -> None:
        expected = {**self.setup.about(), "client": self.client}
        if not {*expected, "before_round", "after_round"} <= header.keys():
            raise InputError(f"private state: {self.path} was not written by glocal; move it away")
        for key, own in expected.items():
            if header[key] == own:
                continue
            stored: object = header[key]
            current: object = own
            if key == "model":
                stored = _first_difference(header[key], own)
                current = _first_difference(own, header[key])
            raise InputError(
                f"private state: {self.path} belongs to another {key} ({stored}) than this one "
                f"({current}); move it away, or go back to the settings that it was made with"
            )


def _round_name(index: int) -> str:
    return "no round" if index == NO_ROUND else f"round {index + 1}"


def _first_difference(model: Json, other: Json) -> str:
    """The first tensor in which a model or split differs from another one."""
    for side in ("shared", "private"):
        for name in sorted({*model[side], *other[side]}):
            if model[side].get(name) == other[side].get(name):
                continue
            if name in model[side]:
                return f"{side} '{name}' {model[side][name]}"
            return f"no {side} '{name}'"
    return "the same tensors in another order"
