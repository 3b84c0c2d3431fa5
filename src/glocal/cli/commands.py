"""The commands and their options; a command loads its code when it is called."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from glocal.cli.analysis_commands import advise, audit, join
from glocal.cli.data_commands import data_app
from glocal.cli.deploy_commands import deploy_app
from glocal.cli.options import (
    EngineName,
    Frozen,
    Local,
    Out,
    Overrides,
    Parts,
    RunFolder,
    Seeds,
    Shared,
    TorchDevice,
    command_line,
    overrides_of,
)
from glocal.cli.typer_compat import require_command
from glocal.core.errors import InputError

app = typer.Typer(
    name="glocal",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")


@app.callback()
def start(context: typer.Context) -> None:
    """Personalised federated learning with local and shared representations."""
    require_command(context)


@app.command()
def demo(out: Out = None, engine: EngineName = None) -> None:
    """Five algorithms on handwritten digits, ten clients with two classes each.

    Prints a table and writes a report in about a minute.
    """
    from glocal.cli.run import free_folder, run_and_report
    from glocal.studies import STUDIES, with_overrides

    run_and_report(
        with_overrides(STUDIES["digits"], overrides_of(engine=engine)),
        out or free_folder(Path("runs/demo")),
    )


@app.command("list")
def list_studies() -> None:
    """List the studies of glocal and of installed packages."""
    from glocal.studies import STUDIES
    from glocal.studies.registry import installed_studies, missing_packages

    table = Table("name", "what", "of the paper", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, settings in STUDIES.items():
        groups = f"; with {', '.join(settings.groups)}" if settings.groups else ""
        data = f"{settings.data.source} on {settings.data.clients} clients"
        table.add_row(name, f"{data}: {', '.join(settings.experiments)}{groups}", "")
    for name, study in installed_studies().items():
        table.add_row(name, f"{study.title}, {len(study.parts)} parts", study.source)
    Console().print(table)
    if missing := missing_packages():
        print(missing)


@app.command()
def show(
    study: Annotated[str, typer.Argument(help="A study's name; `glocal list` has them.")],
) -> None:
    """Show what a study claims, what it runs, and which numbers were published."""
    from glocal.cli.tables import show_study
    from glocal.studies import STUDIES
    from glocal.studies.registry import installed_studies, unknown_study

    if study in STUDIES:
        print(json.dumps(STUDIES[study].as_dict(), indent=1))
        return
    installed = installed_studies()
    if study not in installed:
        raise InputError(f"show: {unknown_study(study, {**STUDIES, **installed})}")
    show_study(installed[study])


@app.command()
def run(
    study: Annotated[
        str, typer.Argument(help="A study's name (`glocal list` has them) or a TOML file.")
    ],
    changes: Overrides = None,
    engine: EngineName = None,
    seeds: Seeds = None,
    device: TorchDevice = None,
    parts: Parts = None,
    out: Out = None,
) -> None:
    """Run a study and write its report."""
    from glocal.cli.run import free_folder, run_and_report, start_parts
    from glocal.studies import STUDIES, from_toml, with_overrides
    from glocal.studies.registry import installed_studies, unknown_study
    from glocal.studies.run import is_run, slug
    from glocal.studies.study_parts import is_study

    overrides = [*(changes or []), *overrides_of(engine=engine, device=device, seeds=seeds)]
    if out is not None and (is_run(out) or is_study(out)):
        raise InputError(
            f"run: {out} holds a run already; "
            f"continue it with `glocal resume {out}`, or choose another --out"
        )
    installed = {} if study in STUDIES else installed_studies()
    if study in installed:
        typed = command_line(
            "run", study, changes, part=parts or [], engine=[engine], seeds=[seeds], device=[device]
        )
        start_parts(
            installed[study],
            out or free_folder(Path("runs") / study),
            patterns=parts or [],
            changes=overrides,
            command=typed,
        )
        return
    if parts:
        raise InputError(
            f"run: --part is for the studies of a paper, and '{study}' is none; leave it out"
        )
    if study in STUDIES:
        settings = with_overrides(STUDIES[study], overrides)
    elif Path(study).suffix == ".toml" or Path(study).exists():
        settings = from_toml(Path(study), overrides)
    else:
        known = {**STUDIES, **installed}
        raise InputError(f"run: {unknown_study(study, known)}; or give a TOML file")
    run_and_report(settings, out or free_folder(Path("runs") / slug(settings.name)))


@app.command()
def resume(folder: RunFolder, changes: Overrides = None, engine: EngineName = None) -> None:
    """Resume a stopped run; the results have the same bits as those of an uninterrupted run."""
    from glocal.cli.run import resume_parts, run_and_report
    from glocal.studies import with_overrides
    from glocal.studies.run import read_settings
    from glocal.studies.study_parts import is_study, read_parts

    overrides = [*(changes or []), *overrides_of(engine=engine)]
    if is_study(folder):
        parts = {
            name: with_overrides(settings, overrides)
            for name, settings in read_parts(folder).items()
        }
        resume_parts(parts, folder, command_line("resume", "FOLDER", changes, engine=[engine]))
        return
    run_and_report(with_overrides(read_settings(folder), overrides), folder)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="The folder of a run; or several folders or findings.json of one paper's study."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for the report of a paper's study; by default its own."),
    ] = None,
) -> None:
    """Write a report again; several runs of one paper's study become one report."""
    from glocal.cli.audit import show_audit
    from glocal.cli.join import show_join
    from glocal.cli.run import report_study, show_results
    from glocal.studies.study_parts import is_study

    if len(folders) == 1 and (folders[0] / "join.json").exists():
        show_join(folders[0])
        return
    if len(folders) == 1 and (folders[0] / "live.json").exists():
        from glocal.deploy.preflight import require_flower

        require_flower()  # show_result imports it
        from glocal.cli.deploy_actions import show_result

        show_result(folders[0])
        return
    if len(folders) == 1 and (folders[0] / "audit.json").exists():
        show_audit(folders[0])
        return
    if all(folder.is_file() or is_study(folder) for folder in folders):
        report_study(
            folders, out or (folders[0].with_suffix("") if folders[0].is_file() else folders[0])
        )
        return
    if len(folders) > 1 or out is not None:
        odd = next(
            (folder for folder in folders if not (folder.is_file() or is_study(folder))), folders[0]
        )
        raise InputError(
            f"report: {odd} is not a study of a paper; "
            "give such studies, or one folder of a run without --out"
        )
    show_results(folders[0])


@app.command()
def split(
    model: Annotated[str, typer.Argument(help="mlp, lenet5, or your own module:function.")],
    local: Local = None,
    shared: Shared = None,
    frozen: Frozen = None,
) -> None:
    """Show which part of a model stays on the client, which is sent, and which is frozen."""
    from glocal.core.split import Split, with_frozen
    from glocal.studies.build import default_model

    built = default_model(model)
    built = with_frozen(built, frozen) if frozen else built
    print(Split.of(built, local=local or None, shared=shared or None).describe(built))


for command in (join, audit, advise):
    app.command()(command)
