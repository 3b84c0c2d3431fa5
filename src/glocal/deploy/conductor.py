"""What the server decides and keeps: who is asked, which answers count, where a run goes on after a crash."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from glocal.core import trees
from glocal.core.errors import InputError, brief
from glocal.core.files import (
    Json,
    append_rows,
    read_about,
    read_json,
    read_rows,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)
from glocal.core.sampling import Attendance, choose_present
from glocal.core.trees import Params
from glocal.deploy.flower.contract import Order, Reply
from glocal.deploy.project import Kit, Project
from glocal.deploy.roster import Entry, active, read_roster
from glocal.evaluate import spread
from glocal.evaluate.privacy import epsilon
from glocal.wire import Ledger, Upload, UploadError

RUNS, CHECKPOINT, ROWS, LIVE, RESULT, OWNER = "runs", "checkpoint.safetensors", "rows.jsonl", "live.json", "result.json", "owner"
ASKED = "asked.json"
ELSEWHERE = "it has been resumed elsewhere"


@dataclass(frozen=True)
class Standing:
    """How far a run has come; by device number: the last round that counted, how many did, the last round it was there in."""

    shared: Params
    done: int = 0
    ledger: Ledger = Ledger()
    counted: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    founders: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()


@dataclass
class RunConductor:
    """One run of a project. What must survive is in `standing`, and on disk after every round; the rest is who is here now."""

    project: Project
    run: str
    visiting: bool = False
    standing: Standing = field(init=False)
    known: dict[int, int] = field(default_factory=dict)  # node -> device, of those that are connected, by their keys
    present: dict[int, int] = field(default_factory=dict)  # node -> device, of those that have introduced themselves
    refused: dict[int, str] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    live: Json = field(default_factory=dict)
    since: float | None = field(default_factory=time.monotonic)  # when waiting for devices began; None while nobody is lacking
    started: float = 0.0
    begun: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        shared = self.kit.algorithm.init(self.kit.params)[0]
        kept = read_standing(self.folder / CHECKPOINT, self.kit)
        self.standing = kept or Standing(shared, founders=tuple(sorted(self.roster())))
        self._drop_rows()
        write_text(self.folder / OWNER, self.token)
        self._show("waiting for devices", round=self.round_index, rounds=self.project.plan.rounds)

    @property
    def kit(self) -> Kit:
        """Algorithm and model."""
        return self.project.kit

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return self.project.folder / RUNS / self.run

    @property
    def shared(self) -> Params:
        """The shared tree as it is now."""
        return self.standing.shared

    @property
    def secure(self) -> bool:
        """Whether only the mean of uploads is seen."""
        return self.project.deployment.secure

    @property
    def heaviest(self) -> float:
        """The largest weight of those that are asked, as they said when they came."""
        return float(max(self.weights.get(node, 1) for node in self.asked))

    @property
    def rounds_left(self) -> int:
        """How many rounds are still to be done."""
        return 0 if self.visiting else max(self.project.plan.rounds - self.standing.done, 0)

    @property
    def round_wait(self) -> float:
        """For how long answers are waited for."""
        return self.project.deployment.limits.round

    @property
    def greeting_wait(self) -> float:
        """For how long a greeting is: one that hangs is greeted before every round, and must not hold up all of them."""
        return min(self.project.deployment.limits.everyone, self.round_wait)

    @property
    def round_index(self) -> int:
        """The round that comes next, or is under way."""
        return self.project.plan.first_round + self.standing.done

    def roster(self) -> dict[int, Entry]:
        """Who belongs to the federation; read anew, for devices may be added or revoked while a run lasts."""
        return active(read_roster(self.project.folder))

    def strangers(self, nodes: Mapping[int, str]) -> dict[int, Order]:
        """Nodes with a key of the roster that have not introduced themselves."""
        own = {entry.ssh_key: number for number, entry in self.roster().items()}
        self.known = {node: own[key] for node, key in sorted(nodes.items()) if key in own}
        fresh = [node for node in self.known if node not in self.present and node not in self.refused]
        return {node: self._order(self.known[node]) for node in fresh}

    def meet(self, greetings: Mapping[int, Reply]) -> None:
        """Take in who has the same algorithm and model; the others are named, and not asked in this run.

        Who was lost while it was greeted has said nothing wrong: it is greeted again when it is back.
        """
        for node, reply in greetings.items():
            device = self.known.get(node)
            if reply.lost or device is None:
                continue
            told = reply.figures or {}
            fault = reply.fault or _difference(told, device, self.kit.fingerprint)
            if fault:
                self.refused[node] = fault
                self._show(refused=self._told_refused())
            else:
                self.present[node], self.weights[node] = device, max(int(told.get("weight", 1)), 1)
        self._show(connected=self._told_names(self._here().values()))

    def _told_refused(self) -> dict[str, str]:
        """Who is refused, by name, and why."""
        names = self._names()
        return {names[self.known[node]]: why for node, why in self.refused.items() if node in self.known}

    def lacks(self) -> bool:
        """Everybody is waited for before the first round, for a while; enough devices before every other, for longer."""
        limits, here = self.project.deployment.limits, self._here()
        self.since = time.monotonic() if self.since is None else self.since
        waited = time.monotonic() - self.since
        refused = [f"{name}: {why}" for name, why in self._told_refused().items()]
        everyone = len(here) >= len(self.roster()) - len(refused)
        if len(here) >= limits.enough and (everyone or self.begun or waited > limits.everyone):
            self.begun, self.since = True, None
            return False
        if waited > limits.gather or (everyone and refused):  # nobody is left who could still come
            told = f" (refused: {'; '.join(refused)})" if refused else ""
            raise InputError(
                f"run: {len(here)} devices are there after {waited:.0f} s, and {limits.enough} are needed{told}; start more devices"
            )
        return True

    def newcomers(self) -> dict[int, Order]:
        """Who came after the federation was founded, and has not learnt its private part yet, neither alone nor in a round."""
        if self.kit.algorithm.settle is None or not self.project.deployment.settle or not self.standing.done:
            return {}
        known, epochs = {*self.standing.founders, *self.standing.settled, *self.standing.counted}, self.project.deployment.settle
        return {node: replace(self._order(device), epochs=epochs) for node, device in self._here().items() if device not in known}

    def settled(self, replies: Mapping[int, Reply]) -> None:
        """Remember who has settled in."""
        good = [self.present[node] for node, reply in replies.items() if not reply.fault]
        ledger = self.standing.ledger.after_start(self.shared, len(replies))
        self.standing = replace(self.standing, settled=(*self.standing.settled, *good), ledger=ledger)
        if replies:
            self._keep()

    def orders(self) -> dict[int, Order]:
        """The cohort of the next round, drawn from who is there as the simulator draws it."""
        here = self._here()
        if not here:
            raise InputError("run: no device is there; start some")
        cohort = {*choose_present(self.project.plan, Attendance.of(sorted(here.values())), self.round_index).tolist()}
        self.asked = {node: device for node, device in here.items() if device in cohort}
        orders = {node: self._order(device) for node, device in self.asked.items()}
        names, connected = self._told_names(self.asked.values()), self._told_names(here.values())
        self._show("training", round=self.round_index, asked=names, answered=[], connected=connected)
        self.started = time.monotonic()
        seen = {**self.standing.seen, **{device: self.round_index for device in here.values()}}
        self.standing = replace(self.standing, seen=seen)
        if self.project.deployment.privacy is not None:
            asked = self._times_asked()
            write_json(self.folder / ASKED, {**asked, **{str(device): asked.get(str(device), 0) + 1 for device in cohort}})
        return orders

    def heard(self, node: int) -> None:
        """Show that an answer has come."""
        if node in self.asked:
            self._show(answered=[*self.live.get("answered", []), *self._told_names([self.asked[node]])])

    def collect(self, replies: Mapping[int, Reply]) -> Json:
        """Check all answers, average the good ones in the order of devices, keep the round."""
        uploads, dropped = self._checked(replies)
        if not uploads:
            told = "; ".join(f"{name}: {why}" for name, why in dropped.items())
            raise InputError(f"run: round {self.round_index + 1} has no valid answer ({told}); put it right")
        devices = sorted(uploads)
        stacked = trees.stack([uploads[device][0].tensors for device in devices])
        weights = torch.tensor([uploads[device][1] for device in devices])
        shared = self.kit.algorithm.aggregate(self.shared, stacked, weights)
        kept = {name: tensor.clone() for name, tensor in shared.items()}
        return self._end_round(kept, stacked, devices, self._row(replies, dropped, devices))

    def collect_mean(self, mean: Params | None, replies: Mapping[int, Reply]) -> Json:
        """The mean itself is what is checked; who dropped out is known, and why is not."""
        names = self._names()
        lost = {names[device]: "it did not stay until the end" for node, device in self.asked.items() if node not in replies}
        try:
            shared = Upload(mean or {}, self.shared).tensors
        except UploadError as error:
            told = f"too few of {', '.join(lost)} stayed until the end" if lost else str(error)
            raise InputError(
                f"run: round {self.round_index + 1} could not be unmasked ({told}); see to it that they stay"
            ) from error
        devices = sorted(self.asked[node] for node in replies)
        stacked = {name: tensor.expand(len(devices), *tensor.shape) for name, tensor in shared.items()}
        return self._end_round(shared, stacked, devices, self._row(replies, lost, devices))

    def _end_round(self, shared: Params, uploads: Params, devices: list[int], row: Json) -> Json:
        """Keep a round and show it."""
        self._advance(shared, uploads, devices)
        row["bytes"] = self.standing.ledger.total.bytes
        append_rows(self.folder / ROWS, [row])
        told = {"loss": row["loss"], "bytes": row["bytes"], "dropped": row["dropped"]}
        self._show("training", round=self.round_index, connected=self._told_names(self._here().values()), **told)
        return row

    def _checked(self, replies: Mapping[int, Reply]) -> tuple[dict[int, tuple[Upload, int]], dict[str, str]]:
        """Uploads and weights of the good answers by device, and why the others are dropped."""
        good: dict[int, tuple[Upload, int]] = {}
        dropped, names = {}, self._names()
        for node, device in self.asked.items():
            reply = replies.get(node, Reply({}, fault=f"no answer within {self.round_wait:.0f} s"))
            try:
                if reply.fault or reply.examples < 1:
                    raise UploadError(reply.fault or f"it counts {reply.examples} examples")
                good[device] = (
                    Upload({name: reply.tensors[name] for name in _in_order(reply.tensors, self.shared)}, self.shared),
                    reply.examples,
                )
            except UploadError as error:
                dropped[names[device]] = str(error)
                if node not in replies or reply.lost:
                    self.present.pop(node, None)  # it is greeted again when it comes back
        return good, dropped

    def _row(self, replies: Mapping[int, Reply], dropped: dict[str, str], devices: list[int]) -> Json:
        """What is written down of a round."""
        figures = {self.asked[node]: reply.figures or {} for node, reply in replies.items() if node in self.asked}
        names, here = self._names(), {*self._here().values()}
        losses = {names[device]: figures[device]["loss"] for device in devices if "loss" in figures[device]}
        notes = {names[device]: told["note"] for device, told in figures.items() if "note" in told}
        away = [entry.name for number, entry in self.roster().items() if number not in here]
        return {
            "round": self.round_index,
            "devices": self._told_names(devices),
            "losses": losses,
            "loss": sum(losses.values()) / len(losses) if losses else None,
            "dropped": dropped,
            "notes": notes,
            "away": away,
            "seconds": round(time.monotonic() - self.started, 2),
        }

    def _advance(self, shared: Params, uploads: Params, devices: list[int]) -> None:
        """The standing after a round, on disk."""
        now, number = self.standing, self.round_index
        counted = {**now.counted, **{device: number for device in devices}}
        times = {**now.times, **{device: now.times.get(device, 0) + 1 for device in devices}}
        ledger = now.ledger.after_round(self.shared, uploads, cohort=len(self.asked), devices=len(self.roster()))
        self.standing = replace(now, shared=shared, done=now.done + 1, ledger=ledger, counted=counted, times=times)
        self._keep()

    def questions(self) -> dict[int, Order]:
        """Everybody who is there tests, every so many rounds and in the end."""
        every = self.project.deployment.test_every
        last = not self.rounds_left
        if not last and (every is None or self.standing.done % every):
            self.asked = {}
            return {}
        self.asked = self._here()
        self._show("testing", asked=self._told_names(self.asked.values()), answered=[])
        return {node: self._order(device) for node, device in self.asked.items()}

    def tested(self, replies: Mapping[int, Reply]) -> Json:
        """Each device's figures, where its owner consents."""
        ledger = self.standing.ledger.after_evaluation(self.shared, len(self.asked))
        self.standing = replace(self.standing, ledger=ledger)
        self._keep()
        figures = {self.asked[node]: reply.figures or {} for node, reply in replies.items() if node in self.asked}
        shown = {
            number: entry
            for number, entry in read_roster(self.project.folder).items()
            if not entry.revoked or number in self.standing.times
        }
        devices = [self._told(number, entry, figures.get(number, {})) for number, entry in shown.items()]
        scored = [row for row in devices if row["test"] is not None]
        sizes, scores = (torch.tensor([row[key] or 0 for row in scored]).numpy() for key in ("test_size", "test"))
        result: Json = {
            "run": self.run,
            "algorithm": self.kit.algorithm.name,
            "rounds": self.standing.done,
            "local_test": spread(scores, sizes)._asdict() if scored else None,
            "devices": devices,
            "ledger": self.standing.ledger.as_dict(),
            "privacy": self._privacy(),
        }
        write_json(self.folder / RESULT, result)
        self._show(bytes=self.standing.ledger.total.bytes, privacy=result["privacy"])
        return {"test": result["local_test"]["mean"]} if scored else {}

    def _told(self, number: int, entry: Entry, figures: Json) -> Json:
        kept = {name: figures.get(name) for name in ("test", "validation", "train", "test_size", "validation_size")}
        rounds = {"rounds": self.standing.times.get(number, 0), "last": self.standing.counted.get(number)}
        return {"device": number, "name": entry.name, **rounds, **kept, "newcomer": number not in self.standing.founders}

    def _privacy(self) -> Json | None:
        """What the accountant says of the device that was asked most often: what it sent was seen, whether or not it counted."""
        bounds, asked = self.project.deployment.privacy, self._times_asked()
        if bounds is None or not asked:
            return None
        times = max(asked.values())
        return {**asdict(bounds), "rounds": times, "epsilon": epsilon(bounds.noise, times, bounds.delta)}

    def _times_asked(self) -> dict[str, int]:
        """How often each device was asked for an upload, by number; on disk before it is asked, so that no crash forgets one."""
        asked: dict[str, int] = read_json(self.folder / ASKED, dict) if (self.folder / ASKED).exists() else {}
        return asked

    def finish(self) -> None:
        """Show that all is done."""
        self._show("done", asked=[], answered=[])

    def failed(self, error: BaseException) -> None:
        """Show why it ended."""
        self._show("failed", why=str(error) if isinstance(error, InputError) else f"{brief(error)}; put it right")

    def _here(self) -> dict[int, int]:
        """Who is connected and known: node -> device."""
        return {node: device for node, device in self.present.items() if node in self.known}

    def _order(self, device: int) -> Order:
        return Order(self.run, self.round_index, self.standing.counted.get(device, -1), missed=self._missed(device))

    def _missed(self, device: int) -> str:
        """What happened while a device was away."""
        last = self.standing.seen.get(device)
        if last is None or last >= self.round_index - 1:
            return ""
        gone = [row for row in read_rows(self.folder / ROWS) if last < row["round"] < self.round_index]
        if not gone:
            return ""
        losses = [row["loss"] for row in gone if row["loss"] is not None]
        trend = f"; the mean loss went from {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
        first, last = gone[0]["round"] + 1, gone[-1]["round"] + 1
        return f"{f'round {first}' if len(gone) == 1 else f'{len(gone)} rounds, {first} to {last}'}{trend}"

    def _names(self) -> dict[int, str]:
        """What devices are called; one that has been taken off the roster in the meantime goes by its number."""
        numbered = {device: f"device {device}" for device in (*self.present.values(), *self.asked.values())}
        return numbered | {number: entry.name for number, entry in read_roster(self.project.folder).items()}

    def _told_names(self, devices: Iterable[int]) -> list[str]:
        names = self._names()
        return [names[device] for device in sorted(devices)]

    def _show(self, state: str | None = None, **told: object) -> None:
        """Write down what is going on, for `status` and whoever watches."""
        self.live = {**self.live, **told, "run": self.run, "updated": time.time()}
        if state is not None:
            self.live["state"] = state
        if self._owned():  # else another server speaks for the run by now
            write_json(self.folder / LIVE, self.live)

    def _keep(self) -> None:
        if not self._owned():
            raise InputError(f"run: {ELSEWHERE}; this server has no part in it any more")
        write_standing(self.folder / CHECKPOINT, self.standing, self.kit)

    def _owned(self) -> bool:
        return (self.folder / OWNER).read_text(encoding="utf-8") == self.token

    def _drop_rows(self) -> None:
        """Rows after the checkpoint will come again."""
        rows = [row for row in read_rows(self.folder / ROWS) if row["round"] < self.round_index]
        write_text(self.folder / ROWS, "".join(json.dumps(row) + "\n" for row in rows))


def write_standing(path: Path, standing: Standing, kit: Kit) -> None:
    """Replace the checkpoint."""
    by_device = {name: {str(key): value for key, value in getattr(standing, name).items()} for name in ("counted", "times", "seen")}
    plain = {"done": standing.done, "founders": standing.founders, "settled": standing.settled, "ledger": standing.ledger.as_dict()}
    write_tensors(path, standing.shared, {**plain, **by_device, **kit.about(), "fingerprint": kit.fingerprint})


def read_standing(path: Path, kit: Kit) -> Standing | None:
    """The checkpoint, if there is one; that of another algorithm or model is refused."""
    if not path.exists():
        return None
    tensors, about = read_tensors(path)
    if about.get("fingerprint") != kit.fingerprint:
        raise InputError(f"resume: {path} was made with other settings or another model than there are now; go back to those")
    counted, times, seen = ({int(key): value for key, value in about[name].items()} for name in ("counted", "times", "seen"))
    shared = {name: tensors[name] for name in kit.algorithm.init(kit.params)[0]}
    founders, settled = (tuple(about[name]) for name in ("founders", "settled"))
    return Standing(shared, about["done"], Ledger.from_dict(about["ledger"]), counted, times, seen, founders, settled)


def rounds_done(folder: Path, run: str) -> int | None:
    """How many rounds a run has behind it, None if it never began."""
    path = folder / RUNS / run / CHECKPOINT
    if not path.exists():
        return None
    done = read_about(path).get("done")
    if not isinstance(done, int):
        raise InputError(f"resume: {path} was not written by glocal; restore it, or give another --run")
    return done


def _difference(told: Json, number: int, fingerprint: str) -> str:
    if told.get("device") != number:
        return f"it says it is device {told.get('device')}, but its key is that of device {number}"
    if told.get("fingerprint") != fingerprint:
        return "its study.toml, deploy.toml or model is not the server's; copy the server's files to it"
    return ""


def _in_order(given: Params, like: Params) -> list[str]:
    """The names of a tree, those that are expected first and in their order."""
    return [*(name for name in like if name in given), *(name for name in given if name not in like)]
