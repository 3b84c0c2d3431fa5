"""Federations of one group side by side, simulated round by round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData
from glocal.core.sampling import Plan
from glocal.core.store import TrainingState
from glocal.core.trees import Params
from glocal.engines import EngineConfig, Executor
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    Reply,
    Round,
    build_executors,
    simulate,
    start_state,
    start_wires,
)

NUM_CALLS = 1000  # rounds of a usual study: `auto` chooses its engine for them


@dataclass(frozen=True)
class Simulation:
    """A replica per plan, all with the same clients, in their states before the first round."""

    replicas: tuple[Replica, ...]
    states: tuple[TrainingState, ...]
    executor: Executor[Reply]

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        params: Params,
        *,
        train: ClientData,
        plans: Sequence[Plan],
        engine: EngineConfig,
    ) -> "Simulation":
        """All replicas start from `params`."""
        setups = [GroupSetup(algorithm, params)]
        wires = start_wires(setups)
        groups = (GroupClients(algorithm, train, wires[0]),)
        state = start_state(setups, wires, replicas=len(plans))
        [executor] = build_executors(groups, engine, num_calls=NUM_CALLS)
        replicas = tuple(Replica(groups, plan) for plan in plans)
        return cls(replicas, (state,) * len(plans), executor)

    def rounds(self) -> Iterator[Round]:
        """All rounds of the plan, each with a state and a report per replica."""
        plan = self.replicas[0].plan
        rounds = range(plan.first_round, plan.total_rounds)
        return simulate(self.replicas, self.states, [self.executor], rounds)
