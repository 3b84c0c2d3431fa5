"""Runs of a deployment in this process, beside the simulator's run of the same study."""

from dataclasses import replace

from glocal.core.sampling import Availability
from glocal.datasets.fetch import no_progress
from glocal.deploy.client import RunClient
from glocal.deploy.flower.server_app import run_to_end
from glocal.deploy.project import Project
from glocal.deploy.registry import read_registry
from glocal.deploy.server import RunServer
from glocal.engines import Executor
from glocal.federate.rounds import Seat, initial_state, simulate, simulate_seeds
from glocal.studies.build import build_algorithm, build_components
from tests.support.deployed import InProcessGrid, change, copy_to_clients


def simulated_rounds(folder):
    """Every round of the same study in the simulator: its state and its report."""
    project = Project.from_folder(folder)
    project.make_importable()
    parts = build_components(project.study, no_progress)
    algorithm = build_algorithm(
        project.study, next(iter(project.study.experiments.values())), parts
    )
    train = parts.federations[0].train
    return list(simulate(algorithm, parts.params[0], train, project.plan, engine="looped"))


def simulated(folder):
    """The last state of the same study in the simulator, and the bytes that it sent."""
    rounds = simulated_rounds(folder)
    return rounds[-1][0], sum(report.traffic.total.bytes for _, report in rounds)


def run_here(folder, grid=None, run="first", **more):
    grid = grid or InProcessGrid(folder)
    server = RunServer(Project.from_folder(folder), run, **more)
    run_to_end(grid, server)
    return server


def private_of(folder, number, run="first"):
    client = RunClient.from_folder(folder / "clients" / read_registry(folder)[number].name)
    return client.private(run).load()


def with_availability(folder, absent):
    """The simulator's state where, by round, some clients did not train."""
    project = Project.from_folder(folder)
    project.make_importable()
    parts = build_components(project.study, no_progress)
    algorithm = build_algorithm(
        project.study, next(iter(project.study.experiments.values())), parts
    )
    train, state = parts.federations[0].train, initial_state(algorithm, parts.params[0])
    for round_index in range(project.plan.rounds):
        clients = range(train.num_clients)
        availability = Availability.of(clients, dropouts=absent.get(round_index, []))
        plan = replace(project.plan, rounds=1, first_round=round_index)
        seat = Seat(plan, train, state, availability)
        state, _ = next(
            simulate_seeds(algorithm, [seat], Executor(algorithm.client_update, engine="looped"))
        )[0]
    return state


def secured(folder):
    change(
        folder / "deploy.toml", "adapt_epochs = 20", "adapt_epochs = 20\nsecure_aggregation = true"
    )
    copy_to_clients(folder)
    return folder
