"""Evaluation during a run, and its final tests: validation scores, selection, New Test."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from glocal.algorithms.contract import Algorithm
from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.files import Json
from glocal.core.metric import Metric
from glocal.core.model_tensors import client_tensors
from glocal.core.sampling import make_rng
from glocal.core.store import GroupState, TrainingState
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ResolvedEngine
from glocal.evaluate import Evaluator, Figures, local_figures, new_test
from glocal.federate.checkpoint import Best, RunProgress
from glocal.federate.experiment import Experiment
from glocal.federate.group_result import GroupResult
from glocal.federate.options import Options
from glocal.federate.phases import (
    clients_only,
    evaluated_rounds,
    present_models,
    subgroup_figures,
    without_absent,
)
from glocal.wire import Ledger, split_private


class Score(NamedTuple):
    """What a group's clients reach on validation data, as means over clients.

    `value` is the metric that rounds are selected by; None if nobody has validation data.
    """

    value: float | None = None
    by_metric: dict[str, float | None] = {}  # noqa: RUF012  (never changed)
    num_clients: int = 0

    @classmethod
    def of(cls, figures: dict[str, Figures], criterion: Metric, data: ClientData) -> "Score":
        """From the figures of clients with this validation data."""
        means = {name: each.summary().mean for name, each in figures.items()}
        return cls(means[criterion.name], means, int(np.count_nonzero(data.sizes)))


Scores = dict[tuple[int, int], Score]  # by seed and group
Subgroups = dict[tuple[int, int], Json]  # a table of subgroups, by seed and group


class Scoring:
    """The evaluators of an experiment whose data are on torch's device."""

    def __init__(
        self,
        experiment: Experiment,
        options: Options,
        resolve: Callable[[str], ResolvedEngine],
    ) -> None:
        self.experiment = experiment
        self.evaluated_rounds = evaluated_rounds(experiment) if experiment.phases else set[int]()
        self.evaluators: list[Evaluator] = []
        for group in experiment.groups:
            resolved = partial(_resolve_part, resolve, group.name)
            evaluator = Evaluator(
                group.algorithm, engine=options.engine_config(), resolved=resolved
            )
            self.evaluators.append(evaluator)

    def close(self) -> None:
        """Release workers and graphs."""
        for evaluator in self.evaluators:
            evaluator.close()

    def criterion(self, place: int) -> Metric:
        """The metric that a group's rounds are selected by."""
        task = self.experiment.groups[place].algorithm.task
        return self.experiment.evaluation.criterion(task)

    def validate(self, progress: RunProgress, round_index: int) -> tuple[RunProgress, Scores]:
        """The scores of all seeds and groups; the shared tree is sent to the clients for them."""
        scores: Scores = {}
        ledgers = [list(own) for own in progress.ledgers]
        best = [list(own) for own in progress.best]
        seeds = range(len(progress.states))
        for place, evaluator in enumerate(self.evaluators):
            data = [self._validation_sample(place, seed, round_index) for seed in seeds]
            models = [progress.states[seed].group(place) for seed in seeds]
            figures = local_figures(evaluator, models, data)
            for seed in seeds:
                score = Score.of(figures[seed], self.criterion(place), data[seed])
                state = progress.states[seed]
                scores[seed, place] = score
                ledger = ledgers[seed][place]
                ledgers[seed][place] = ledger.add_evaluation(state.shared, score.num_clients)
                if self._is_better(score.value, best[seed][place], place):
                    assert score.value is not None
                    best[seed][place] = Best(score.value, progress.done, state)
        evaluated = replace(
            progress, ledgers=tuple(map(tuple, ledgers)), best=tuple(map(tuple, best))
        )
        return evaluated, scores

    def test_subgroups(
        self, progress: RunProgress, round_index: int, *, validated: bool
    ) -> tuple[RunProgress, Subgroups]:
        """The metric by subgroup, over all clients of a group that were present so far."""
        tables: Subgroups = {}
        ledgers = [list(own) for own in progress.ledgers]
        for place, evaluator in enumerate(self.evaluators):
            figures = subgroup_figures(
                self.experiment, evaluator, progress.states, place, round_index
            )
            for seed, state in enumerate(progress.states):
                tables[seed, place] = figures[seed]
                here = self.data_now(place, seed, round_index)
                # whoever was validated just now has the shared tree already
                reached = (here.test.sizes > 0) & ~(validated & (here.val.sizes > 0))
                count = int(np.count_nonzero(reached))
                ledgers[seed][place] = ledgers[seed][place].add_evaluation(state.shared, count)
        return replace(progress, ledgers=tuple(map(tuple, ledgers))), tables

    def data_now(self, place: int, seed_place: int, round_index: int) -> FederatedData:
        """A group's data in a round; absent clients have no validation and test data."""
        experiment = self.experiment
        phase_place = experiment.phase_at(round_index)
        data = experiment.data_at(phase_place, place, seed_place)
        first = experiment.first_clients[place]
        return without_absent(data, experiment.all_phases[phase_place], first)

    def test_all(self, progress: RunProgress) -> list[GroupResult]:
        """The final tests of all seeds and groups: the selected round on test data."""
        results: list[GroupResult] = []
        for seed_place in range(len(progress.states)):
            for place in range(len(self.evaluators)):
                results.append(self._test(progress, seed_place, place))
        return results

    def _test(self, progress: RunProgress, seed_place: int, place: int) -> GroupResult:
        experiment = self.experiment
        group, plan = experiment.groups[place], experiment.plans()[seed_place]
        total = plan.first_round + max(progress.done, 1)
        data = self.data_now(place, seed_place, total - 1)
        done, state = self._selected(progress, seed_place, place)
        evaluator, first = self.evaluators[place], experiment.first_clients[place]
        phase = experiment.all_phases[experiment.phase_at(total - 1)]
        models = present_models(state.group(place), phase, first, group.num_clients)
        [test] = local_figures(evaluator, [models], [data.test])
        [validation] = local_figures(evaluator, [models], [data.val])
        members, new = experiment.evaluation.new_test_members, None
        if experiment.evaluation.new_test:
            new = new_test(evaluator, models, data.test, max_members=members, seed=plan.seed)
        own = slice(first, first + group.num_clients)
        dropped = progress.dropped[seed_place]
        return GroupResult(
            group=group.name,
            algorithm=group.algorithm,
            plan=replace(plan, rounds=max(progress.done, 1)),
            state=state.group(place),
            selected_round=plan.first_round + done,
            test=test,
            validation=validation,
            new=new,
            ledger=self._final_ledger(progress, seed_place, place, (state, models, data)),
            sizes={
                "train": data.train.sizes.tolist(),
                "val": data.val.sizes.tolist(),
                "test": data.test.sizes.tolist(),
            },
            times_sampled=experiment.times_sampled(plan.seed, done)[own].tolist(),
            times_dropped=[dropped.get(client, 0) for client in range(own.start, own.stop)],
            names=group.data[0].names,
            stopped=progress.stopped,
            uplink=experiment.uplink,
        )

    def _selected(
        self, progress: RunProgress, seed_place: int, place: int
    ) -> tuple[int, TrainingState]:
        """The round to test and its state: the last one, or an earlier one with a better score."""
        last, best = progress.states[seed_place], progress.best[seed_place][place]
        if best is None:
            return progress.done, last
        val = self._validation_sample(place, seed_place, self.experiment.plan.first_round)
        [figures] = local_figures(self.evaluators[place], [last.group(place)], [val])
        score = figures[self.criterion(place).name].summary().mean
        if score is None or self._is_better(score, best, place):
            return progress.done, last
        return best.done, best.state

    def _is_better(self, score: float | None, best: Best | None, place: int) -> bool:
        """Whether a score is the best so far, where earlier rounds may be selected."""
        if score is None or not self.experiment.evaluation.selects:
            return False
        if best is None:
            return True
        is_higher = score > best.score
        return is_higher if self.criterion(place).higher_is_better else score < best.score

    def _validation_sample(self, place: int, seed_place: int, round_index: int) -> ClientData:
        """The validation data of at most so many clients as the evaluation asks."""
        data = self.data_now(place, seed_place, round_index).val
        most, able = self.experiment.evaluation.clients, np.flatnonzero(data.sizes)
        if most is None or len(able) <= most:
            return data
        rng = make_rng(self.experiment.seeds[seed_place], "evaluation", place)
        return clients_only(data, {*rng.choice(able, most, replace=False).tolist()})

    def _final_ledger(
        self,
        progress: RunProgress,
        seed_place: int,
        place: int,
        tested: tuple[TrainingState, GroupState, FederatedData],
    ) -> Ledger:
        """All traffic of a seed and group, that of the final tests included."""
        (state, models, data), evaluation = tested, self.experiment.evaluation
        ledger = progress.ledgers[seed_place][place]
        ledger = ledger.add_evaluation(state.shared, int(np.count_nonzero(data.test.sizes)))
        if evaluation.selects and progress.done % evaluation.every:
            # `_selected` validated the last round too, which no round did
            first_round = self.experiment.plan.first_round
            val = self._validation_sample(place, seed_place, first_round)
            last = progress.states[seed_place]
            ledger = ledger.add_evaluation(last.shared, int(np.count_nonzero(val.sizes)))
        if not evaluation.new_test:
            return ledger
        algorithm = self.experiment.groups[place].algorithm
        local, whole = personal_parts(algorithm, state.group(place))
        return ledger.add_ensemble(
            local,
            whole,
            num_trained=len(models.private.stored),
            num_clients=data.num_clients if state.shared else 0,
        )


def _resolve_part(
    resolve: Callable[[str], ResolvedEngine], group: str, part: str
) -> ResolvedEngine:
    return resolve(f"{part} {group}".strip())


def personal_parts(algorithm: Algorithm, state: GroupState) -> tuple[Params, Params]:
    """Of an untrained client's model, the tensors that are not shared, and all.

    Tensors of a pretext's network are left out: no other client uses them, so none is sent.
    """
    own, _ = split_private(state.private.initial)
    personal = algorithm.personal(state.shared, own)
    whole = trees.pick(personal, client_tensors(algorithm.task.model))
    local = {name: tensor for name, tensor in whole.items() if tensor is not state.shared.get(name)}
    return local, whole
