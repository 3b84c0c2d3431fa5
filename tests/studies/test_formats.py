"""What another version of glocal wrote is refused in one line that names both versions."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from glocal.core.errors import InputError
from glocal.core.files import FORMAT, read_json, read_metadata, require_format, write_tensors
from glocal.federate.checkpoint import Checkpoint
from glocal.report import write_audit_report, write_join_report
from glocal.studies import STUDIES, with_overrides
from glocal.studies.findings import read_findings
from glocal.studies.run import read_settings, run_study
from glocal.studies.study_parts import read_parts
from tests.support.command_line import complaint, run

# (file, how it is read from its folder)
READERS = {
    "settings.json": read_settings,
    "study.json": read_parts,
    "findings.json": lambda folder: read_findings(folder / "findings.json"),
    "audit.json": write_audit_report,
    "join.json": write_join_report,
}


def refusal(path, version):
    return re.escape(
        f"run: {path} was written by glocal {version}, and {FORMAT} was expected; "
        f"run it again, or use glocal {version}"
    )


@pytest.mark.parametrize("file", READERS)
def test_a_file_without_a_format_is_of_version_0_1(file, tmp_path):
    (tmp_path / file).write_text(json.dumps({"study": "paper-mnist", "name": "old", "cases": {}}))
    with pytest.raises(InputError, match=refusal(tmp_path / file, "0.1")):
        READERS[file](tmp_path)


@pytest.mark.parametrize("file", READERS)
def test_a_file_of_a_later_format_is_refused_too(file, tmp_path):
    (tmp_path / file).write_text(json.dumps({"format": "9.0", "study": "paper-mnist"}))
    with pytest.raises(InputError, match=refusal(tmp_path / file, "9.0")):
        READERS[file](tmp_path)


def save_as_0_1(path):
    """A file with tensors, its header under the key of version 0.1."""
    save_file({"x": torch.zeros(1)}, path, metadata={"about": json.dumps({"done": 3})})


def test_tensors_of_version_0_1_are_refused_before_they_are_read(tmp_path):
    save_as_0_1(tmp_path / "checkpoint.safetensors")
    with pytest.raises(InputError, match=refusal(tmp_path / "checkpoint.safetensors", "0.1")):
        Checkpoint(tmp_path, {"plan": {}}, fresh=()).rounds_done()


def test_tensors_have_a_format_that_is_not_part_of_their_metadata(tmp_path):
    path = tmp_path / "some.safetensors"
    write_tensors(path, {"x": torch.zeros(1)}, {"done": 3})
    assert f'\\"format\\": \\"{FORMAT}\\"' in path.read_bytes().decode("latin-1")
    assert read_metadata(path) == {"done": 3}


def test_a_file_of_tensors_that_is_not_glocals_has_no_metadata(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert read_metadata(tmp_path / "other.safetensors") == {}


def test_a_run_has_a_format_and_is_read_again(tmp_path):
    changes = ["plan.rounds=1", "plan.seeds=1", "model.hidden=[8]"]
    settings = with_overrides(STUDIES["digits"], changes)
    settings = replace(settings, experiments={"FedAvg": settings.experiments["FedAvg"]})
    assert list(run_study(settings, tmp_path))
    path = tmp_path / "settings.json"
    assert require_format(read_json(path, dict), path) == settings.as_dict()
    assert read_json(path, dict)["format"] == FORMAT
    assert read_settings(tmp_path) == settings


@pytest.mark.parametrize("command", ["resume", "report"])
def test_the_command_line_refuses_a_run_of_version_0_1_in_one_line(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "settings.json").write_text('{"name": "digits", "cases": {}}')
    assert run(command, "old") == 2
    assert "was written by glocal 0.1, and 0.2 was expected" in complaint(capsys)
