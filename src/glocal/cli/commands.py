"""The commands and their options; a command loads its code when it is called."""

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from glocal.cli.deploy_commands import deploy_app
from glocal.cli.typer_compat import require_command
from glocal.core.errors import InputError

app = typer.Typer(
    name="glocal",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    help="List, fetch, verify and draw data sets.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")

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
        with_overrides(STUDIES["digits"], _overrides(engine=engine)),
        out or free_folder(Path("runs/demo")),
    )


def _overrides(
    *, engine: str | None = None, device: str | None = None, seeds: int | None = None
) -> list[str]:
    """The changes of settings that options stand for."""
    overrides = {
        "run.engine": engine and f'"{engine}"',
        "run.device": device and f'"{device}"',
        "plan.seeds": seeds,
    }
    return [f"{setting}={value}" for setting, value in overrides.items() if value is not None]


def _command_line(
    command: str, what: str, changes: list[str] | None, **options: Sequence[object]
) -> str:
    """A command as it can be typed again."""
    words: list[str] = []
    for name, values in options.items():
        words += [f"--{name} {quote(str(value))}" for value in values if value is not None]
    return " ".join(
        ["glocal", command, what, *words, *(f"--set {quote(change)}" for change in changes or [])]
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

    overrides = [*(changes or []), *_overrides(engine=engine, device=device, seeds=seeds)]
    if out is not None and (is_run(out) or is_study(out)):
        raise InputError(
            f"run: {out} holds a run already; "
            f"continue it with `glocal resume {out}`, or choose another --out"
        )
    installed = {} if study in STUDIES else installed_studies()
    if study in installed:
        typed = _command_line(
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

    overrides = [*(changes or []), *_overrides(engine=engine)]
    if is_study(folder):
        parts = {
            name: with_overrides(settings, overrides)
            for name, settings in read_parts(folder).items()
        }
        resume_parts(parts, folder, _command_line("resume", "FOLDER", changes, engine=[engine]))
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
def join(
    folder: RunFolder,
    source: Annotated[
        str,
        typer.Option(
            "--data", help="The new client's examples: FILE.npz with x and y, or module:function."
        ),
    ],
    experiment: Annotated[
        str | None,
        typer.Option(
            help="An experiment of the run; by default the last with local and shared parts."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; by default the first.")
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the new client.")] = "new_client",
    labels: Annotated[
        str, typer.Option(help="Numbers of labelled examples to try, and 'all'.")
    ] = "0,1,5,10,50,all",
    epochs: Annotated[
        int,
        typer.Option(help="Epochs of its local part; a small set of labelled examples gets more."),
    ] = 20,
    rounds: Annotated[
        int, typer.Option(help="Rounds to join with all labels, after its local part is trained.")
    ] = 5,
    existing_clients: Annotated[
        int | None,
        typer.Option(
            help="Existing clients in each of them; by default clients_per_round of the run."
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            help="Where its local part starts: initial, or average (of all trained ones)."
        ),
    ] = "initial",
    out: Annotated[
        Path | None,
        typer.Option(help="The output folder; by default joined/NAME in the run's folder."),
    ] = None,
) -> None:
    """Let a new client join a saved federation, and compare all methods of joining.

    The run's own files do not change.
    """
    from glocal.cli.join import JoinTarget, join_client
    from glocal.personalize.onboarding import JoinPlan

    target = JoinTarget(folder, experiment, seed, name, out)
    join_client(
        target,
        source,
        labels=labels,
        join_plan=JoinPlan(epochs, rounds, existing_clients or 0, start),
        existing_clients=existing_clients,
    )


@app.command()
def audit(
    folder: RunFolder,
    attribute: Annotated[
        str,
        typer.Option(
            help="A protected attribute of the data, such as sex; without names, a number."
        ),
    ],
    experiment: Annotated[
        str | None,
        typer.Option(
            help="An experiment of the run; by default the last with local and shared parts."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="A seed of the run; by default the first.")
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="The module whose output attackers see; by default the study's audit.layer, "
            "or the end of the local part."
        ),
    ] = None,
    encoders: Annotated[
        int,
        typer.Option(
            help="How many clients' encoders strong attackers use on everybody else's data."
        ),
    ] = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="The output folder; by default under audits/ in the run's folder."),
    ] = None,
) -> None:
    """What a saved run leaks about a protected attribute, and how it treats groups.

    The run's own files do not change.
    """
    from glocal.cli.audit import AuditTarget, audit_run
    from glocal.studies.saved_audit import AuditQuery

    typed = _command_line(
        "audit",
        quote(str(folder)),
        None,
        attribute=[attribute],
        experiment=[experiment],
        seed=[seed],
        layer=[layer],
        encoders=[encoders],
        out=[out],
    )
    audit_run(
        AuditTarget(folder, experiment, seed, out),
        AuditQuery(attribute, layer, encoders),
        command=typed,
    )


@app.command()
def advise(
    data: Annotated[
        str,
        typer.Argument(
            help="digits, mnist, cifar10, adult, your own module:function, a study or a TOML file."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(help="mlp, lenet5, or your own module:function; by default the study's."),
    ] = None,
    changes: Overrides = None,
    budget: Annotated[
        str | None,
        typer.Option(help="A budget in bytes or seconds, such as '20 MB' or '60 s'."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of FedAvg before the search.")] = 100,
    num_clients: Annotated[
        int, typer.Option("--clients", help="How many clients take part in the search.")
    ] = 24,
    prefer: Annotated[
        str, typer.Option(help="Among equally good splits: accuracy (shares most) or bytes.")
    ] = "accuracy",
    seed: Annotated[int | None, typer.Option(help="The seed; short for --set plan.seed=N.")] = None,
    device: TorchDevice = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the advice to this JSON file.")
    ] = None,
) -> None:
    """How much of a network to share: variances of clients' updates, and a search over splits."""
    from glocal.cli.advise import resolve_settings, show_advice
    from glocal.personalize.advisor import AdvisorConfig, Budget

    named = [f"plan.seed={seed}"] if seed is not None else []
    settings = resolve_settings(data, model, [*(changes or []), *named, *_overrides(device=device)])
    config = AdvisorConfig(
        budget=Budget() if budget is None else Budget.parse(budget),
        num_clients=num_clients,
        prefer=prefer,
    )
    what = data if model is None else f"{data} {model}"
    typed = _command_line(
        "advise",
        what,
        changes,
        budget=[budget],
        rounds=[rounds],
        clients=[num_clients],
        prefer=[prefer],
        seed=[seed],
        device=[device],
    )
    show_advice(settings, config, rounds=rounds, out=out, command=typed)


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
