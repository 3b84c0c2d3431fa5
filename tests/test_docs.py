"""What the pages say is run, and the numbers they quote are compared with their results."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from statistics import fmean
from typing import get_args, get_type_hints

import pytest

from glocal.cli import main
from glocal.studies import STUDIES, from_toml
from glocal.studies.run import resolve, slug
from glocal.studies.settings import Settings, from_dict

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "papers").glob("*/README.md")),
    *sorted((ROOT / "papers").glob("*/docs/*.md")),
]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    names = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.name
)
def test_the_settings_of_a_page_are_settings(page):
    settings = [block for block in blocks(page, "toml") if not block.startswith("# pyproject.toml")]
    for block in settings:
        assert from_dict(tomllib.loads(block)).experiments


def test_the_readme_trains_in_ten_lines():
    lines = [line for line in blocks(ROOT / "README.md", "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


def test_the_readmes_ten_lines_print_what_the_readme_says(capsys):
    exec(blocks(ROOT / "README.md", "python")[0], {})
    printed = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    quoted = re.findall(r"([\d.]+)%", blocks(ROOT / "README.md", "text")[0])
    # sums round differently on another kind of processor
    assert [float(figure) for figure in printed] == pytest.approx([*map(float, quoted)], abs=2)
    fedavg, personal, new = map(float, printed)
    assert personal > fedavg + 3
    assert new > fedavg - 2


EXAMPLES = {
    "groups_mnist": "--source digits --clients 2 --images 20 --warm 1 --rounds 1",
    "groups_tabular": "--hospitals 2 --warm 1 --rounds 1 --partitions 1",
}


@pytest.mark.parametrize(("name", "options"), EXAMPLES.items())
def test_an_example_runs(name, options, tmp_path):
    words = [sys.executable, str(ROOT / f"examples/{name}.py"), *options.split()]
    ran = subprocess.run(
        [*words, "--out", str(tmp_path / "out.json")], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads((tmp_path / "out.json").read_text())["groups"]) == 3


OTHER_EXAMPLES = {file.stem for file in (ROOT / "examples").glob("*.py")} - {*EXAMPLES}


@pytest.mark.parametrize("name", sorted(OTHER_EXAMPLES))
def test_an_example_can_be_imported(name):
    if name == "vqa_efficientnet":
        pytest.importorskip("efficientnet_lite_pytorch")
    ran = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'examples'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda file: file.name
)
def test_the_settings_of_an_example_are_settings(file):
    assert from_toml(file).experiments


def commands(page):
    """The words after `glocal` of every command in a page's blocks, in order."""
    typed = re.findall(r"^\$ (.*)", "".join(blocks(page, "console")), re.MULTILINE)
    scripts = "".join(blocks(page, "sh") + blocks(page, "bash")).splitlines()
    for line in typed + scripts:
        words = shlex.split(line, comments=True)
        while words and re.match("[A-Z_]+=", words[0]):
            del words[0]
        if words and words[0] == "glocal":
            yield words[1:]


def mentions(page):
    """The words after `glocal` of every command within a page's sentences."""
    for command in re.findall("`glocal ([^`]+)`", page.read_text()):
        yield shlex.split(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists_with_its_options(page, capsys):
    for words in [*commands(page), *mentions(page)]:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0, f"{words}: {capsys.readouterr().err}"


RESULTS = sorted(
    [*(ROOT / "docs/results").glob("*.json"), *(ROOT / "papers").glob("*/results/*.json")]
)


def is_setting(section, option):
    """Whether a table of the settings has such an option."""
    kind = get_type_hints(Settings).get(section)
    tables = [table for table in (kind, *get_args(kind)) if is_dataclass(table)]
    return any(option == each.name for table in tables for each in fields(table))


@pytest.mark.parametrize("file", [*PAGES, *RESULTS], ids=lambda file: file.name)
def test_every_setting_that_a_command_changes_exists(file):
    for section, option in re.findall(r"--set (\w+)\.(\w+)=", file.read_text()):
        assert is_setting(section, option), f"--set {section}.{option}"


def folder_made_by(words):
    """The run folder that a command writes, if it writes one."""
    if "--out" in words:
        return words[words.index("--out") + 1]
    if words[:2] == ["deploy", "demo"]:
        return "runs/deploy-demo"
    if words[0] != "run":
        return None
    if words[1].endswith(".toml"):
        return f"runs/{slug(from_toml(ROOT / words[1]).name)}"
    return f"runs/{words[1]}"


@pytest.mark.parametrize("name", ["README.md", "new-clients.md", "representations.md"])
def test_the_commands_of_a_page_can_be_typed_in_order(name):
    page = next(page for page in PAGES if page.name == name)
    written = set()
    for words in commands(page):
        written.add(folder_made_by(words))
        needed = {word for word in words if word.startswith("runs/")}
        assert needed <= written, f"glocal {' '.join(words)}"
        files = [word for word in words if word.endswith((".toml", ".npz"))]
        assert all((ROOT / file).exists() for file in files), f"glocal {' '.join(words)}"


def test_every_link_of_a_page_leads_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def anchors(page):
    """The names by which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def committed(name):
    return json.loads((ROOT / "docs/results" / name).read_text())


def test_the_readme_quotes_the_demo_as_it_was_measured():
    results = committed("digits.json")["results"]
    text = (ROOT / "README.md").read_text().replace("*", "")
    table = re.findall(
        r"^\| ([^|:]+): [^|]*\| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) MB", text, re.MULTILINE
    )
    assert len(table) == len(results) == 5
    for name, local, new, sent in table:
        seeds = results[name]
        assert f"{100 * fmean(seed['local_test']['mean'] for seed in seeds):.1f}" == local
        assert f"{100 * fmean(seed['new_test']['logits'] for seed in seeds):.1f}" == new
        assert f"{fmean(seed['ledger']['total']['bytes'] for seed in seeds) / 1e6:.1f}" == sent


def test_the_demo_shows_what_the_method_promises():
    mean = {
        name: {
            key: fmean(seed[key][part] for seed in seeds)
            for key, part in (("local_test", "mean"), ("new_test", "logits"))
        }
        | {"bytes": fmean(seed["ledger"]["total"]["bytes"] for seed in seeds)}
        for name, seeds in committed("digits.json")["results"].items()
    }
    assert mean["LG-FedAvg"]["local_test"] > mean["FedAvg"]["local_test"]
    assert mean["LG-FedAvg"]["new_test"] > mean["Local only"]["new_test"] + 0.2
    assert mean["LG-FedAvg"]["bytes"] < mean["FedAvg"]["bytes"]


def test_the_readme_quotes_mnist_as_it_was_measured():
    result = committed("mnist-200-50.json")["results"]["LG-FedAvg"][0]
    quoted = re.search(
        r"reaches ([\d.]+) % on Local Test and ([\d.]+) % on New Test",
        (ROOT / "README.md").read_text(),
    ).groups()
    assert quoted == (
        f"{100 * result['local_test']['mean']:.1f}",
        f"{100 * result['new_test']['logits']:.1f}",
    )


@pytest.mark.parametrize(
    ("name", "study"), [("digits.json", "digits"), ("mnist-200-50.json", "mnist")]
)
def test_results_name_the_command_that_made_them(name, study):
    result = committed(name)
    assert result["command"].startswith("glocal ")
    assert from_dict(result["settings"]) == resolve(STUDIES[study])


@pytest.mark.parametrize("name", ["groups-mnist.json", "groups-tabular.json"])
def test_the_page_of_groups_quotes_what_was_measured(name):
    page = (ROOT / "docs/groups.md").read_text()
    for row in committed(name)["groups"]:
        cells = [
            *(f"{100 * fmean(row[way]):.1f} %" for way in ("together", "alone")),
            f"{row['at_least_as_good']} of {row['clients']}",
        ]
        assert f"| {' | '.join(cells)} | {row['bytes'] / 1e6:,.1f} MB |" in page


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("upright", ("97.0 %", "93.4 %", "96.4 %")), ("rotated", ("14.0 %", "94.0 %", "94.2 %"))],
)
def test_the_page_of_new_clients_quotes_what_was_measured(name, quoted):
    page = (ROOT / "docs/new-clients.md").read_text()
    measured = {f"{100 * row['accuracy']:.1f} %" for row in committed(f"join-{name}.json")["rows"]}
    assert {*quoted} <= measured
    assert all(figure in page for figure in quoted)


def test_the_page_of_deployment_quotes_the_demo_as_it_was_recorded():
    recorded = (ROOT / "docs/results/deploy-demo.txt").read_text().splitlines()
    quoted = next(
        block for block in blocks(ROOT / "docs/deploy.md", "console") if "has connected" in block
    ).splitlines()
    assert {*quoted} <= {*recorded}
    assert int(re.search(r"^(\d+) s in all", "\n".join(recorded), re.MULTILINE)[1]) < 180
