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
    """The theory of Liang et al. 2020; `glocal list` lists the studies."""
    require_command(context)


@app.command()
def theory(
    d: Annotated[int, typer.Option("--d", help="Dimension of an input.")] = 20,
    clients: Annotated[int, typer.Option(help="Number of clients, M.")] = 100,
    n: Annotated[int, typer.Option("--n", help="Number of examples per client, N.")] = 2000,
    rho: Annotated[
        float,
        typer.Option(help="Standard deviation of the clients' teachers: how much clients differ."),
    ] = 0.1,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the label noise.")] = 1.5,
    inputs: Annotated[
        str,
        typer.Option(
            help="uniform (from -1 to 1), normal (variance 1) or unit (normal, mean square 1)."
        ),
    ] = "uniform",
    repeats: Annotated[
        int, typer.Option(help="Number of trials; 0 for the closed forms alone.")
    ] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the trials.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Also draw a figure into this .svg or .png file.")
    ] = None,
) -> None:
    """How much of a model to keep local, by the paper's linear theory, with trials beside it."""
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
