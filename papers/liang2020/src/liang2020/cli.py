"""The command line of this package: `liang2020 theory`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from glocal.cli.entry import run_app
from glocal.cli.typer_compat import require_command

app = typer.Typer(
    name="liang2020",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def start(context: typer.Context) -> None:
    """What Liang et al. 2020 have beside their studies, which `glocal list` lists."""
    require_command(context)


@app.command()
def theory(
    d: Annotated[int, typer.Option("--d", help="How many numbers an input has.")] = 20,
    clients: Annotated[int, typer.Option(help="How many devices there are, M.")] = 100,
    n: Annotated[int, typer.Option("--n", help="How many examples each device has, N.")] = 2000,
    rho: Annotated[
        float,
        typer.Option(
            help="How much devices differ: the standard deviation of their teachers' weights."
        ),
    ] = 0.1,
    sigma: Annotated[float, typer.Option(help="How noisy labels are: a standard deviation.")] = 1.5,
    inputs: Annotated[
        str,
        typer.Option(
            help="uniform (between -1 and 1), normal (of variance 1) or unit (normal, of mean squared length 1)."
        ),
    ] = "uniform",
    repeats: Annotated[
        int, typer.Option(help="How often to try it out; 0 for the closed forms alone.")
    ] = 50,
    seed: Annotated[int, typer.Option(help="What the trials are drawn from.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Also draw it into this .svg or .png file.")
    ] = None,
) -> None:
    """How much of a model to keep local, by the paper's linear theory: closed forms, and trials beside them."""
    from liang2020.theory import LinearProblem
    from liang2020.theory_table import make_inputs, show_theory

    show_theory(
        LinearProblem(make_inputs(inputs, d), clients, n, rho, sigma),
        repeats=repeats,
        seed=seed,
        out=out,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_app(app, arguments)
