"""One process at a time writes a run's folder; a second one is refused and changes nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import glocal
from glocal.cli.join import reserve_folder
from glocal.core.errors import InputError
from glocal.core.files import lock_folder, read_rows
from glocal.core.sampling import Availability
from glocal.studies import run_study
from glocal.studies.settings import ExperimentSettings, Settings, from_dict
from glocal.studies.study import Study, StudyPart
from glocal.studies.study_parts import write_study
from tests.support import world
from tests.support.command_line import complaint, run

PLAN = glocal.Plan(rounds=2, clients_per_round=3, batch_size=5)
HELD = "is being run already; stop that one first"
STUDY = """
[data]
clients = 6
[plan]
rounds = 20000
clients_per_round = 3
[run]
checkpoint_every = 5
validate_every = 20000
[experiments.Only]
algorithm = "fedavg"
"""


def command(*arguments):
    return [sys.executable, "-m", "glocal", *map(str, arguments)]


def started(folder, *arguments):
    """A command in a process of its own, once it has trained some rounds."""
    path = folder / "run/experiments/only/rows.jsonl"
    before = len(read_rows(path))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(*arguments), cwd=folder, **quiet)
    deadline = time.monotonic() + 60
    while len(read_rows(path)) < before + 20 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.poll() is None
    return process


def bytes_of(folder):
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_second_process_is_refused_and_a_killed_one_lets_go(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    first = started(tmp_path, "run", "study.toml", "--out", "run")
    try:
        first.send_signal(signal.SIGSTOP)  # so that it changes nothing meanwhile
        before = bytes_of(tmp_path / "run")
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
        second = subprocess.run(command("resume", "run"), **options)
        assert second.returncode == 2
        announced, refusal = filter(str.strip, second.stderr.splitlines())
        assert announced == "writing to run"
        assert refusal.startswith("glocal: run: run ")
        assert HELD in refusal
        assert bytes_of(tmp_path / "run") == before
        read = subprocess.run(command("report", "run"), **options)
        assert read.returncode == 0, "a process that only reads is not refused"
    finally:
        first.kill()
        first.wait()
    again = started(tmp_path, "resume", "run")
    again.terminate()
    assert again.wait(60) == 130
    rounds = [row["round"] for row in read_rows(tmp_path / "run/experiments/only/rows.jsonl")]
    assert rounds == [*range(len(rounds))], "every round has one row"


@pytest.fixture
def held(tmp_path):
    """The folder of a study that is being run."""
    table = {
        "data": {"clients": 6},
        "plan": {"rounds": 50, "clients_per_round": 3},
        "experiments": {"Only": {"algorithm": "fedavg"}},
    }
    steps = run_study(from_dict(table), tmp_path / "held")
    next(steps)
    yield tmp_path / "held"
    steps.close()


def fitted(folder):
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    return glocal.fit(
        algorithm, world.federation(), rounds=2, clients_per_round=3, folder=folder, progress=False
    )


def fitted_with_a_phase(folder):
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    phases = (glocal.Phase(0, Availability.of(range(world.NUM_CLIENTS))),)
    experiment = glocal.Experiment.of(algorithm, world.federation(), PLAN, phases=phases)
    return glocal.Run(experiment, folder=folder).to_end()


@pytest.mark.parametrize("fit", [fitted, fitted_with_a_phase])
def test_training_in_python_is_refused_there_and_goes_on_elsewhere(fit, held, tmp_path):
    before = bytes_of(held)
    with pytest.raises(InputError, match=HELD):
        fit(held)
    assert bytes_of(held) == before
    assert fit(tmp_path / "other")


def test_a_study_in_parts_is_locked_as_a_whole(tmp_path, capsys):
    short = ["plan.rounds=1", "data.clients=10"]
    settings = Settings(experiments={"FedAvg": ExperimentSettings("fedavg")})
    study = Study("small", "small", "nobody", "It runs.", {"a": StudyPart("a", "", settings)})
    write_study(study, tmp_path / "study", changes=short)
    before = bytes_of(tmp_path / "study")
    with lock_folder(tmp_path / "study"):
        assert run("resume", tmp_path / "study") == 2
        assert HELD in complaint(capsys)
        assert {**bytes_of(tmp_path / "study"), **before} == bytes_of(tmp_path / "study")
    assert bytes_of(tmp_path / "study") == before


FORKS = """
import os, sys, time
from pathlib import Path
from glocal.core.files import lock_folder
with lock_folder(Path("held")):
    child = os.fork()
    if not child:
        time.sleep(600)
    print(child, flush=True)
    time.sleep(600)
"""


def test_a_worker_that_outlives_a_killed_process_holds_no_lock(tmp_path):
    arguments = [sys.executable, "-c", FORKS]
    parent = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    try:
        with pytest.raises(InputError, match=HELD), lock_folder(tmp_path / "held"):
            pass
        parent.kill()
        parent.wait()
        with lock_folder(tmp_path / "held"):
            os.kill(worker, 0)  # it is still there
    finally:
        parent.kill()
        parent.stdout.close()
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("work", ["join", "audit"])
def test_a_folder_inside_a_run_is_written_by_one_process_too(work, tmp_path):
    with (
        lock_folder(tmp_path),
        pytest.raises(InputError, match=HELD),
        reserve_folder(tmp_path, work),
    ):
        pass


UNLOCKED = """
import sys
from pathlib import Path
sys.modules["fcntl"] = None
from glocal.core.files import lock_folder
with lock_folder(Path("new")):
    Path("new/file").touch()
"""


def test_where_there_is_no_fcntl_nothing_is_locked(tmp_path):
    subprocess.run([sys.executable, "-c", UNLOCKED], cwd=tmp_path, check=True, timeout=60)
    assert [*bytes_of(tmp_path)] == ["new/file"]


def test_a_lock_leaves_nothing_in_its_folder(tmp_path):
    with lock_folder(tmp_path / "new/folder"):
        assert (tmp_path / "new/folder").is_dir()
    assert not (tmp_path / "new").exists()
    fitted(tmp_path / "saved")
    assert not [name for name in bytes_of(tmp_path / "saved") if Path(name).name.startswith(".")]


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"^disk: .*file"), lock_folder(tmp_path / "file/run"):
        pass
