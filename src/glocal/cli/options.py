"""Options that several commands have, the settings they stand for, and commands as typed again."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: section.option=value. May be repeated."),
]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Out = Annotated[
    Path | None, typer.Option(help="The folder of the run; by default a new one under runs/.")
]
Local = Annotated[
    list[str] | None,
    typer.Option(help="What stays on the client: a module, tensor or glob. May be repeated."),
]
Shared = Annotated[
    list[str] | None, typer.Option(help="What is sent and averaged. May be repeated.")
]
Frozen = Annotated[
    list[str] | None, typer.Option(help="What nobody trains or sends. May be repeated.")
]
Experiment = Annotated[
    str | None,
    typer.Option(help="An experiment of the run; by default the last with local and shared parts."),
]
RunSeed = Annotated[int | None, typer.Option(help="A seed of the run; by default the first.")]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="auto, looped, vmapped, graphed (GPU) or workers (CPU); auto prints its choice.",
    ),
]
Seeds = Annotated[
    int | None, typer.Option(help="How many seeds, side by side; short for --set plan.seeds=N.")
]
TorchDevice = Annotated[
    str | None, typer.Option("--device", help="auto, cpu or cuda; short for --set run.device=NAME.")
]
Parts = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help="Run only this part of a paper's study: paper-2, 'paper-*'. May be repeated.",
    ),
]
SourceName = Annotated[str, typer.Argument(help="A data set's name; `glocal data list` has them.")]


def overrides_of(
    *, engine: str | None = None, device: str | None = None, seeds: int | None = None
) -> list[str]:
    """The changes of settings that options stand for."""
    overrides = {
        "run.engine": engine and f'"{engine}"',
        "run.device": device and f'"{device}"',
        "plan.seeds": seeds,
    }
    return [f"{setting}={value}" for setting, value in overrides.items() if value is not None]


def command_line(
    command: str, what: str, changes: list[str] | None, **options: Sequence[object]
) -> str:
    """A command as it can be typed again."""
    words: list[str] = []
    for name, values in options.items():
        words += [f"--{name} {quote(str(value))}" for value in values if value is not None]
    return " ".join(
        ["glocal", command, what, *words, *(f"--set {quote(change)}" for change in changes or [])]
    )
