"""Trees of many clients on disk: a checkpoint writes only the trees that changed since the last.

Idea: trees are never changed in place, so a tree that is the same object is on disk already. New
ones go into a new file, stacked by name; an index, which is part of the checkpoint itself, says for
every client in which file and row its tree is. Where fewer than half of all rows on disk are still
in use, everything is written anew into one file.

Invariant: a file is never changed after it was written, and files are removed only after a
checkpoint that does not name them has replaced the last one. A crash leaves files that nothing
names; the next checkpoint removes them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import read_tensors, write_tensors
from glocal.core.trees import Params

_FEW = 64  # rows that are never worth writing anew
_NO_FILE = -1  # of a tree without tensors


class StatePart(NamedTuple):
    """Whose trees: of a state ("last" or "best"), and of which kind.

    Trees of one kind have the same names, shapes and types, and lie in one stack.
    """

    state: str
    kind: str


class Place(NamedTuple):
    """Where a tree is: the number of a file, and the row in its kind's stack."""

    file: int
    row: int


Index = dict[int, Place]
Rows = Mapping[int, Params]


@dataclass
class RowFiles:
    """The files in a folder, and which trees of this process are in them."""

    folder: Path
    known: dict[int, tuple[Params, Place]] = field(default_factory=dict)
    num_rows: dict[int, int] = field(default_factory=dict)
    next_file: int = 0

    def save(
        self, parts: Mapping[StatePart, Rows], *, anew: bool = False
    ) -> dict[StatePart, Index]:
        """Write what is not on disk yet; the index of every part.

        With `anew`, everything goes into one file, whose bytes depend on the trees alone.
        """
        live = {id(tree) for rows in parts.values() for tree in rows.values()}
        if anew or self._has_many_unused(live):
            self.known, self.num_rows = {}, {}
            self.next_file = 0 if anew else self.next_file
        new: dict[str, list[Params]] = {}
        indices: dict[StatePart, Index] = {}
        for part, rows in parts.items():
            index = Index()
            for client in sorted(rows):
                index[client] = self._find_or_add(rows[client], new.setdefault(part.kind, []))
            indices[part] = index
        self._write(new)
        self.known = {key: entry for key, entry in self.known.items() if key in live}
        return indices

    def read(
        self, indices: Mapping[StatePart, Index], names: Mapping[str, Sequence[str]]
    ) -> dict[StatePart, Rows]:
        """The trees of every part; a kind's `names` give the order of its tensors."""
        files = sorted(_files(indices.values()))
        tensors = {file: read_tensors(self._path(file))[0] for file in files}
        rows: dict[StatePart, Rows] = {}
        read: dict[tuple[str, Place], Params] = {}  # two states may have one and the same tree
        for part, index in indices.items():
            own: dict[int, Params] = {}
            for client, place in index.items():
                if (part.kind, place) not in read:
                    stacks = tensors.get(place.file, {})
                    tree = self._tree(stacks, part.kind, place, names[part.kind])
                    read[part.kind, place] = tree
                own[client] = read[part.kind, place]
            rows[part] = own
        self.num_rows = {file: _count_rows(stacks) for file, stacks in tensors.items()}
        self.next_file = max(files, default=-1) + 1
        return rows

    def remember(self, parts: Mapping[StatePart, Rows], indices: Mapping[StatePart, Index]) -> None:
        """Note that these trees of this process are what the files have."""
        for part, rows in parts.items():
            for client, tree in rows.items():
                self.known[id(tree)] = (tree, indices[part][client])

    def remove_unused(self, indices: Iterable[Index]) -> None:
        """Remove files that no index names."""
        used = _files(indices)
        self.num_rows = {file: rows for file, rows in self.num_rows.items() if file in used}
        if not self.folder.exists():
            return
        keep = {self._path(file) for file in used}
        for path in self.folder.glob("*.safetensors"):
            if path not in keep:
                path.unlink()
        if not keep:
            self.folder.rmdir()

    def _has_many_unused(self, live: set[int]) -> bool:
        written = sum(self.num_rows.values())
        in_use = len(live & self.known.keys())
        return written > _FEW and in_use < written / 2

    def _find_or_add(self, tree: Params, new: list[Params]) -> Place:
        """Where a tree is, or will be once the new ones are written."""
        if not tree:
            return Place(_NO_FILE, 0)
        entry = self.known.get(id(tree))
        if entry is not None:
            return entry[1]
        new.append(tree)
        place = Place(self.next_file, len(new) - 1)
        self.known[id(tree)] = (tree, place)
        return place

    def _write(self, new: Mapping[str, list[Params]]) -> None:
        total = sum(map(len, new.values()))
        if not total:
            return
        tensors: Params = {}
        for kind, rows in new.items():
            for name, stacked in trees.stack(rows).items() if rows else ():
                tensors[f"{kind}:{name}"] = stacked
        write_tensors(self._path(self.next_file), tensors, {})
        self.num_rows[self.next_file] = total
        self.next_file += 1

    def _tree(self, stacks: Params, kind: str, place: Place, names: Sequence[str]) -> Params:
        tree = {}
        for name in names:
            stack = stacks.get(f"{kind}:{name}")
            if stack is None or place.row >= len(stack):
                raise InputError(
                    f"run: {self._path(place.file)} has no row {place.row} of '{kind}:{name}'; "
                    "restore it from a copy or start the run anew"
                )
            tree[name] = stack[place.row].clone()
        return tree

    def _path(self, file: int) -> Path:
        return self.folder / f"{file:06d}.safetensors"


def _count_rows(stacks: Params) -> int:
    """The rows of all kinds in a file."""
    rows: dict[str, int] = {}
    for name, stack in stacks.items():
        rows[name.partition(":")[0]] = len(stack)
    return sum(rows.values())


def _files(indices: Iterable[Index]) -> set[int]:
    """The files that some indices name."""
    return {place.file for index in indices for place in index.values()} - {_NO_FILE}
