"""The command line: a thin layer that reads words, shows progress and prints tables."""

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from glocal.errors import GlocalWarning, InputError

if TYPE_CHECKING:
    from glocal.studies import Settings, Step
    from glocal.studies.findings import Findings
    from glocal.studies.study import Study

app = typer.Typer(
    name="glocal",
    help="Personalised federated learning with local and shared representations.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="List, fetch, check and draw data sets.", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

Changes = Annotated[list[str] | None, typer.Option("--set", help="Change a setting: section.option=value. May be repeated.")]
Folder = Annotated[Path, typer.Argument(help="The folder of a run.")]
Out = Annotated[Path | None, typer.Option(help="Where to keep the run; by default a new folder under runs/.")]
Local = Annotated[list[str] | None, typer.Option(help="What stays on the device: a module, tensor or glob. May be repeated.")]
Shared = Annotated[list[str] | None, typer.Option(help="What is sent and averaged. May be repeated.")]
EngineName = Annotated[
    str | None, typer.Option("--engine", help="auto, looped, vmapped, graphed (a GPU) or workers (a CPU); auto says what it took.")
]
Seeds = Annotated[int | None, typer.Option(help="How many seeds, side by side; short for --set plan.seeds=N.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda; short for --set run.device=NAME.")]
Parts = Annotated[
    list[str] | None,
    typer.Option("--part", help="Run this part of a paper's study only, such as paper-2 or 'paper-*'. May be repeated."),
]
SourceName = Annotated[str, typer.Argument(help="digits, mnist or cifar10.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: a mistake in the input is one line and exit code 2, a stop by Ctrl-C is 130."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that model.name = "mine:build" finds mine.py where the user stands
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite request to stop is met like Ctrl-C
    log, lines = logging.getLogger("glocal"), _Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("once", GlocalWarning)
        warnings.showwarning = _show_warning
        code = _run_command(arguments)
    log.removeHandler(lines)
    sys.exit(code if isinstance(code, int) else 0)


def _run_command(arguments: Sequence[str] | None) -> Any:
    """Run a command; its exit code."""
    try:
        return app(args=arguments, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        return _complain(f"command line: {error.format_message()}")
    except InputError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"disk: {error.strerror or error} ({error.filename}); check the path and its permissions")
    except (KeyboardInterrupt, click.Abort):
        print("stopped", file=sys.stderr)
        return 130


def _complain(message: str) -> int:
    print("glocal: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    """Our own warnings as one line; others are for developers and stay out of the way."""
    if issubclass(category, GlocalWarning):
        print(f"glocal: {message}", file=sys.stderr)


class _Lines(logging.Handler):
    """What the library has to say, each line once."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self.said:
            self.said.add(line)
            print(f"glocal: {line}", file=sys.stderr)


@app.command()
def demo(out: Out = None, engine: EngineName = None) -> None:
    """Five algorithms on handwritten digits, ten devices with two classes each: a table and a report in a minute or so."""
    from glocal.studies import STUDIES, changed

    _run(changed(STUDIES["digits"], _on(engine=engine)), out or _free_folder(Path("runs/demo")))


def _on(*, engine: str | None = None, device: str | None = None, seeds: int | None = None) -> list[str]:
    """The changes of settings that options stand for."""
    wanted = {"run.engine": engine and f'"{engine}"', "run.device": device and f'"{device}"', "plan.seeds": seeds}
    return [f"{setting}={value}" for setting, value in wanted.items() if value is not None]


@app.command("list")
def list_studies() -> None:
    """List the studies that come with glocal."""
    from glocal.studies import STUDIES
    from glocal.studies.paper import PAPER

    table = Table("name", "what", "of the paper", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, settings in STUDIES.items():
        table.add_row(name, f"{settings.data.source} on {settings.data.devices} devices: {', '.join(settings.cases)}", "")
    for name, study in PAPER.items():
        table.add_row(name, f"{study.title}, {len(study.parts)} parts", study.source)
    Console().print(table)


@app.command()
def show(study: Annotated[str, typer.Argument(help="A study's name; `glocal list` has them.")]) -> None:
    """Show what a study claims, what it runs, and which numbers were published."""
    from glocal.studies import STUDIES
    from glocal.studies.paper import PAPER

    if study in PAPER:
        _show_study(PAPER[study])
        return
    if study not in STUDIES:
        from glocal.errors import nearest

        raise InputError(f"show: there is no study '{study}'; {nearest(study, [*STUDIES, *PAPER])}")
    import json

    print(json.dumps(STUDIES[study].as_dict(), indent=1))


@app.command()
def run(
    study: Annotated[str, typer.Argument(help="A study's name (`glocal list` has them) or a TOML file.")],
    changes: Changes = None,
    engine: EngineName = None,
    seeds: Seeds = None,
    device: DeviceName = None,
    parts: Parts = None,
    out: Out = None,
) -> None:
    """Run a study and write its report."""
    from glocal.studies import STUDIES, changed, from_toml
    from glocal.studies.paper import PAPER
    from glocal.studies.run import slug

    wanted = [*(changes or []), *_on(engine=engine, device=device, seeds=seeds)]
    if out is not None and ((out / "settings.json").exists() or (out / "study.json").exists()):
        raise InputError(f"run: {out} holds a run already; go on with `glocal resume {out}`, or choose another --out")
    if study in PAPER:
        _start_parts(PAPER[study], parts or [], wanted, out or _free_folder(Path("runs") / study))
        return
    if parts:
        raise InputError(f"run: --part is for the studies of a paper, and '{study}' is none; leave it out")
    if study in STUDIES:
        settings = changed(STUDIES[study], wanted)
    elif Path(study).suffix == ".toml" or Path(study).exists():
        settings = from_toml(Path(study), wanted)
    else:
        from glocal.errors import nearest

        raise InputError(f"run: there is no study '{study}'; {nearest(study, [*STUDIES, *PAPER])}; or give a TOML file")
    _run(settings, out or _free_folder(Path("runs") / slug(settings.name)))


@app.command()
def resume(folder: Folder, changes: Changes = None, engine: EngineName = None) -> None:
    """Go on with a run that was stopped, to the same bits as if it never had been."""
    from glocal.studies import changed
    from glocal.studies.parts import holds_study, read_parts
    from glocal.studies.run import read_settings

    wanted = [*(changes or []), *_on(engine=engine)]
    if holds_study(folder):
        _run_parts({name: changed(settings, wanted) for name, settings in read_parts(folder).items()}, folder)
        return
    _run(changed(read_settings(folder), wanted), folder)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="The folder of a run; or folders and findings.json of one paper's study.")],
    out: Annotated[Path | None, typer.Option(help="Where to write a paper's study, if not into its own folder.")] = None,
) -> None:
    """Write a report anew; what several runs of one paper's study found goes into one."""
    from glocal.report import write_report
    from glocal.studies.parts import holds_study
    from glocal.studies.run import read_results

    if all(folder.is_file() or holds_study(folder) for folder in folders):
        _report_study(folders, out or (folders[0].parent if folders[0].is_file() else folders[0]))
        return
    if len(folders) > 1 or out is not None:
        raise InputError(f"report: {folders[0]} is no study of a paper; give one folder of a run, without --out")
    _print_table(read_results(folders[0]))
    print(f"report: {write_report(folders[0])}")


@app.command()
def split(
    model: Annotated[str, typer.Argument(help="mlp, lenet5, or your own module:function.")],
    local: Local = None,
    shared: Shared = None,
) -> None:
    """Show which part of a model stays on the device and which is sent."""
    from glocal.modules import params_of
    from glocal.split import Split
    from glocal.studies.build import plain_model

    built = plain_model(model)
    print(Split.of(built, local=local or None, shared=shared or None).describe(params_of(built)))


@data_app.callback()
def data(context: typer.Context) -> None:
    """List the data sets, and where they are."""
    if context.invoked_subcommand is None:
        data_list()


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and where they are."""
    from glocal.data import SOURCES, status

    table = Table("name", "what", "where", box=None, pad_edge=False)
    for name, source in SOURCES.items():
        table.add_row(name, source.summary, status(name))
    Console().print(table)


@data_app.command("fetch")
def data_fetch(name: SourceName) -> None:
    """Download a data set into the cache; an interrupted download is continued."""
    from glocal.data import fetch_source

    with _downloads() as report:
        folder = fetch_source(name, report=report)
    print(f"{name}: {folder}")


@data_app.command("check")
def data_check(name: SourceName) -> None:
    """Hold a data set's files against their checksums."""
    from glocal.data import SOURCES, check

    files = check(name)
    for file, good in files:
        print(f"{file}: {'good' if good else 'DAMAGED'}")
    if not files and SOURCES[name].files:
        raise InputError(f"data: {name} is not on this machine; get it with `glocal data fetch {name}`")
    if not all(good for _, good in files):
        raise InputError(f"data: {name} has damaged files; delete them and run `glocal data fetch {name}`")


@data_app.command("draw")
def data_draw(
    name: SourceName,
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option(help="Also draw it into this .svg or .png file.")] = None,
) -> None:
    """Draw who has which classes; --set data.devices=20 and so on say how the data are dealt out."""
    from glocal.data import class_counts, load
    from glocal.studies import Settings, changed
    from glocal.studies.build import deal_out
    from glocal.studies.settings import DataSettings

    settings = changed(Settings(data=DataSettings(source=name)), changes or [])
    with _downloads() as report:
        dataset = load(name, report=report)
    counts = class_counts(deal_out(dataset, settings.data, settings.plan.seed).train, dataset.classes)
    _print_classes(counts.tolist())
    if out is not None:
        from glocal.report import draw_classes

        print(f"drawn: {draw_classes(counts, out)}")


def _run(settings: "Settings", folder: Path) -> None:
    """Run or go on with a study, show it, write the report."""
    from glocal.report import write_report
    from glocal.studies.run import read_results, run_study

    console = Console(stderr=True)
    console.print(f"keeping everything in {folder}", highlight=False)
    try:
        with _downloads() as report, _bars() as bars:
            show = _shown_on(bars)
            for step in run_study(settings, folder, report=report):
                show(step)
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: glocal resume {folder}", highlight=False)
        raise
    _print_table(read_results(folder))
    print(f"report: {write_report(folder)}")


def _start_parts(study: "Study", patterns: Sequence[str], changes: Sequence[str], folder: Path) -> None:
    """Begin with some parts of a paper's study, or with all."""
    from glocal.studies.parts import prepare, read_parts

    options = [*(f"--part {quote(pattern)}" for pattern in patterns), *(f"--set {quote(change)}" for change in changes)]
    prepare(study, patterns, changes, folder, " ".join(["glocal run", study.name, *options]))
    _run_parts(read_parts(folder), folder)


def _run_parts(parts: "Mapping[str, Settings]", folder: Path) -> None:
    """Run or go on with a paper's study, show it, write the report."""
    from glocal.studies.parts import run_parts

    console = Console(stderr=True)
    console.print(f"keeping everything in {folder}", highlight=False)
    try:
        with _downloads() as report, _bars() as bars:
            shows: dict[str, Callable[[Step], None]] = {}
            for part, place, of, step in run_parts(parts, folder, report=report):
                show = shows.setdefault(part, _shown_on(bars, f"{part} ({place} of {of})  "))
                show(step)
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: glocal resume {folder}", highlight=False)
        raise
    _report_study([folder], folder)


def _report_study(paths: Sequence[Path], folder: Path) -> None:
    """Print what a paper's study found, and write it as a page, as text and as figures."""
    from glocal.keep import write_text
    from glocal.report import study_markdown, write_study_report
    from glocal.studies.findings import joined, read_findings, write_findings

    findings = joined([read_findings(path) for path in paths])
    if not findings.parts:
        raise InputError(f"report: {paths[0]} has finished no case yet; go on with `glocal resume {paths[0]}`")
    _print_findings(findings)
    write_findings(findings, folder / "findings.json")
    write_text(folder / "tables.md", study_markdown(findings))
    print(f"report: {write_study_report(findings, folder)}")


def _show_study(study: "Study") -> None:
    """The claim, the parts, and the paper's numbers."""
    print(f"{study.name}: {study.title}\n{study.source}\n\n{study.says}\n")
    table = Table("part", "protocol", "case", "algorithm", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rounds", "paper: Local", "New", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, part in study.parts.items():
        for case, settings in part.settings.cases.items():
            rounds = f"{settings.after_round or ''}{' + ' if settings.after else ''}{settings.rounds}"
            known = part.published.get(case)
            told = (
                [f"{known.local:.2f} ± {known.local_std:.2f}", f"{known.new:.2f} ± {known.new_std:.2f}", known.printed]
                if known
                else []
            )
            table.add_row(name, part.protocol, escape(case), settings.algorithm, rounds, *told)
            name = ""
    Console().print(table)


def _print_findings(findings: "Findings") -> None:
    """Every row beside the paper's, then the claims."""
    table = Table("part", "case", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("Local Test %", "paper", "New Test %", "paper"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, found in findings.parts.items():
        for case, figures in found["cases"].items():
            known = findings.study.parts[name].published.get(case)
            local, new = _percents(figures["local"], 2), _percents(figures["new"], 2)
            printed = (
                (f"{known.local:.2f} ± {known.local_std:.2f}", f"{known.new:.2f} ± {known.new_std:.2f}") if known else ("", "")
            )
            table.add_row(name, escape(case), local, printed[0], new, printed[1])
            name = ""
    console = Console()
    console.print(table)
    for claim, lead, word in findings.verdicts():
        console.print(f"{word:5}  {claim.says}: {lead.mean:+.2f} [{lead.low:+.2f}, {lead.high:+.2f}]", highlight=False)


def _free_folder(wanted: Path) -> Path:
    """The folder wanted, or the first of wanted-2, wanted-3, ... that does not exist."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _bars() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def _shown_on(bars: Progress, prefix: str = "") -> Callable[["Step"], None]:
    """A bar per case, with the newest figures in it."""
    tasks: dict[str, TaskID] = {}
    latest: dict[str, float] = {}

    def show(step: "Step") -> None:
        task = tasks.setdefault(step.case, TaskID(-1))
        if task == -1:
            task = tasks[step.case] = bars.add_task(escape(prefix + step.case), total=step.rounds, now="")
        if step.moment is None:
            bars.update(task, completed=step.rounds, now=_final(step))
            return
        row = step.moment.rows[0]
        if row["validation"] is not None:
            latest[step.case] = row["validation"]
        seen = f"validation {latest[step.case]:.1%}  " if step.case in latest else ""
        bars.update(task, completed=step.moment.progress.done, now=f"loss {row['loss']:.3f}  {seen}{readable(row['bytes'])}")

    return show


def _final(step: "Step") -> str:
    first = step.results[0]
    new = first["new_test"]["logits"] if first["new_test"] else None
    return f"Local Test {_percent(first['local_test']['mean'])}  New Test {_percent(new)}"


@contextmanager
def _downloads() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for every file that is being downloaded, shown only if there is one."""
    tasks: dict[str, TaskID] = {}
    bars = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True)

    def report(name: str, done: int, total: int) -> None:
        if name not in tasks:
            bars.start()
            tasks[name] = bars.add_task(escape(name), total=total)
        bars.update(tasks[name], completed=done)
        if done >= total and all(task.finished for task in bars.tasks):
            bars.stop()

    try:
        yield report
    finally:
        bars.stop()


def _print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """One row per case: means over seeds, and the spread where there is more than one."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    for heading in ("Local\nTest %", "worst\ntenth %", "New\nTest %", "sent", "paper's\ncount", "never\nsampled"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seeds in results.items():
        local, worst = ([result["local_test"][key] for result in seeds] for key in ("mean", "worst_tenth"))
        new = [result["new_test"]["logits"] if result["new_test"] else None for result in seeds]
        sent = sum(result["ledger"]["total"]["bytes"] for result in seeds) / len(seeds)
        paper = sum(result["ledger"]["paper"]["parameters"] for result in seeds) / len(seeds)
        never = max(result["never_sampled"] for result in seeds)
        counted = f"{paper:.1e}".replace("e+", "e") if paper else "0"
        figures = (*map(_percents, (local, worst, new)), readable(sent), counted, str(never))
        table.add_row(escape(name), *figures)
    Console().print(table)


def _percents(values: Sequence[float | None], digits: int = 1) -> str:
    from statistics import fmean, stdev

    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{100 * known[0]:.2f}" if known else "-"
    return f"{100 * fmean(known):.{digits}f} ± {100 * stdev(known):.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def readable(size: float) -> str:
    """Bytes for people.

    >>> readable(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _print_classes(counts: list[list[int]]) -> None:
    """Devices down, classes across; the fuller the block, the more examples."""
    most = max(max(row) for row in counts) or 1
    shades = " ░▒▓█"
    table = Table("device", *(str(label) for label in range(len(counts[0]))), "examples", box=None, pad_edge=False)
    for device, row in enumerate(counts):
        blocks = [shades[-(-count * (len(shades) - 1) // most)] * 2 for count in row]
        table.add_row(str(device), *blocks, str(sum(row)))
    Console().print(table)
