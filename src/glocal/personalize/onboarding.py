"""A new device meets a trained federation: it borrows models, learns its local part alone, or joins the rounds.

Nothing that is here already changes: every function returns a new state, and the old one keeps its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from glocal.algorithms.contract import Algorithm, frozen
from glocal.core import trees
from glocal.core.bounds import CLIENTS, EPOCHS, ROUNDS, count, require_counts
from glocal.core.data import Examples, Holdings, Rows
from glocal.core.errors import DivergedError, InputError, nearest
from glocal.core.modules import params_of, predictor, state_dict
from glocal.core.sampling import Attendance, Plan, in_batches, stream
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.engines import Engine, OverDevices, Task
from glocal.evaluate import Credit, Evaluation, ensemble_accuracy, ensemble_classes, matching
from glocal.federate.fitting import outputs_of
from glocal.federate.result import Result
from glocal.federate.rounds import Seat, begin, simulate_seeds
from glocal.wire import Ledger

_BATCH = 256
_LEAST_STEPS = 100  # a handful of labels is visited until that many steps were taken


class Host(NamedTuple):
    """A trained federation as a newcomer meets it; the newcomer's number is `devices`, the next one."""

    algorithm: Algorithm
    model: nn.Module
    plan: Plan
    state: State
    devices: int
    credit: Credit = matching

    @classmethod
    def of(cls, result: Result) -> "Host":
        """From what `fit` returned."""
        return cls(result.algorithm, result.structure, result.plan, result.state, len(result.sampled), result.credit)


@dataclass(frozen=True)
class Welcome:
    """How a newcomer is taken in: its local part alone for `epochs`, then `rounds` together with `guests` of the old devices each.

    Its local part starts as every device's did ("initial"), or as the mean of all trained ones ("average"): better, but for that
    every trained device has to show its local part to the server once.
    """

    epochs: int = count(20, least=0, most=EPOCHS)
    rounds: int = count(0, least=0, most=ROUNDS)
    guests: int = count(0, least=0, most=CLIENTS)
    start: str = "initial"

    def __post_init__(self) -> None:
        require_counts("join: ", self)
        if self.start not in ("initial", "average"):
            raise InputError(f"join: start is '{self.start}'; it must be 'initial' or 'average'")


class Joined(NamedTuple):
    """The federation with the newcomer in it, as number `device`, and what joining cost."""

    state: State
    device: int
    ledger: Ledger

    def params(self, algorithm: Algorithm) -> Params:
        """What the newcomer predicts with."""
        return algorithm.personal(self.state.shared, self.state.private.of(self.device))

    def state_dict(self, host: Host) -> Params:
        """The same as a plain state dict of the network."""
        return state_dict(host.model, self.params(host.algorithm))


def join(
    host: Host, train: Examples, *, old: Holdings | None = None, welcome: Welcome | None = None, engine: Engine | str = "auto"
) -> Joined:
    """Take one newcomer in, by its labelled examples; `old` are the training data of the devices that are asked as guests."""
    how = welcome or Welcome()
    if not len(train.y):
        raise InputError("join: the device has no labelled example, so that nothing can be learnt; use the ensemble instead")
    _require_fit(host, train)
    if how.rounds and how.guests and old is None:
        raise InputError(f"join: {how.guests} guests were asked for, but not their data; give old=, or guests=0")
    crowd = beside(train, old if how.rounds and how.guests else None, host.devices)
    if how.epochs:
        how = replace(how, epochs=_passes(len(train.y), host.plan.batch, how.epochs))
    return take_in(host.algorithm, [Seat(host.plan, crowd, host.state)], how, engine=engine)[0]


def _require_fit(host: Host, train: Examples) -> None:
    """Refuse inputs that the network cannot take, and labels that it does not know."""
    classes, labels = outputs_of(host.model, train.x), train.y
    if labels.is_floating_point() or bool(((labels < 0) | (labels >= classes)).any()):
        raise InputError(f"join: labels from 0 to {classes - 1} were expected; the device has {labels.min()} to {labels.max()}")


def beside(train: Examples, old: Holdings | None, devices: int) -> Holdings:
    """The newcomer's examples as those of the last device, beside the old ones' if they are to train too."""
    if old is None:
        absent: Rows = np.zeros(0, dtype=np.int64)
        return Holdings(train, (*(absent for _ in range(devices)), np.arange(len(train.y), dtype=np.int64)))
    x, y, _ = old.examples
    store = Examples(torch.cat([x, train.x.to(x.device)]), torch.cat([y, train.y.to(y.device)]))
    return Holdings(store, (*old.rows, np.arange(len(y), len(store.y), dtype=np.int64)))


def take_in(algorithm: Algorithm, seats: Sequence[Seat], welcome: Welcome, *, engine: Engine | str = "auto") -> list[Joined]:
    """The last device of each of several federations side by side is new: let it learn its local part, then join the rounds."""
    device = seats[0].train.devices - 1
    require_room(algorithm, [seat.state for seat in seats], welcome, device)
    joined = [_arrived(seat, welcome, device) for seat in seats]
    seats = [seat._replace(state=state) for seat, (state, _, _) in zip(seats, joined, strict=True)]
    if algorithm.settle is not None and welcome.epochs:
        by_epochs = [seat._replace(plan=replace(seat.plan, epochs=1)) for seat in seats]
        states = [state for state, _ in _rounds(frozen(algorithm), _attended(by_epochs, welcome.epochs, (), device), engine)]
        seats = [_later(seat, state, welcome.epochs) for seat, state in zip(seats, states, strict=True)]
    outcomes = [(seat.state, Ledger()) for seat in seats]
    if welcome.rounds:
        present = range(device) if welcome.guests else ()
        guested = [seat._replace(plan=replace(seat.plan, cohort=max(welcome.guests, 1))) for seat in seats]
        outcomes = _rounds(algorithm, _attended(guested, welcome.rounds, present, device), engine)
    return [Joined(state, device, met.ledger + ledger) for (state, ledger), met in zip(outcomes, joined, strict=True)]


def require_room(algorithm: Algorithm, states: Sequence[State], welcome: Welcome, device: int) -> None:
    """Refuse a newcomer who is there already, for whom there is no place, or who would learn nothing."""
    if algorithm.devices is not None:
        raise InputError(f"join: {algorithm.name} is made for {algorithm.devices} devices, and has no place for one more")
    if any(device in state.private.trained for state in states):
        raise InputError(f"join: device {device} is in this federation already; a newcomer needs the next free number")
    if welcome.guests > device:
        raise InputError(f"join: {welcome.guests} guests were asked for, but there are {device} devices; ask for fewer")
    if not welcome.rounds and (algorithm.settle is None or not welcome.epochs):
        why = f"{algorithm.name} keeps nothing local" if algorithm.settle is None else "epochs and rounds are 0"
        raise InputError(f"join: {why}, so that nothing would be learnt; let it join some rounds")


def _arrived(seat: Seat, welcome: Welcome, device: int) -> Joined:
    """The newcomer before it learns: it has received the shared tree once, and the local part that it starts from."""
    state, ledger = seat.state, Ledger().after_start({**seat.state.shared, **seat.state.private.initial}, 1)
    if welcome.start == "average" and state.private.trained and state.private.initial:
        members = [state.private.of(member) for member in sorted(state.private.trained)]
        mean = trees.mean(trees.stack(members), torch.ones(len(members), device=next(iter(members[0].values())).device))
        ledger = ledger.after_ensemble(state.private.initial, {}, trained=len(members), devices=0)
        state = State(state.shared, state.private.put([device], [mean]))
    return Joined(state, device, ledger)


def _attended(seats: Sequence[Seat], rounds: int, present: Sequence[int], always: int) -> list[Seat]:
    """Seats for some rounds after the last, in which one device always takes part."""
    attendance = Attendance.of(present, always=[always])
    return [
        seat._replace(plan=replace(seat.plan, first_round=seat.plan.last_round, rounds=rounds), attendance=attendance)
        for seat in seats
    ]


def _later(seat: Seat, state: State, rounds: int) -> Seat:
    """The seat after some rounds more."""
    return seat._replace(state=state, plan=replace(seat.plan, rounds=seat.plan.rounds + rounds))


def _rounds(algorithm: Algorithm, seats: Sequence[Seat], engine: Engine | str) -> list[tuple[State, Ledger]]:
    """The states after all rounds, and what was sent in them."""
    over = OverDevices(algorithm.client_update, engine=engine, calls=seats[0].plan.rounds)
    states, ledgers = [seat.state for seat in seats], [Ledger() for _ in seats]
    try:
        for moment in simulate_seeds(algorithm, seats, over):
            states = [state for state, _ in moment]
            if not all(bool(torch.isfinite(report.losses).all()) for _, report in moment):
                raise DivergedError("join: training diverged, a loss is not finite; lower the learning rate")
            ledgers = [ledger + report.traffic for ledger, (_, report) in zip(ledgers, moment, strict=True)]
    finally:
        over.close()
    return list(zip(states, ledgers, strict=True))


def members(host: Host, sample: Tensor, *, by: str = "everyone", count: int = 10) -> list[int]:
    """Whose models a newcomer without labels borrows, judged by what they say about a sample of its inputs (rows, ...).

    "everyone" who has trained; the `count` most "confident" (lowest entropy on average); or the `count` "nearest" to what all
    together say (smallest total variation on average).
    """
    judges = {"everyone": None, "confident": _entropy, "nearest": _distance}
    if by not in judges or count < 1:
        raise InputError(f"join: by is '{by}' and count {count}; at least 1 of a known way was expected; {nearest(by, judges)}")
    trained, judge = sorted(host.state.private.trained), judges[by]
    if not trained or not host.state.private.initial:
        return trained[:1]
    if judge is None or count >= len(trained):
        return trained
    if not len(sample):
        raise InputError(f"join: '{by}' needs a sample of the device's inputs; give some, or use 'everyone'")
    order = torch.argsort(judge(_said(host, trained, sample)), stable=True)
    return sorted(trained[place] for place in order[:count].tolist())


def _entropy(said: Tensor) -> Tensor:
    """How unsure each member is on average (members,), from probabilities (members, rows, classes)."""
    return -(said * said.clamp(min=1e-12).log()).sum(-1).mean(-1)


def _distance(said: Tensor) -> Tensor:
    """How far each member is from all together on average (members,)."""
    return (said - said.mean(0)).abs().sum(-1).mean(-1) / 2


@torch.no_grad()
def _said(host: Host, trained: Sequence[int], sample: Tensor) -> Tensor:
    """The probabilities that each member gives (members, rows, classes), in double precision."""
    order = in_batches(np.arange(len(sample), dtype=np.int64), _BATCH)
    examples = Examples(sample, torch.zeros(len(sample), dtype=torch.int64, device=sample.device))
    evaluation = Evaluation(host.algorithm, predictor(host.model), engine="vmapped")
    tasks = [Task(host.state.shared, host.state.private.of(member), order) for member in trained]
    outputs = evaluation.outputs(tasks, examples).stacked().flatten(1, 2)[:, : len(sample)]
    evaluation.close()
    return outputs.double().softmax(-1)


def borrowed_accuracy(host: Host, chosen: Sequence[int], test: Examples) -> float:
    """Accuracy of the averaged logits of some members on a newcomer's examples."""
    trees_of = [(host.state.shared, host.state.private.of(member)) for member in chosen]
    return _accuracy(host, trees_of or [(host.state.shared, host.state.private.initial)], test)


def joined_accuracy(host: Host, joined: Joined, test: Examples) -> float:
    """Accuracy of the newcomer's own model."""
    return _accuracy(host, [(joined.state.shared, joined.state.private.of(joined.device))], test)


def borrowed_classes(host: Host, chosen: Sequence[int], inputs: Tensor) -> list[int]:
    """The classes that the averaged logits of some members give to a newcomer's inputs (rows, ...)."""
    unknown = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device))
    holdings = Holdings(unknown, (np.arange(len(inputs), dtype=np.int64),))
    evaluation = Evaluation(host.algorithm, predictor(host.model))
    models = [(host.state.shared, host.state.private.of(member)) for member in chosen]
    classes: list[int] = ensemble_classes(evaluation, models, holdings).tolist()
    evaluation.close()
    return classes


def _accuracy(host: Host, models: Sequence[tuple[Params, Params]], test: Examples) -> float:
    if not len(test.y):
        raise InputError("join: there is no labelled example to test on; give some")
    evaluation = Evaluation(host.algorithm, predictor(host.model), credit=host.credit)
    holdings = Holdings(test, (np.arange(len(test.y), dtype=np.int64),))
    accuracy = ensemble_accuracy(evaluation, models, holdings)
    evaluation.close()
    return accuracy


def few(train: Examples, labels: int | None, *, seed: int) -> Examples:
    """Some labelled examples of a newcomer, drawn at random; more are a superset of fewer. All if None."""
    if labels is None:
        return train
    if not 0 <= labels <= len(train.y):
        raise InputError(f"join: {labels} labelled examples were asked for, but the device has {len(train.y)}; ask for fewer")
    order = stream(seed, "labels").permutation(len(train.y))
    return train.take(np.sort(order[:labels]))


def alone(host: Host, train: Examples, *, epochs: int, engine: Engine | str = "auto") -> Joined:
    """The same network from fresh weights on the newcomer's examples only: what it would have without a federation."""
    fresh = begin(host.algorithm, trees.to(params_of(host.model), train.y.device))
    lonely = host._replace(state=fresh, devices=0, plan=replace(host.plan, rounds=1, first_round=0))
    return join(lonely, train, welcome=Welcome(epochs=0, rounds=_passes(len(train.y), host.plan.batch, epochs)), engine=engine)


def _passes(examples: int, batch: int, epochs: int) -> int:
    """How often to visit the examples: a handful of them more often."""
    return max(epochs, -(-_LEAST_STEPS // -(-examples // batch)))
