"""The driver: rounds, evaluation, checkpoints and the final tests of an experiment."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from glocal.core import trees
from glocal.core.checks import require_instance, require_path
from glocal.core.errors import InputError
from glocal.core.files import Json, lock_folder, read_rows, write_json
from glocal.core.metric import Metric
from glocal.core.spec import Spec, spec_of
from glocal.core.store import TrainingState
from glocal.engines import ExecutionPlan, Executor, ResolvedEngine
from glocal.federate.callbacks import notify, require_callbacks
from glocal.federate.checkpoint import Checkpoint, RunProgress
from glocal.federate.experiment import Experiment
from glocal.federate.group_result import GroupResult, save_models
from glocal.federate.options import Options
from glocal.federate.phases import late_clients, ledger_at_start, summarize_subgroups
from glocal.federate.preparation import prepare_experiment
from glocal.federate.pretraining import pretrain
from glocal.federate.records import RoundRecord
from glocal.federate.requirements import require_trainable
from glocal.federate.result import Result
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    Reply,
    Round,
    RoundReport,
    client_step,
    require_counted,
    simulate,
    start_state,
    start_wires,
)
from glocal.federate.scoring import Score, Scores, Scoring, Subgroups, personal_parts
from glocal.wire import Ledger, Wire


class Run:
    """An experiment that is carried out: iterate over its rounds, then `finish`.

    With a folder everything is saved there, and the same experiment goes on where it was stopped.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> experiment = glocal.Experiment.of(algorithm, data, glocal.Plan(2, clients_per_round=3))
    >>> run = glocal.Run(experiment)
    >>> [len(records[0].clients) for records in run]
    [3, 3]
    >>> run.finish().seeds
    (0,)
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        folder: Path | str | None = None,
        options: Options | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        require_callbacks(callbacks)
        require_instance("run: experiment", experiment, Experiment, "a glocal.Experiment")
        require_instance("run: options", options, Options | None, "a glocal.Options")
        self.options = options or Options()
        self.folder = None if folder is None else require_path("run: folder", folder)
        self.callbacks = list(callbacks)
        self.experiment = prepare_experiment(experiment)
        self.stop_reason = ""

    def __repr__(self) -> str:
        where = "" if self.folder is None else f", folder={str(self.folder)!r}"
        return f"Run({self.experiment!r}{where})"

    def stop(self, reason: str) -> None:
        """End the run after this round; what was trained is tested."""
        self.stop_reason = reason

    def require(self) -> None:
        """Refuse what would fail later; nothing is written before."""
        require_trainable(self.experiment)
        self.options.torch_device()

    def to_end(self) -> Result:
        """Train and test."""
        self.require()
        with lock_folder(self.folder):
            for _ in self:
                pass
            return self.finish()

    @property
    def criterion(self) -> Metric:
        """The metric that rounds are selected by."""
        return self.experiment.evaluation.criterion(self.experiment.algorithm.task)

    @cached_property
    def spec(self) -> Spec:
        """What must not change when the run is resumed."""
        spec: Json = dict(self.experiment.spec)
        if self.options.precision != "fp32":
            spec["precision"] = self.options.precision
        deciding = [each for each in self.callbacks if getattr(each, "changes_numbers", False)]
        if deciding:
            spec["callbacks"] = spec_of(deciding)
        return spec

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint in the folder, if there is one."""
        if self.folder is None:
            return None
        return Checkpoint(self.folder, self.spec, self._fresh_states)

    @cached_property
    def progress(self) -> RunProgress:
        """How far the run is; at first, the checkpoint's or that of a fresh start."""
        saved = self.checkpoint.load(self._device) if self.checkpoint else None
        return saved or self._fresh_progress()

    @cached_property
    def scores(self) -> list[float]:
        """The score of every evaluation, as the mean over seeds and groups."""
        by_round: dict[int, list[float]] = {}
        for row in read_rows(self.folder / "rows.jsonl") if self.folder else []:
            if row.get("validation") is not None:
                by_round.setdefault(row["round"], []).append(row["validation"])
        return [fmean(scores) for scores in by_round.values()]

    def __iter__(self) -> Iterator[list[RoundRecord]]:
        """Rounds one by one, each with a record per seed and group, saved as it is done."""
        self.stop_reason, _ = self.progress.stopped, self.scores
        with ExitStack() as stack:
            stack.callback(self._release)
            executors = self._executors(stack)
            notify(self.callbacks, "on_start", self)
            yield from self._saved_rounds(executors)

    def finish(self) -> Result:
        """The final tests; with a folder, results and models are saved there."""
        try:
            results = self._scoring.test_all(self.progress)
            result = Result.of(results)
            notify(self.callbacks, "on_end", self, result)
        except KeyboardInterrupt:
            if self.checkpoint:
                self.checkpoint.save(self.progress)
            raise
        finally:
            self._release()
        if self.checkpoint:
            self._save_results(self.checkpoint, results)
        return result

    # ---- what the run is made of

    @cached_property
    def _device(self) -> torch.device:
        return self.options.torch_device()

    @cached_property
    def _placed(self) -> Experiment:
        """The experiment with data and weights on torch's device."""
        return self.experiment.to(self._device)

    @cached_property
    def _setups(self) -> list[list[GroupSetup]]:
        """Every group's algorithm and the params that its clients start from, by seed."""
        by_seed: list[list[GroupSetup]] = []
        for place in range(len(self.experiment.seeds)):
            own: list[GroupSetup] = []
            for group in self.experiment.groups:
                params = trees.to(group.initial_params(place), self._device)
                own.append(GroupSetup(group.algorithm, params))
            by_seed.append(own)
        return by_seed

    @cached_property
    def _wires(self) -> tuple[Wire, ...]:
        return start_wires(self._setups[0], self.experiment.uplink)

    @cached_property
    def _fresh_states(self) -> tuple[TrainingState, ...]:
        replicas = len(self._setups)
        return tuple(start_state(own, self._wires, replicas=replicas) for own in self._setups)

    @cached_property
    def _scoring(self) -> Scoring:
        return Scoring(self._placed, self.options, self._resolve)

    def _fresh_progress(self) -> RunProgress:
        """The progress before the first round; clients pre-train here."""
        placed, ledgers = self._placed, list[tuple[Ledger, ...]]()
        for seed_place, state in enumerate(self._fresh_states):
            own: list[Ledger] = []
            for place in range(len(placed.groups)):
                local = self._local_part(state, place)
                own.append(ledger_at_start(placed, place, seed_place, local))
            ledgers.append(tuple(own))
        nothing = ((None,) * len(placed.groups),) * len(placed.seeds)
        states = self._fresh_states
        if placed.pretraining is not None:
            states = pretrain(placed, states, self.options, self._resolve)
        return RunProgress(0, states, tuple(ledgers), nothing, tuple({} for _ in states))

    def _local_part(self, state: TrainingState, place: int) -> trees.Params:
        """What a new client of a group is sent once, beside the shared tree."""
        return personal_parts(self._placed.groups[place].algorithm, state.group(place))[0]

    def _resolve(self, part: str, known: ExecutionPlan | None = None) -> ResolvedEngine:
        """The execution plan that a part of the run began with, and where to save a new one.

        A resumed run has the same rounding for that. The plan is in the checkpoint, or in the
        run's folder before the first checkpoint.
        """
        if self.checkpoint is None:
            return ResolvedEngine(known)
        known = known or self.checkpoint.read_plan(part)
        if known is not None and not known.allowed_by(self.options.engine_config()):
            known = None
        return ResolvedEngine(known, partial(self.checkpoint.save_plan, part))

    def _executors(self, stack: ExitStack) -> list[Executor[Reply]]:
        """The executor of each group's clients."""
        plans, executors = self.progress.plans, list[Executor[Reply]]()
        for place, group in enumerate(self._placed.groups):
            known = plans[place] if plans else None
            executor: Executor[Reply] = Executor(
                client_step(group.algorithm, self._wires[place]),
                engine=self.options.engine_config(),
                num_calls=self._placed.plan.rounds,
                **self._resolve(f"rounds {group.name}".strip(), known)._asdict(),
            )
            stack.callback(executor.close)
            executors.append(executor)
        return executors

    def _replicas(self, phase_place: int) -> list[Replica]:
        """The federation of every seed in a phase."""
        placed, replicas = self._placed, list[Replica]()
        phase, firsts = placed.all_phases[phase_place], placed.first_clients
        for seed_place, plan in enumerate(placed.plans()):
            groups: list[GroupClients] = []
            for place, group in enumerate(placed.groups):
                train = placed.data_at(phase_place, place, seed_place).train
                wire, first = self._wires[place], firsts[place]
                groups.append(GroupClients(group.algorithm, train, wire, first))
            availability = None if phase is None else phase.availability
            replicas.append(Replica(tuple(groups), plan, availability))
        return replicas

    def _release(self) -> None:
        """Release what evaluation and callbacks hold."""
        if "_scoring" in self.__dict__:
            self._scoring.close()
        for callback in self.callbacks:
            close = getattr(callback, "close", None)
            if close is not None:
                close()

    # ---- rounds

    def _rounds(self, executors: Sequence[Executor[Reply]]) -> Iterator[Round]:
        """The remaining rounds, phase by phase; each goes on with the state before it."""
        states: Sequence[TrainingState] = self.progress.states
        following = self._placed.plan.first_round + self.progress.done
        for phase_place, rounds in self._placed.stretches():
            remaining = range(max(following, rounds.start), rounds.stop)
            if not len(remaining):
                continue
            replicas = self._replicas(phase_place)
            for finished in simulate(replicas, states, executors, remaining):
                states = [state for state, _ in finished]
                yield finished

    def _saved_rounds(self, executors: Sequence[Executor[Reply]]) -> Iterator[list[RoundRecord]]:
        """Rounds one by one, each saved as it is done; also the last one before Ctrl-C."""
        saved, started = self.progress.done, time.perf_counter()
        if self.stop_reason:
            return
        try:
            for finished in self._rounds(executors):
                plans = tuple(executor.execution_plan for executor in executors)
                after, records = self._advance(finished, plans)
                now = time.perf_counter()
                records = [replace(record, seconds=now - started) for record in records]
                started = now
                if self.checkpoint:
                    self.checkpoint.append([record.as_row() for record in records])
                # Not before the rows are saved: a run that is stopped here repeats the round, and
                # writes all of its rows again.
                self.progress = after
                self._notify(records)
                self.progress = replace(self.progress, stopped=self.stop_reason)
                if self.checkpoint and self._is_due():
                    saved = self.checkpoint.save(self.progress, last=self._is_over)
                yield records
                if self.stop_reason:
                    return
        except (KeyboardInterrupt, GeneratorExit, InputError):
            if self.checkpoint and saved < self.progress.done:
                self.checkpoint.save(self.progress)
            raise

    @property
    def _is_over(self) -> bool:
        return bool(self.stop_reason) or self.progress.done == self.experiment.plan.rounds

    def _is_due(self) -> bool:
        """Whether a checkpoint is due."""
        is_last = self._is_over and self.options.save == "everything"
        return self.progress.done % self.options.checkpoint_every == 0 or is_last

    def _notify(self, records: Sequence[RoundRecord]) -> None:
        scores = [record.score for record in records if record.score is not None]
        if scores:
            self.scores.append(fmean(scores))
        notify(self.callbacks, "on_round", self, records)
        if any(record.validation or record.subgroups for record in records):
            notify(self.callbacks, "on_evaluation", self, records)

    def _advance(
        self, finished: Round, plans: tuple[ExecutionPlan | None, ...]
    ) -> tuple[RunProgress, list[RoundRecord]]:
        """The progress and the records after one round; after some rounds, with scores."""
        names = self.experiment.names()
        require_counted(finished, self._placed.seeds, lambda client: f"client {names[client]}")
        reports = [report for _, report in finished]
        index = reports[0].round_index
        progress = replace(
            self.progress,
            done=self.progress.done + 1,
            states=tuple(state for state, _ in finished),
            ledgers=self._ledgers_after(finished),
            dropped=self._dropped_after(reports),
            plans=plans,
        )
        scores: Scores = {}
        is_validated = progress.done % self._placed.evaluation.every == 0
        if is_validated:
            progress, scores = self._scoring.validate(progress, index)
        tables: Subgroups = {}
        if index in self._scoring.evaluated_rounds:
            progress, tables = self._scoring.test_subgroups(progress, index, validated=is_validated)
        return progress, self._records(progress, reports, scores, tables)

    def _ledgers_after(self, finished: Round) -> tuple[tuple[Ledger, ...], ...]:
        """The traffic so far; clients that join after a warm start are sent their local part."""
        after: list[tuple[Ledger, ...]] = []
        for before, (state, report) in zip(self.progress.ledgers, finished, strict=True):
            own: list[Ledger] = []
            for place, (ledger, traffic) in enumerate(zip(before, report.traffic, strict=True)):
                ledger = ledger + traffic
                late = late_clients(self._placed, place, report.round_index)
                if late:
                    ledger = ledger.add_warm_start(self._local_part(state, place), late)
                own.append(ledger)
            after.append(tuple(own))
        return tuple(after)

    def _dropped_after(self, reports: Sequence[RoundReport]) -> tuple[dict[int, int], ...]:
        """How often each client was left out because its upload was not finite."""
        after: list[dict[int, int]] = []
        for before, report in zip(self.progress.dropped, reports, strict=True):
            counts = dict(before)
            for client in report.dropped:
                counts[client] = counts.get(client, 0) + 1
            after.append(counts)
        return tuple(after)

    def _records(
        self,
        progress: RunProgress,
        reports: Sequence[RoundReport],
        scores: Scores,
        tables: Subgroups,
    ) -> list[RoundRecord]:
        records: list[RoundRecord] = []
        names = self.experiment.names()
        for seed_place, report in enumerate(reports):
            for place, group in enumerate(self._placed.groups):
                first = self._placed.first_clients[place]
                members = range(first, first + group.num_clients)
                score = scores.get((seed_place, place), Score())
                own = [client for client in report.clients.tolist() if client in members]
                dropped = [names[client] for client in report.dropped if client in members]
                record = RoundRecord(
                    seed=self._placed.seeds[seed_place],
                    group=group.name,
                    round_index=report.round_index,
                    done=progress.done,
                    rounds=self._placed.plan.rounds,
                    loss=report.mean_loss(members),
                    clients=tuple(own),
                    dropped=tuple(dropped),
                    ledger=progress.ledgers[seed_place][place],
                    criterion=self._scoring.criterion(place),
                    score=score.value,
                    validation=score.by_metric,
                    num_validated=score.num_clients,
                    subgroups=tables.get((seed_place, place)),
                )
                records.append(record)
        return records

    # ---- the end

    def _save_results(self, checkpoint: Checkpoint, results: Sequence[GroupResult]) -> None:
        folder = checkpoint.folder
        if self.options.save == "everything":
            for result in results:
                save_models(result, folder / "models" / result.group / f"seed-{result.seed}")
        tables = [result.as_dict() for result in results]
        if self._placed.phases:
            rows = read_rows(folder / "rows.jsonl")
            names = [group.name for group in self._placed.groups]
            for result, table in zip(results, tables, strict=True):
                place = names.index(result.group)
                table["subgroups"] = summarize_subgroups(rows, self._placed, place, result.seed)
        write_json(folder / "result.json", tables)
        if self.options.save == "metrics":
            checkpoint.drop_tensors(self.progress)
