"""Commands in this process, and the one line that a user's error gives."""

import pytest

from glocal.cli import main


def run(*arguments):
    """Exit code of a command in this process."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def complaint(capsys):
    """The one line that was printed to standard error."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    # progress bars and the engine's line are no errors
    lines = [
        line
        for line in lines
        if not line.startswith(("writing to ", "glocal: engine:")) and "━" not in line
    ]
    assert len(lines) == 1, lines
    assert lines[0].startswith("glocal: ")
    return lines[0]
