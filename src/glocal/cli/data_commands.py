"""The commands of data sets: list, fetch, check and draw them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from glocal.cli.options import Overrides, SourceName
from glocal.core.errors import InputError

data_app = typer.Typer(
    help="List, fetch, verify and draw data sets.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@data_app.callback()
def data(context: typer.Context) -> None:
    """List the data sets, and where they are."""
    if context.invoked_subcommand is None:
        data_list()


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and where they are."""
    from glocal.datasets import SOURCES, source_status

    table = Table("name", "what", "where", box=None, pad_edge=False)
    for name, source in SOURCES.items():
        table.add_row(name, source.summary, source_status(name))
    Console().print(table)


@data_app.command("fetch")
def data_fetch(name: SourceName) -> None:
    """Download a data set into the cache; an interrupted download is continued."""
    from glocal.cli.progress import download_bars
    from glocal.datasets import fetch_source

    with download_bars() as report:
        folder = fetch_source(name, report=report)
    print(f"{name}: {folder}")


@data_app.command("check")
def data_check(name: SourceName) -> None:
    """Verify a data set's checksums."""
    from glocal.datasets import SOURCES, verify_source

    files = verify_source(name)
    for file, good in files:
        print(f"{file}: {'good' if good else 'DAMAGED'}")
    if not files and SOURCES[name].files:
        raise InputError(
            f"data: {name} is not on this machine; get it with `glocal data fetch {name}`"
        )
    if not all(good for _, good in files):
        downloaded = all(remote.urls for remote in SOURCES[name].files)
        advice = "copy them again from their origin"
        if downloaded:
            advice = f"delete them and run `glocal data fetch {name}`"
        raise InputError(f"data: {name} has damaged files; {advice}")


@data_app.command("draw")
def data_draw(
    name: SourceName,
    changes: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Also draw a figure: an .svg or .png file.")
    ] = None,
) -> None:
    """Draw the classes of each client; --set data.clients=20 and the like change the partition."""
    from glocal.cli.progress import download_bars
    from glocal.cli.tables import print_class_counts
    from glocal.datasets import Texts, class_counts, load_any
    from glocal.datasets.texts import CLASSES
    from glocal.studies import Settings, with_overrides
    from glocal.studies.build import partition_data
    from glocal.studies.settings import DataSettings

    with download_bars() as report:
        dataset = load_any(name, report=report)
    usual = DataSettings(name, "natural") if isinstance(dataset, Texts) else DataSettings(name)
    settings = with_overrides(Settings(data=usual), changes or [])
    classes = CLASSES if isinstance(dataset, Texts) else dataset.classes
    counts = class_counts(partition_data(dataset, settings.data, settings.plan.seed).train, classes)
    print_class_counts(counts.tolist())
    if out is not None:
        from glocal.report import draw_classes

        print(f"drawn: {draw_classes(counts, out)}")


@data_app.command("samples")
def data_samples(
    name: SourceName,
    out: Annotated[Path, typer.Option(help="The .png file.")],
    rotate: Annotated[
        float, typer.Option(help="The rotation of the lower row, in degrees.")
    ] = 90.0,
) -> None:
    """Draw one image of each class, and the same images rotated below."""
    from glocal.cli.progress import download_bars
    from glocal.datasets import load_dataset
    from glocal.datasets.rotation import rotate_images
    from glocal.report import draw_samples

    if out.suffix != ".png":
        raise InputError(f"data: samples are a .png file, not {out.name}; choose such a name")
    with download_bars() as report:
        x, y, _ = load_dataset(name, report=report).train
    firsts = [int((y == label).nonzero()[0]) for label in sorted({*y.tolist()})]
    print(
        f"drawn: {draw_samples(x[firsts], rotate_images(x[firsts], rotate, float(x.min())), out)}"
    )
