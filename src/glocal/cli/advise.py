"""Advice as a user sees it: what to share, why, how sure that is, and what it cost to find out."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from glocal.cli.progress import download_bars
from glocal.cli.tables import format_bytes
from glocal.core.errors import InputError
from glocal.core.files import require_writable, write_json
from glocal.core.modules import params_of
from glocal.core.sampling import Plan
from glocal.core.trees import numel
from glocal.evaluate.intervals import ConfidenceInterval
from glocal.personalize.advisor import Advice, AdvisorConfig, advise
from glocal.personalize.advisor.candidates import NOTHING
from glocal.personalize.advisor.search import CandidateResult
from glocal.studies import STUDIES, Settings, from_toml, with_overrides
from glocal.studies.build import build_algorithm, build_components
from glocal.studies.registry import installed_studies
from glocal.studies.settings import DataSettings, ExperimentSettings

_HALF = 0.5
_MIN_WIDTH = 120  # letters


def resolve_settings(data: str, model: str | None, changes: list[str]) -> Settings:
    """The settings behind a study, a TOML file or a data set, with another model if one is named."""
    if data in STUDIES:
        base = STUDIES[data]
    elif Path(data).suffix == ".toml":
        base = from_toml(Path(data))
    elif data in installed_studies():
        raise InputError(
            f"advise: '{data}' is a study of several parts; name a data set and a model, such as mnist and mlp"
        )
    elif model is None:
        raise InputError(
            f"advise: '{data}' is neither a study nor a TOML file, and no model is named; name one, such as mlp"
        )
    else:
        base = Settings(name=data, data=DataSettings(source=data))
    if model is not None:
        base = replace(base, model=replace(base.model, name=model))
    return with_overrides(replace(base, experiments={}, groups={}), changes)


def show_advice(
    settings: Settings, config: AdvisorConfig, *, rounds: int, out: Path | None, command: str
) -> None:
    """Find out, print it, and write it down."""
    if out is not None:
        require_writable(out)
    settings = replace(
        settings,
        plan=replace(settings.plan, seeds=1),
        experiments={"FedAvg": ExperimentSettings("fedavg")},
    )
    plan = settings.plan
    warmup_plan = Plan(
        rounds,
        plan.clients_per_round,
        plan.local_epochs,
        plan.batch_size,
        plan.seed,
        max_tokens=plan.max_tokens,
    )
    with download_bars() as report:
        parts = build_components(settings, report)
    algorithm, federation = (
        build_algorithm(settings, settings.experiments["FedAvg"], parts),
        parts.federations[0],
    )
    console = Console(stderr=True)
    try:
        with console.status("getting ready") as status:
            advice = advise(
                algorithm,
                parts.model,
                federation,
                warmup_plan,
                config=config,
                options=settings.run,
                log=status.update,
                metric=parts.metric,
            )
    except KeyboardInterrupt:
        console.print("stopped; nothing was kept", highlight=False)
        raise
    examples = int(federation.train.sizes.sum())
    print(
        f"{federation.num_clients} devices with {examples:,} examples; a model of {numel(params_of(parts.model)):,} parameters"
    )
    print_advice(advice)
    if out is not None:
        write_json(out, {"command": command, "settings": settings.as_dict(), **advice.as_dict()})
        print(f"written: {out}")


def print_advice(advice: Advice) -> None:
    """The variances, the race, and what follows from them."""
    _print_variances(advice)
    if advice.ran_halving:
        _print_halving(advice)
    print()
    for line in recommendation(advice):
        print(line)


def _print_variances(advice: Advice) -> None:
    print(
        f"\nHow devices differ: updates of {len(advice.participants)} devices, two halves of each one's data"
    )
    table = _table("layer", "data\nvariance", "device\nvariance", "alpha*", "95 % interval")
    for layer, found in advice.variances.items():
        interval = f"{found.low:.2f} to {found.high:.2f}"
        table.add_row(
            layer,
            f"{found.within_client:.2g}",
            f"{found.between_client:.2g}",
            f"{found.alpha:.2f}",
            interval,
        )
    _print_unwrapped(table)


def _print_halving(advice: Advice) -> None:
    print(f"\nThe race: accuracy in % on data that {len(advice.participants)} devices held back")
    ends = sorted({rounds for row in advice.rows for rounds in row.accuracy})
    table = _table(
        "", "sends", *(f"round {rounds}" for rounds in ends), "to the choice", "95 % interval"
    )
    for row in sorted(advice.rows, key=_sort_key):
        figures = [
            f"{100 * row.accuracy[rounds]:.1f}" if rounds in row.accuracy else "" for rounds in ends
        ]
        table.add_row(
            row.candidate.name,
            f"{100 * row.sent_fraction:.1f} %",
            *figures,
            *_margin_cells(advice, row),
        )
    _print_unwrapped(table)


def _print_unwrapped(table: Table) -> None:
    """A table with all of its digits, also where a line is too short for them."""
    Console(width=max(Console().width, _MIN_WIDTH)).print(table, highlight=False)


def _sort_key(row: CandidateResult) -> tuple[int, float]:
    """Those that came furthest first, the best of them on top."""
    last = max(row.accuracy, default=0)
    return -last, -row.accuracy.get(last, 0.0)


def _margin_cells(advice: Advice, row: CandidateResult) -> tuple[str, str]:
    if row.difference is None or row.candidate == advice.choice:
        return "", ""
    return f"{100 * row.difference.mean:+.1f}", format_interval(row.difference)


def format_interval(estimate: ConfidenceInterval) -> str:
    """An interval in points."""
    return f"{100 * estimate.low:+.1f} to {100 * estimate.high:+.1f}"


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in rest:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def recommendation(advice: Advice) -> list[str]:
    """What to do, why, how sure that is, and what it cost, line by line."""
    return [
        *_choice_lines(advice),
        _reason_line(advice),
        _confidence_line(advice),
        *_groups(advice),
        _cost_line(advice),
    ]


def _choice_lines(advice: Advice) -> list[str]:
    choice = advice.choice
    if not choice.local:
        return ["Share all of the model: FedAvg.", "  split.local = []"]
    listed = ", ".join(f'"{layer}"' for layer in choice.local)
    if not choice.shared:
        return [
            "Share nothing once FedAvg has given all a start: fine-tune on every device.",
            f"  split.local = [{listed}]",
        ]
    return [
        f"Share {', '.join(choice.shared)}; keep {', '.join(choice.local)} on the device.",
        f"  split.local = [{listed}]",
    ]


def _reason_line(advice: Advice) -> str:
    alpha, expected = advice.variances["all"].alpha, advice.by_variances
    reason = (
        "devices differ more than their own data wobble"
        if alpha > _HALF
        else "devices' own data wobble more than devices differ"
    )
    words = f"Why: alpha* is {alpha:.2f}, for {reason}"
    if not advice.ran_halving:
        return (
            f"{words}; the budget left no room for a race, so that the linear theory decides alone."
        )
    found = (
        "and so says the race"
        if expected == advice.choice.name
        else f"which {_verdict(advice, expected)} in the race"
    )
    return f"{words}; by that alone it would be '{expected}', {found}."


def _verdict(advice: Advice, name: str) -> str:
    """How a split that was not chosen did beside the choice."""
    gap = _gap(advice, name)
    if gap.mean > 0:
        return "was ahead" if gap.low > 0 else "was ahead, but not clearly,"
    return "did about as well" if name in advice.equally_good or not gap.mean else "did worse"


def _gap(advice: Advice, name: str) -> ConfidenceInterval:
    """How far a split that raced is from the choice."""
    (gap,) = (row.difference for row in advice.rows if row.candidate.name == name)
    assert gap is not None
    return gap


def _confidence_line(advice: Advice) -> str:
    if not advice.ran_halving:
        return "How sure: not very; give it a larger budget."
    equally_good = [name for name in advice.equally_good if name != advice.choice.name]
    short = _local_only_caveat(advice) + (
        "" if advice.finished else " The budget ended the race early."
    )
    if equally_good:
        sent = {row.candidate.name: row.sent_fraction for row in advice.rows}
        least = min(advice.equally_good, key=lambda name: sent[name])
        reason = (
            f"sends least of these, {100 * sent[least]:.1f} % of the model"
            if advice.choice.name == least
            else f"sends {100 * sent[advice.choice.name]:.1f} % of the model, '{least}' {100 * sent[least]:.1f} % (--prefer bytes)"
        )
        return f"How sure: {_comma_separated(equally_good)} did about as well in {_rounds(advice)}; the choice {reason}.{short}"
    rivals = [
        row
        for row in advice.rows
        if row.candidate != advice.choice and max(row.accuracy, default=0) == advice.rounds
    ]
    if not rivals:
        return f"How sure: the others were behind before round {advice.rounds}.{short}"
    nearest_row = max(rivals, key=lambda row: row.accuracy[advice.rounds])
    gap = _gap(advice, nearest_row.candidate.name)
    if gap.mean >= 0:
        as_well = (
            "" if gap.mean else f" '{nearest_row.candidate.name}' did as well in {_rounds(advice)}."
        )
        return f"How sure: not very.{as_well}{short}"
    ahead = ConfidenceInterval(-gap.mean, -gap.high, -gap.low)
    clear = "clearly" if ahead.low > 0 else "not clearly"
    return f"How sure: {clear} ahead of '{nearest_row.candidate.name}', by {100 * ahead.mean:.1f} points ({format_interval(ahead)}).{short}"


def _local_only_caveat(advice: Advice) -> str:
    """What to know where sharing nothing was ahead of the choice: it has to be so clearly to be chosen."""
    if advice.choice.name == NOTHING or _gap(advice, NOTHING).mean <= 0:
        return ""
    gap = _gap(advice, NOTHING)
    by = f"{100 * gap.mean:.1f} points ({format_interval(gap)})"
    return f" '{NOTHING}' was ahead by {by}, which is not clear enough: what is learnt together shows later than a race ends."


def _rounds(advice: Advice) -> str:
    return "1 round" if advice.rounds == 1 else f"{advice.rounds} rounds"


def _groups(advice: Advice) -> list[str]:
    if not advice.ran_halving:
        return []
    if not advice.groups:
        return ["Groups: none prefers another split clearly; one does for all."]
    return [
        f"Groups: devices {_comma_separated(map(str, group.clients))} do better with '{group.candidate}', "
        f"by {100 * group.gain.mean:.1f} points ({format_interval(group.gain)}, on data that did not choose them): "
        f"{'leave each of them alone' if group.candidate == NOTHING else 'give them a federation of their own'}."
        for group in advice.groups
    ]


def _cost_line(advice: Advice) -> str:
    cost = advice.cost
    sent = format_bytes(cost.ledger.total.bytes)
    return f"Cost: {sent}, {cost.updates:,} updates by devices, {advice.seconds:.0f} s."


def _comma_separated(words: Iterable[str]) -> str:
    return ", ".join(words)
