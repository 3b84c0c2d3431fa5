"""The command line: what it prints, and one line with exit code 2 for a user's error."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from glocal.cli.progress import download_bars
from glocal.core import files
from tests.support.command_line import complaint, run

CHANGES = [
    "plan.rounds=3",
    "plan.seeds=1",
    "run.validate_every=2",
    "experiments.LG-FedAvg.start_round=2",
    "experiments.LG-FedAvg.rounds=2",
]
QUICK = [word for change in CHANGES for word in ("--set", change)]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_study_runs_prints_its_table_and_writes_its_report(capsys):
    assert run("run", "digits", *QUICK, "--out", "kept") == 0
    printed = capsys.readouterr().out
    for word in (
        "FedAvg",
        "FedProx",
        "Local only",
        "MTL",
        "LG-FedAvg",
        "Local",
        "New",
        "kB",
        "report: kept/report.html",
    ):
        assert word in printed
    assert Path("kept/report.html").read_text().count("<figure") >= 4
    assert run("report", "kept") == 0
    assert run("resume", "kept") == 0


def test_a_run_takes_a_new_folder_each_time():
    assert run("run", "digits", *QUICK) == 0
    assert run("run", "digits", *QUICK) == 0
    assert Path("runs/digits").exists()
    assert Path("runs/digits-2").exists()


def test_a_folder_that_holds_a_run_is_not_overwritten(capsys):
    run("run", "digits", *QUICK, "--out", "kept")
    capsys.readouterr()
    assert run("run", "digits", *QUICK, "--out", "kept") == 2
    assert "holds a run already; continue it with `glocal resume kept`" in complaint(capsys)


def test_a_model_and_data_of_ones_own_run_from_a_toml_file(capsys):
    Path("mine.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def data():\n"
        "    g = torch.Generator().manual_seed(0)\n"
        "    return [\n"
        "        (torch.randn(30, 5, generator=g), torch.randint(2, (30,), generator=g))\n"
        "        for _ in range(4)\n"
        "    ]\n"
        "def model():\n"
        "    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    Path("mine.toml").write_text(
        '[data]\nsource = "mine:data"\n[model]\nname = "mine:model"\n'
        '[split]\nlocal = ["0", "1"]\n[plan]\nrounds = 2\nclients_per_round = 2\n'
        '[experiments.LG]\nalgorithm = "lg_fedavg"\n'
    )
    assert run("run", "mine.toml", "--out", "kept") == 0
    assert "LG" in capsys.readouterr().out
    # of another length: Python compares it, and the second, to decide whether to compile again
    wider = (
        Path("mine.py")
        .read_text()
        .replace("5, 4)", "5, 12)")
        .replace("1d(4)", "1d(12)")
        .replace("4, 2)", "12, 2)")
    )
    Path("mine.py").write_text(wider)
    del sys.modules["mine"]
    assert run("resume", "kept", "--set", "plan.rounds=4") == 2
    line = complaint(capsys)
    assert "kept/experiments/lg was made with another algorithm.task.model" in line
    assert "out_features=4" in line
    assert "out_features=12" in line


def test_the_split_of_a_model_is_shown(capsys):
    assert run("split", "mlp", "--shared", "layer[3-5]") == 0
    assert (
        "15.79 % of the model is sent each round: 99,978 of 633,226 parameters"
        in capsys.readouterr().out
    )
    assert run("split", "lenet5", "--local", "fc*") == 0
    assert "2,872 of 64,102" in capsys.readouterr().out


def test_data_are_listed_and_drawn(capsys):
    assert run("data") == 0
    assert re.search(r"digits .* bundled", capsys.readouterr().out)
    assert run("data", "draw", "digits", "--set", "data.clients=5", "--out", "who.svg") == 0
    assert "█" in capsys.readouterr().out
    assert Path("who.svg").read_text().startswith("<?xml")
    assert run("data", "check", "digits") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digit"], "there is no study 'digit'; did you mean 'digits'"),
        (["run", "nowhere.toml"], "cannot read nowhere.toml"),
        (["run", "digits", "--set", "plan.roundz=3"], "did you mean 'rounds'"),
        (
            ["run", "digits", "--set", "split.local=encoder"],
            "'encoder' matches no parameter or buffer",
        ),
        (["resume", "nowhere"], "nowhere/settings.json does not exist"),
        (["report", "nowhere"], "nowhere/settings.json does not exist"),
        (["split", "mlp"], "neither side given"),
        (["split", "mlp", "--local", "layer9"], "'layer9' matches no parameter"),
        (["split", "mpl", "--local", "x"], "did you mean 'mlp'"),
        (["data", "fetch", "minst"], "did you mean 'mnist'"),
        (["data", "check", "cifar"], "did you mean 'cifar10'"),
        (["data", "draw", "digits", "--set", "data.clients=0"], "clients"),
        (["data", "draw", "digits", "--out", "who.doc"], "who.doc"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_code_two(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in complaint(capsys)


# in the words that typer has for it before 0.26, with click, and since then, without
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("rum", "No such command 'rum'"),
        ("deploy nothing", "No such command 'nothing'"),
        ("run digits --sets x", "No such option: --sets"),
        ("--nothing", "No such option: --nothing"),
        ("run", "Missing argument '(STUDY|study)'"),
        ("join kept", "Missing option '--data'"),
        ("run digits --seeds", "Option '--seeds' requires an argument"),
        ("run digits --seeds many", "Invalid value for '--seeds': .* valid int"),
        ("data samples mnist --out a.png --rotate far", "Invalid value for '--rotate': .* valid"),
        ("split mlp lenet5", "Got unexpected extra argument"),
    ],
)
def test_a_mistake_in_a_command_is_one_line_and_code_two(typed, message, capsys):
    assert run(*typed.split()) == 2
    assert re.match(f"glocal: command line: {message}", complaint(capsys))


def test_settings_that_are_not_a_table_are_one_line(capsys):
    Path("kept").mkdir()
    Path("kept/settings.json").write_text("[1, 2]")
    assert run("resume", "kept") == 2
    assert "settings" in complaint(capsys)


def test_a_corrupt_file_in_the_data_folder_is_one_line(capsys, monkeypatch):
    Path("data/mnist").mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        Path(f"data/mnist/{name}-ubyte.gz").write_bytes(b"not what it should be")
    monkeypatch.setenv("GLOCAL_DATA", "data")
    assert run("run", "mnist", "--out", "kept") == 2
    assert "train-images-idx3-ubyte.gz" in complaint(capsys)
    assert not Path("kept").exists()


def test_a_full_disk_is_one_line_and_loses_nothing(capsys, monkeypatch):
    assert run("run", "digits", *QUICK, "--out", "kept") == 0
    grows = ("rows.jsonl", "timing.jsonl", "settings.json")
    before = {
        file: file.read_bytes()
        for file in Path("kept").rglob("*")
        if file.is_file() and file.name not in grows
    }
    capsys.readouterr()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "save_file", full)
    assert run("resume", "kept", "--set", "plan.rounds=5") == 2
    assert re.search(r"disk: cannot write kept/.*No space left on device", complaint(capsys))
    assert {file: file.read_bytes() for file in before} == before
    assert not list(Path("kept").rglob("*.half"))


def test_a_folder_that_cannot_be_written_is_one_line(capsys):
    Path("taken").write_text("a file where a folder should be")
    assert run("run", "digits", *QUICK, "--out", "taken/run") == 2
    assert "disk: cannot write taken/run (" in complaint(capsys)


def test_a_model_that_cannot_be_batched_says_so_in_one_line(capsys):
    Path("branchy.py").write_text(
        "from torch import nn\n"
        "class Branchy(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x.flatten(1)) * (1 if x.sum().item() > 0 else 2)\n"
    )
    Path("branchy.toml").write_text(
        '[model]\nname = "branchy:Branchy"\n[plan]\nrounds = 2\n'
        '[run]\nvalidate_every = 9\n[experiments.a]\nalgorithm = "fedavg"\n'
    )
    assert run("run", "branchy.toml", "--out", "kept") == 0
    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("glocal: engine")
    ]
    expected = "vmapped, all clients in one batch (auto: the run is too short to measure)"
    assert lines[0] == f"glocal: engine: {expected}"
    assert lines[1].endswith("now looped, one client at a time")
    assert "data-dependent" in lines[1]


@pytest.mark.parametrize(
    ("typed", "listed"),
    [([], ("demo", "run", "resume", "split", "data")), (["deploy"], ("init", "server", "renew"))],
)
def test_without_a_command_the_commands_are_listed(typed, listed, capsys):
    assert run(*typed) == 2
    out, err = capsys.readouterr()
    assert not err
    assert all(f"\n  {command} " in out for command in listed)


def test_help_is_code_zero_and_shows_its_brackets_as_they_are():
    ran = subprocess.run(
        [sys.executable, "-m", "glocal", "advise", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0
    assert "  [required]" in ran.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line(capsys):
    assert run("run", "digits", *QUICK, "--set", "run.device=cuda") == 2
    assert "device 'cuda' cannot be used here" in complaint(capsys)


def test_an_error_is_printed_without_an_empty_line(capfd):
    assert run("data", "draw", "nothing.csv") == 2
    assert capfd.readouterr().err.startswith("glocal: data: nothing.csv could not be read")


def test_a_stop_before_anything_is_saved_does_not_offer_to_resume(capsys, monkeypatch):
    monkeypatch.setattr(
        "glocal.datasets.load_any", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert run("run", "digits", "--out", "early") == 130
    errors = capsys.readouterr().err
    assert "stopped; nothing was saved" in errors
    assert "resume" not in errors
    assert not Path("early").exists()


def test_bars_of_progress_come_back_for_more_and_leave_no_line_where_nothing_was_shown(
    capsys, monkeypatch
):
    started = []
    real = Progress.start
    monkeypatch.setattr(Progress, "start", lambda bars: (started.append(1), real(bars)))
    with download_bars() as report:
        report("at once", 8, 8)
    assert (started, capsys.readouterr().err) == ([], "")
    with download_bars() as report:
        for done in (1, 2, 1, 2):
            report("pictures seen", done, 2)
    assert len(started) == 2
