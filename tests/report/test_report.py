"""The report: one page that opens anywhere, from runs of every shape."""

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from glocal.core.errors import InputError
from glocal.core.files import FORMAT
from glocal.report import draw_classes, write_deploy_report, write_report
from glocal.studies.metric_format import ACCURACY, MetricFormat
from glocal.studies.run import experiment_folder
from tests.support.outline import Outline

CLIENTS, CLASSES, SHARED, LOCAL = 6, 4, 30, 70


def ledger(rounds: int) -> dict[str, dict[str, int]]:
    sent = {
        "download": 2 * SHARED * rounds,
        "upload": 2 * SHARED * rounds,
        "evaluation": 40,
        "ensemble": LOCAL * CLIENTS,
    }
    amounts = {
        **sent,
        "total": sum(sent.values()),
        "paper": SHARED * (CLIENTS + 2) * rounds + (SHARED + LOCAL) * CLIENTS,
    }
    return {part: {"parameters": count, "bytes": 4 * count} for part, count in amounts.items()}


def result(
    seed: int, quality: float, rounds: int, metric: MetricFormat = ACCURACY
) -> dict[str, Any]:
    clients = [
        {
            "client": client,
            "train": 30 + client,
            "val": 3,
            "test": 9,
            "times_sampled": client,
            "local_test": quality - client / 50,
        }
        for client in range(CLIENTS)
    ]
    spread = {"mean": quality, "worst_tenth": quality - 0.1, "pooled": quality, "undefined": 0}
    ways = {"logits": quality - 0.2, "votes": quality - 0.3, "weights": quality - 0.4}
    about = {"higher_is_better": metric.higher_is_better, "is_fraction": metric.is_fraction}
    tests = {"local_test": spread, "new_test": ways["logits"], "validation": spread}
    figures = {
        "metric": metric.name,
        "metrics": {metric.name: {**about, **tests}},
        "local_test": spread,
        "new_test": ways,
        "validation": spread,
        "never_sampled": 1,
        "ledger": ledger(rounds),
    }
    return {
        "seed": seed,
        "algorithm": "any",
        "rounds": rounds,
        "selected_round": rounds,
        **figures,
        "clients": clients,
    }


def rows(seeds: int, rounds: int, quality: float) -> list[dict[str, Any]]:
    return [
        {
            "seed": seed,
            "round": done,
            "loss": 2 / (1 + done) + seed / 10,
            "validation": quality * (done + 1) / rounds if done % 2 else None,
            "bytes": 16 * SHARED * (done + 1),
            "paper_parameters": SHARED * (CLIENTS + 2) * (done + 1),
        }
        for done in range(rounds)
        for seed in range(seeds)
    ]


def write(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def fake_run(
    folder: Path,
    *names: str,
    seeds: int = 2,
    rounds: int = 6,
    metric: MetricFormat = ACCURACY,
) -> Path:
    """A finished run of LG-FedAvg experiments, each a little better than the one before."""
    experiments = {name: {"algorithm": "lg_fedavg"} for name in names}
    plan = {"rounds": rounds, "clients_per_round": 2, "seeds": seeds}
    write(
        folder / "settings.json",
        {
            "format": FORMAT,
            "name": "toy",
            "data": {"clients": CLIENTS},
            "plan": plan,
            "experiments": experiments,
        },
    )
    counts = (np.arange(CLIENTS * CLASSES).reshape(CLIENTS, CLASSES) % 3).tolist()
    about = {"classes": CLASSES, "train": counts, "test": counts, "metrics": [metric._asdict()]}
    write(folder / "federation.json", about)
    for place, name in enumerate(names):
        home, quality = experiment_folder(folder, name), 0.7 + 0.05 * place
        write(
            home / "result.json",
            [result(seed, quality + seed / 100, rounds, metric) for seed in range(seeds)],
        )
        lines = [json.dumps(row) + "\n" for row in rows(seeds, rounds, quality)]
        (home / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def page_of(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def change_results(folder: Path, name: str, **changes: object) -> None:
    path = experiment_folder(folder, name) / "result.json"
    write(path, [{**seed, **changes} for seed in json.loads(path.read_text(encoding="utf-8"))])


def test_a_page_has_every_figure_with_a_caption_and_a_label(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "FedAvg", "LG"))
    figures = re.findall(r"<figure.*?</figure>", page, flags=re.DOTALL)
    assert len(figures) == 7
    for figure in figures:
        assert re.search(r'<svg class="plot" role="img" aria-label="[^"]+"', figure)
        assert re.search(r"<figcaption><b>.+</b> .{40,}</figcaption>", figure)


def test_a_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "FedAvg", "LG"))
    assert not re.findall(r"https?://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert all(address.startswith(("#", "data:image/png")) for address in Outline(page).addresses)
    assert not {"script", "link", "iframe", "img"} & set(Outline(page).tags)
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_tags_are_closed_ids_unique_and_headings_in_order(tmp_path: Path) -> None:
    outline = Outline(page_of(fake_run(tmp_path, "FedAvg", "LG")))
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert [tag for tag in outline.tags if re.fullmatch(r"h\d", tag)] == [
        "h1",
        "h2",
        "h2",
        "h2",
        "h2",
    ]
    assert {address[1:] for address in outline.addresses if address.startswith("#")} <= set(
        outline.ids
    )


def test_axes_and_words_of_figures_follow_the_theme(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "FedAvg"))
    assert "fill: currentColor" in page
    assert "#0a0b0c" not in page
    assert "#fafbfc" not in page
    assert "#000000" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg", "LG")
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        '<script>alert("x")</script>',
        "a & b's",
        "$x^2$ _{",
        "_hidden",
        ' id="f1-axes_1" #0a0b0c',
        "学習 🙂",
        "n" * 200,
    ],
)
def test_any_name_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    page = page_of(fake_run(tmp_path, name, "other"))
    assert f">{escape(name)}<" in page
    assert "<script" not in page
    assert Outline(page).open == []


def test_the_table_gives_mean_and_deviation_and_marks_the_best(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "worse", "better"))
    assert "<td>70.5 ± 0.7</td>" in page
    assert "<td><strong>75.5 ± 0.7</strong></td>" in page
    assert "<td>4.7 kB</td>" in page  # the same for both: nothing is best
    assert "<td>2.04e3</td>" in page


RMSE = MetricFormat("rmse", higher_is_better=False)


def test_a_metric_that_is_no_fraction_is_shown_by_its_name_without_per_cent(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "better", "worse", metric=RMSE))
    for words in (
        "Local Test: rmse",
        "Validation rmse by round",
        "Validation rmse by bytes sent",
        "validation rmse",
        "Lower is better.",
        "the rmse of its own model",
        "<td>0.71</td>",
    ):
        assert words in page, words
    assert "ccuracy" not in page
    assert "Local Test, %" not in page


def test_the_best_of_an_error_is_the_lowest(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "better", "worse", metric=RMSE))
    assert "<td><strong>0.705 ± 0.0071</strong></td>" in page
    assert "<td>0.755 ± 0.0071</td>" in page


def test_an_unfinished_run_knows_its_metric(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg", metric=RMSE)
    (experiment_folder(folder, "FedAvg") / "result.json").unlink()
    assert "Validation rmse by round" in page_of(folder)


def test_rows_show_the_metric_that_rounds_are_selected_by(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg")
    path = folder / "settings.json"
    write(path, {**json.loads(path.read_text()), "run": {"select": "max auroc"}})
    results = json.loads((experiment_folder(folder, "FedAvg") / "result.json").read_text())
    metrics = results[0]["metrics"]
    change_results(folder, "FedAvg", metrics={**metrics, "auroc": metrics["accuracy"]})
    page = page_of(folder)
    assert "Validation auroc by round" in page
    assert "best on validation data, by auroc" in page
    assert "Local Test: accuracy, %" in page


def test_the_summary_works_out_what_is_shared(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "LG", "LG again"))
    assert f"Shared in LG, LG again: {SHARED} of {SHARED + LOCAL} parameters (30 %)." in page


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    page = page_of(fake_run(tmp_path, "FedAvg", seeds=1))
    assert "±" not in page
    assert "<td>70.0</td>" in page
    assert page.count("<figure") == 7


def test_one_round_is_enough(tmp_path: Path) -> None:
    assert page_of(fake_run(tmp_path, "FedAvg", rounds=1)).count("<figure") == 5


def test_without_test_data_the_table_has_dashes(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg")
    client = {"client": 0, "train": 30, "val": 0, "test": 0, "times_sampled": 1, "local_test": None}
    nothing = {"mean": None, "worst_tenth": None, "pooled": None, "undefined": 0}
    about = {"higher_is_better": True, "is_fraction": True}
    metrics = {"accuracy": {**about, "local_test": nothing, "new_test": None}}
    tested = {"local_test": nothing, "new_test": None, "metrics": metrics}
    change_results(folder, "FedAvg", **tested, clients=[client])
    page = page_of(folder)
    assert page.count("<td>–</td>") == 6
    assert "Local Test over clients" not in page
    assert "Bytes by purpose" in page


def test_without_counts_of_classes_that_figure_is_left_out(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg")
    (folder / "federation.json").unlink()
    page = page_of(folder)
    assert "Who has which classes" not in page
    assert page.count("<figure") == 6


def test_an_unfinished_run_says_what_is_open(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "done", "going on", "waiting")
    (experiment_folder(folder, "going on") / "result.json").unlink()
    shutil.rmtree(experiment_folder(folder, "waiting"))
    with (experiment_folder(folder, "going on") / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"seed": 0, "rou')
    page = page_of(folder)
    assert "This run is not finished" in page
    assert "going on (round 6 of 6), waiting (not started)" in page
    assert "done (" not in page
    assert page.count("<details>") == 2


def test_an_experiment_resumed_after_its_test_is_unfinished(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg")
    change_results(folder, "FedAvg", rounds=3)
    assert "FedAvg (round 6 of 6)" in page_of(folder)


def test_a_run_that_has_only_begun_can_be_reported(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg")
    shutil.rmtree(folder / "experiments")
    assert "Nothing has been measured yet" in page_of(folder)


def test_an_experiment_that_sends_nothing_is_a_level_line(tmp_path: Path) -> None:
    folder = fake_run(tmp_path, "FedAvg", "alone")
    path = experiment_folder(folder, "alone") / "rows.jsonl"
    silent = [
        json.dumps({**row, "bytes": 0, "paper_parameters": 0}) + "\n" for row in rows(2, 6, 0.9)
    ]
    path.write_text("".join(silent), encoding="utf-8")
    assert "sends nothing during training is a horizontal line" in page_of(folder)


def test_many_rounds_and_experiments_stay_one_small_page(tmp_path: Path) -> None:
    folder = fake_run(
        tmp_path, *(f"experiment {number}" for number in range(12)), seeds=1, rounds=500
    )
    assert write_report(folder).stat().st_size < 2_000_000


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        write_report(tmp_path)


def test_settings_of_the_users_matplotlib_change_nothing(tmp_path: Path) -> None:
    before = page_of(fake_run(tmp_path, "FedAvg"))
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "font.size": 30}):
        assert page_of(tmp_path) == before


def test_classes_are_drawn_as_svg_and_png(tmp_path: Path) -> None:
    counts = [[3, 0, 1], [0, 5, 2]]
    svg, png = (draw_classes(counts, tmp_path / name) for name in ("who.svg", "who.PNG"))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    for path in (svg, png):
        drawn = path.read_bytes()
        assert draw_classes(np.array(counts), path).read_bytes() == drawn
    assert {path.name for path in tmp_path.iterdir()} == {"who.svg", "who.PNG"}


@pytest.mark.parametrize("name", ["who.pdf", "who", "svg"])
def test_classes_are_drawn_into_no_other_kind_of_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"neither \.svg nor \.png"):
        draw_classes([[1]], tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("counts", [[], [1, 2], [[]]])
def test_counts_that_are_no_table_are_refused(tmp_path: Path, counts: list[Any]) -> None:
    with pytest.raises(InputError, match=r"\(clients, classes\) was expected"):
        draw_classes(counts, tmp_path / "who.svg")


def test_no_examples_at_all_can_be_drawn(tmp_path: Path) -> None:
    assert draw_classes([[0, 0]], tmp_path / "who.svg").exists()


CHROMIUM = shutil.which("chromium")
MEASURE = """
<iframe style="width: 360px; height: 800px; border: 0" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument;
  page.querySelectorAll("details").forEach((part) => {{ part.open = true; }});
  const seen = {{
    window: page.defaultView.innerWidth,
    width: page.documentElement.scrollWidth,
    background: page.defaultView.getComputedStyle(page.body).backgroundColor,
    words: page.defaultView.getComputedStyle(page.querySelector(".plot text")).fill,
    plots: [...page.querySelectorAll(".plot")].map((plot) => plot.getBoundingClientRect().width),
  }};
  document.body.dataset.seen = JSON.stringify(seen);
}});
</script>
"""


def colours_on_a_phone(page: Path, folder: Path, scheme: int) -> dict[str, Any]:
    """What a browser makes of a page in a frame of 360 px; scheme 0 is dark, 1 light."""
    copy = folder / "measure.html"
    copy.write_text(MEASURE.format(page=escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
    quiet = (
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
    )
    modes = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    home = f"--user-data-dir={folder / f'browser-{scheme}'}"
    command = [str(CHROMIUM), *modes, *quiet, home, "--dump-dom", copy.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    match = re.search(r'data-seen="([^"]*)"', dom)
    assert match, dom[-500:]
    seen: dict[str, Any] = json.loads(match.group(1).replace("&quot;", '"'))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_phone_shows_the_page_without_scrolling_sideways_in_light_and_dark(
    tmp_path: Path,
) -> None:
    page = write_report(
        fake_run(tmp_path / "run", "FedAvg", "an experiment with a long name" * 3, "x" * 120)
    )
    dark, light = (colours_on_a_phone(page, tmp_path, scheme) for scheme in (0, 1))
    for seen in (dark, light):
        assert seen["window"] == 360
        assert seen["width"] <= 360
        assert all(200 < width < 360 for width in seen["plots"])
    assert dark["background"] != light["background"]
    assert dark["words"] != light["words"]


# a deployed run


def deployed_run(folder: Path, metric: MetricFormat, figures: list[float | None]) -> Path:
    """The files of a run on Flower whose clients have these figures."""
    clients = [
        {
            "client": number,
            "name": f"clinic-{number}",
            "rounds": 1,
            "last_round": 0,
            "train_size": 20,
            "test_size": 5,
            "validation": figure,
            "test": figure,
            "new_client": False,
        }
        for number, figure in enumerate(figures)
    ]
    known = [figure for figure in figures if figure is not None]
    local = {"mean": sum(known) / len(known), "worst_tenth": max(known), "pooled": None}
    about = {"higher_is_better": metric.higher_is_better, "is_fraction": metric.is_fraction}
    run = folder / "clinics/runs/first"
    write(
        run / "result.json",
        {
            "metric": metric.name,
            "metrics": {metric.name: {**about, "local_test": local}},
            "local_test": local,
            "clients": clients,
            "ledger": ledger(1),
            "privacy": None,
        },
    )
    write(run / "live.json", {"state": "done"})
    row = {"round": 0, "loss": 0.5, "losses": {"clinic-0": 0.5}, "clients": ["clinic-0"]}
    row |= {"seconds": 1.0, "dropped": {}, "notes": {}, "offline": []}
    (run / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return run


def test_the_page_of_a_deployed_run_names_its_own_metric(tmp_path: Path) -> None:
    page = write_deploy_report(deployed_run(tmp_path, RMSE, [1.25, 2.5, None])).read_text()
    assert "The rmse of their own models on their own test data is 1.875" in page
    assert '<th scope="col">Local Test: rmse</th>' in page
    assert "<td>1.25</td><td>1.25</td>" in page
    assert "<td>–</td><td>–</td>" in page
    assert "accuracy" not in page
    fractions = deployed_run(tmp_path / "other", ACCURACY, [0.5, 0.75])
    page = write_deploy_report(fractions).read_text()
    assert "The accuracy of their own models on their own test data is 62.5 % (the mean" in page
    assert '<th scope="col">Local Test: accuracy, %</th>' in page
    assert "<td>75.0</td>" in page
