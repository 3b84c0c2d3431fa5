"""The benchmarks: counts against hand-computed numbers, tiny runs, tables and figures."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import (
    draw,
    gpu_step,
    job,
    machine,
    network,
    ours,
    plain,
    roofline,
    run,
    scaling,
    tools,
)
from benchmarks.workloads import LENET, MLP, WIDE_CNN, Workload, dense, parameters, write_arrays

TINY = Workload(
    name="A",
    summary="tiny",
    source="none",
    shape=(1, 2, 3),
    layers=(("flatten",), *dense(6, 5, 10)),
    shared=("layer2",),
    clients=4,
    examples=7,
    clients_per_round=2,
    batch_size=3,
    lr=0.1,
    momentum=0.5,
)
RATES = {"matrix_gflops": {}, "workloads": {"A": roofline.floor(TINY, 1e9, 1e9)}}


OURS = sorted(path.stem for path in Path(job.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", OURS)
def test_every_benchmark_can_be_imported(name):
    import_module(f"benchmarks.{name}")


@pytest.fixture
def tiny(tmp_path):
    write_arrays(TINY, tmp_path)
    return job.Job(TINY, str(tmp_path), rounds=2)


@pytest.mark.parametrize(
    ("workload", "expected"), [(MLP, 633_226), (LENET, 64_102), (WIDE_CNN, 1_626_442)]
)
def test_the_networks_have_the_published_sizes(workload, expected):
    assert (
        parameters(workload)
        == expected
        == sum(tensor.numel() for tensor in network.build(workload).parameters())
    )


def test_operations_of_the_mlp_are_as_counted_by_hand():
    first, rest = 784 * 512, 512 * 256 + 256 * 256 + 256 * 128 + 128 * 10
    assert roofline.operations(MLP) == 10 * 600 * (4 * first + 6 * rest) == 17_937_408_000


def test_operations_of_lenet_are_as_counted_by_hand():
    first, second, dense_part = (
        3 * 25 * 6 * 28 * 28,
        6 * 25 * 16 * 10 * 10,
        400 * 120 + 120 * 100 + 100 * 10,
    )
    assert roofline.operations(LENET) == 10 * 500 * (4 * first + 6 * (second + dense_part))


def test_least_bytes_of_the_mlp_are_as_counted_by_hand():
    assert roofline.least_bytes(MLP) == 10 * (60 * 5 * 4 * 633_226 + 600 * 4 * 784)


def test_without_momentum_no_velocity_is_moved():
    fewer = roofline.least_bytes(MLP) - roofline.least_bytes(replace(MLP, momentum=0.0))
    assert fewer == 10 * 60 * 2 * 4 * 633_226


def test_the_floor_is_the_slower_of_arithmetic_and_traffic():
    assert roofline.floor(MLP, flops=1e9, bandwidth=1e15)["bound"] == "arithmetic"
    assert roofline.floor(MLP, flops=1e15, bandwidth=1e9)["floor_ms"] == pytest.approx(
        roofline.least_bytes(MLP) / 1e6
    )


def test_a_job_survives_its_file(tiny, tmp_path):
    job.save(tiny, tmp_path / "job.json")
    assert job.load(tmp_path / "job.json") == tiny


def test_arrays_are_random_where_there_is_no_data_set(tmp_path):
    assert "random" in write_arrays(TINY, tmp_path)
    assert np.load(tmp_path / "x.npy").shape == (4, 7, 1, 2, 3)


def test_one_round_of_the_plain_loop_is_one_round_of_glocal(tmp_path):
    everyone = replace(TINY, clients_per_round=4, batch_size=7)
    write_arrays(everyone, tmp_path)
    tiny_job = job.Job(
        everyone,
        str(tmp_path),
        rounds=3,
        options={"engine": "looped", "algorithm": "fedavg", "measure": "training"},
    )
    assert plain.training(tiny_job)["loss"] == pytest.approx(
        ours.training(tiny_job)["loss"], rel=1e-5
    )


def test_rounds_stop_when_time_is_up_but_not_below_the_minimum():
    tiny_job = job.Job(TINY, "", rounds=9, min_rounds=2, seconds=0.0)
    assert len(job.time_rounds(iter(range(99)), tiny_job)["seconds_per_round"]) == 2


def test_rounds_on_a_gpu_are_also_timed_in_a_row():
    result = job.time_rounds(
        iter(range(99)), job.Job(TINY, "", rounds=3, device="cuda"), synchronize=lambda: None
    )
    assert result["rounds"] == 7
    assert result["in_a_row"] >= 0


@pytest.mark.parametrize("measure", ["training", "seeds", "local test"])
def test_glocal_runs_every_measurement(tiny, measure):
    options = {"engine": "vmapped", "algorithm": "lg_fedavg", "measure": measure, "seeds": 2}
    assert len(ours.MEASURES[measure](replace(tiny, options=options))["seconds_per_round"]) == 2


def test_a_tool_in_its_own_process_reports_time_and_memory(tiny):
    result = tools.REFERENCE.run(tiny)
    assert len(result["seconds_per_round"]) == 2
    assert result["peak_memory_mb"] > 50


def test_a_tool_that_fails_becomes_a_line_of_the_table(tiny):
    broken = tools.Tool(
        "glocal fedavg",
        "warp",
        "ours",
        {"engine": "warp", "algorithm": "fedavg", "measure": "training"},
    )
    assert run.run_tool(broken, tiny)["note"].startswith("does not run: ")


def test_peers_are_left_out_on_a_gpu(tiny):
    assert run.run_tool(tools.PEERS[0], replace(tiny, device="cuda"))["note"].startswith("left out")


def test_every_engine_of_glocal_has_a_row():
    rows = list(tools.all_tools(MLP, device="cpu", seeds=1))
    assert {row.setting for row in rows if row.name == "glocal lg_fedavg"} == set(
        tools.ENGINES["cpu"]
    )


def row(tool, seconds):
    about = {
        "workload": "A",
        "tool": tool,
        "setting": "1 thread",
        "measure": "training",
        "version": "1",
        "peak_memory_mb": 100,
    }
    return run.with_floor(
        {**about, "seconds_per_round": [seconds], **run.with_reference(seconds, 0.5, 1.5)}, RATES
    )


def test_a_ratio_is_to_the_plain_loop_just_before_and_just_after():
    assert row("pfl", 0.5)["speed_up"] == pytest.approx(2.0)


def test_a_command_is_recorded_without_the_folders_of_the_machine():
    assert (
        machine.command("benchmarks.run", ["--out", "/somewhere/mine/a.json"])
        == "python -m benchmarks.run --out a.json"
    )


@pytest.fixture
def files(tmp_path):
    failed = {
        "workload": "A",
        "tool": "FedJAX",
        "setting": "jit",
        "measure": "training",
        "note": "does not run: why",
    }
    report = {
        "rows": [row("plain loop", 1.0), row("glocal fedavg", 0.1), failed],
        "roofline": RATES,
        "data": {"A": "random"},
    }
    curve = [
        {
            "axis": "clients_per_round",
            "value": n,
            "seconds": n / 10,
            "peak_memory_mb": 100 + n,
            "parameters": 10,
        }
        for n in (5, 10, 20)
    ]
    benchmark, growth = tmp_path / "benchmark.json", tmp_path / "scaling.json"
    run.write(report, benchmark)
    growth.write_text(json.dumps({"rows": curve}))
    return benchmark, growth


def test_the_table_shows_times_and_reasons(files):
    shown = run.table(json.loads(files[0].read_text()), replace(TINY, name="A"))
    assert shown.row_count == 3


def test_figures_are_drawn_from_the_files(files, tmp_path):
    paths = draw.draw_figures(*files, tmp_path / "images")
    assert {path.name for path in paths} >= {"time-per-round.png", "roofline.svg", "scaling.png"}
    assert all(path.stat().st_size > 1000 for path in paths)


def test_every_point_of_scaling_fits_the_data_set():
    assert all(
        point.workload.clients * point.workload.examples <= 60_000
        for point in scaling.points(rounds=1)
    )


def test_eager_steps_that_the_gpus_are_compared_with_are_exact():
    round_of_two = gpu_step.prepared(gpu_step.workloads()["B10"], "cpu").shortened(2)
    exact = gpu_step.train_eagerly(round_of_two, torch.float64, 2)
    single = gpu_step.train_eagerly(round_of_two, torch.float32, 2)
    assert 0 < gpu_step.gap(single, exact, 2) < 1e-6
    assert not torch.equal(exact[0]["0.weight"][0], exact[0]["0.weight"][1])
