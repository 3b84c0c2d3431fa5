"""A client's private state on its own disk: written whole or not at all, refused if not its own.

The private state of a round is valid only once the server says that its average includes the
client's upload. Until then the file also has the state before the round. A round that is repeated
after a crash, on either side, starts from that state again.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from glocal.algorithms.contract import Message
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import Json, read_tensors, write_tensors
from glocal.core.spec import Spec, describe_spec, first_difference
from glocal.core.trees import Params
from glocal.deploy.flower.protocol import Instructions
from glocal.deploy.setup import TrainingSetup
from glocal.wire import Schema

NO_ROUND = -1


class PrivateState(NamedTuple):
    """Private state before and after a round, and the message that came last.

    A private state is what the algorithm keeps and what the codec remembers. `before_round` and
    `after_round` are the rounds of the two, NO_ROUND before the first.
    """

    before: Params
    before_round: int
    after: Params
    after_round: int
    message: Message


@dataclass(frozen=True)
class PrivateStateFile:
    """The file with the private state of one client in one run."""

    path: Path
    setup: TrainingSetup
    client: int

    def load(self) -> PrivateState | None:
        """The stored state or None; one of another model, algorithm or client is refused."""
        if not self.path.exists():
            return None
        tensors, header = read_tensors(self.path)
        self._require_same_owner(header)
        wire = self.setup.wire
        return PrivateState(
            before=self._read_tree(tensors, "before", wire.private),
            before_round=header["before_round"],
            after=self._read_tree(tensors, "after", wire.private),
            after_round=header["after_round"],
            message=self._read_tree(tensors, "message", wire.download),
        )

    def starting_state(self, instructions: Instructions) -> tuple[Params, str]:
        """The private state that a round starts from, and a note if it is not as expected."""
        state, last = self.load(), instructions.last_included
        if state is None:
            initial = self.setup.private
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
        parts = {"before": state.before, "after": state.after, "message": state.message}
        tensors: Params = {}
        for part, tree in parts.items():
            tensors |= trees.with_prefix(f"{part}/", tree)
        copied = {name: tensor.clone() for name, tensor in tensors.items()}
        rounds = {"before_round": state.before_round, "after_round": state.after_round}
        header = {**rounds, "client": self.client, **self.setup.about}
        write_tensors(self.path, copied, header)

    def _read_tree(self, tensors: Params, part: str, schema: Schema) -> Params:
        """One of the three trees; tensors that do not fit the header are refused."""
        tree = {}
        for name, expected in schema.items():
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
        if not header.keys() >= {"model", "algorithm", "client", "before_round", "after_round"}:
            raise InputError(f"private state: {self.path} was not written by glocal; move it away")
        for key, own in {**self.setup.about, "client": self.client}.items():
            if header.get(key) == own:
                continue
            stored, current = _differing(key, header.get(key), own)
            raise InputError(
                f"private state: {self.path} belongs to another {key} ({stored}) than this one "
                f"({current}); move it away, or go back to the settings that it was made with"
            )


def _round_name(index: int) -> str:
    return "no round" if index == NO_ROUND else f"round {index + 1}"


def _differing(key: str, stored: Spec, own: Spec) -> tuple[str, str]:
    """In a few words each, what a file has and what is expected, where they differ first."""
    if key == "model":
        return _model_difference(stored, own), _model_difference(own, stored)
    difference = first_difference(stored, own)
    assert difference is not None
    place, before, after = difference
    place = f"{place} " if place else ""
    return f"{place}{describe_spec(before)}", f"{place}{describe_spec(after)}"


def _model_difference(model: Json, other: Json) -> str:
    """The first tensor in which a model or split differs from another one."""
    for side in ("shared", "private"):
        for name in sorted({*model[side], *other[side]}):
            if model[side].get(name) == other[side].get(name):
                continue
            if name in model[side]:
                return f"{side} '{name}' {model[side][name]}"
            return f"no {side} '{name}'"
    return "the same tensors in another order"
