"""Runs of a deployment in this process, beside the simulator's run of the same study."""

from glocal.core.sampling import Availability
from glocal.datasets.fetch import no_progress
from glocal.deploy.client import RunClient
from glocal.deploy.flower.server_app import run_to_end
from glocal.deploy.project import Project
from glocal.deploy.registry import read_registry
from glocal.deploy.server import RunServer
from glocal.federate.experiment import Experiment
from glocal.federate.options import Evaluation, Options
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    build_executors,
    simulate,
    start_state,
    start_wires,
)
from glocal.federate.run import Run
from glocal.studies.build import build_algorithm, build_components
from glocal.wire import parse_codec
from tests.support.deployed import InProcessGrid, change, copy_to_clients


def study_of(folder):
    """The algorithm, the data and the codec of a folder's study, as the simulator has them."""
    project = Project.from_folder(folder)
    project.make_importable()
    parts = build_components(project.study, no_progress)
    experiment = next(iter(project.study.experiments.values()))
    algorithm = build_algorithm(project.study, experiment, parts)
    codec = parse_codec(project.study.plan.uplink or (), "plan.uplink")
    return project.plan, algorithm, parts.federations[0], codec


def simulator(folder):
    """The same study as a `Run`."""
    plan, algorithm, data, codec = study_of(folder)
    evaluation = Evaluation(every=plan.rounds, new_test=False)
    settings = {"seeds": (plan.seed,), "evaluation": evaluation, "uplink": codec}
    return Run(Experiment.of(algorithm, data, plan, **settings), options=Options(engine="looped"))


def simulated_run(folder):
    """What `Run` has after the last round of the same study."""
    run = simulator(folder)
    for _ in run:
        pass
    return run.progress


def simulated_rounds(folder, absent=None):
    """Every round of the same study in the simulator: its state and its report.

    By round, some clients are sampled and do not answer.
    """
    plan, algorithm, data, codec = study_of(folder)
    setup = GroupSetup(algorithm, algorithm.task.initial_params())
    wires = start_wires([setup], codec)
    state, rounds = start_state([setup], wires), []
    clients = range(data.num_clients)
    group = GroupClients(algorithm, data.train, wires[0])
    executors = build_executors([group], "looped", num_calls=plan.rounds)
    for index in range(plan.rounds):
        availability = Availability.of(clients, dropouts=(absent or {}).get(index, []))
        replica = Replica((group,), plan, availability if absent else None)
        [[(state, report)]] = simulate([replica], [state], executors, range(index, index + 1))
        rounds.append((state.group(), report))
    return rounds


def simulated(folder):
    """The last state of the same study in the simulator, and the bytes that it sent."""
    rounds = simulated_rounds(folder)
    return rounds[-1][0], sum(report.traffic[0].total.bytes for _, report in rounds)


def with_availability(folder, absent):
    """The simulator's state where, by round, some clients did not train."""
    return simulated_rounds(folder, absent)[-1][0]


def run_here(folder, grid=None, run="first", **more):
    grid = grid or InProcessGrid(folder)
    server = RunServer(Project.from_folder(folder), run, **more)
    run_to_end(grid, server)
    return server


def private_of(folder, number, run="first"):
    client = RunClient.from_folder(folder / "clients" / read_registry(folder)[number].name)
    return client.private(run).load()


def secured(folder):
    change(
        folder / "deploy.toml", "adapt_epochs = 20", "adapt_epochs = 20\nsecure_aggregation = true"
    )
    copy_to_clients(folder)
    return folder


def with_privacy(folder, clip_norm=0.5, noise_multiplier=2.0):
    """The folder with clipping and noise on its clients."""
    with (folder / "deploy.toml").open("a") as file:
        file.write(f"\n[privacy]\nclip_norm = {clip_norm}\n")
        file.write(f"noise_multiplier = {noise_multiplier}\n")
    copy_to_clients(folder)
    return folder
