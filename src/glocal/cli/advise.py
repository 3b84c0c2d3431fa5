"""Advice in the terminal: what to share, why, how certain that is, and what it cost."""

from collections.abc import Callable, Iterable
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
from glocal.personalize.advisor.groups import ClientGroup
from glocal.personalize.advisor.search import CandidateResult
from glocal.studies import STUDIES, Settings, from_toml, with_overrides
from glocal.studies.build import build_algorithm, build_components
from glocal.studies.metric_format import MetricFormat
from glocal.studies.registry import installed_studies
from glocal.studies.settings import DataSettings, ExperimentSettings

_HALF = 0.5
_MIN_WIDTH = 120  # letters


def resolve_settings(data: str, model: str | None, changes: list[str]) -> Settings:
    """The settings of a study, a TOML file or a data set, with another model if one is named."""
    if data in STUDIES:
        base = STUDIES[data]
    elif Path(data).suffix == ".toml":
        base = from_toml(Path(data))
    elif data in installed_studies():
        raise InputError(
            f"advise: '{data}' is a study of several parts; "
            "name a data set and a model, such as mnist and mlp"
        )
    elif model is None:
        raise InputError(
            f"advise: '{data}' is neither a study nor a TOML file, and no model is named; "
            "name one, such as mlp"
        )
    else:
        base = Settings(name=data, data=DataSettings(source=data))
    if model is not None:
        base = replace(base, model=replace(base.model, name=model))
    return with_overrides(replace(base, experiments={}, groups={}), changes)


def show_advice(
    settings: Settings, config: AdvisorConfig, *, rounds: int, out: Path | None, command: str
) -> None:
    """Run the advisor, print its advice, and write it to a file."""
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
        with console.status("starting") as status:
            advice = advise(
                algorithm,
                federation,
                warmup_plan,
                config=config,
                options=settings.run.options(),
                log=status.update,
            )
    except KeyboardInterrupt:
        console.print("stopped; nothing was saved", highlight=False)
        raise
    examples = int(federation.train.sizes.sum())
    print(
        f"{federation.num_clients} clients with {examples:,} examples; "
        f"a model of {numel(params_of(parts.model)):,} parameters"
    )
    print_advice(advice)
    if out is not None:
        write_json(out, {"command": command, "settings": settings.as_dict(), **advice.as_dict()})
        print(f"written: {out}")


def print_advice(advice: Advice) -> None:
    """The variances, the search, and the recommendation."""
    _print_variances(advice)
    if advice.ran_halving:
        _print_halving(advice)
    print()
    for line in recommendation(advice):
        print(line)


def _print_variances(advice: Advice) -> None:
    print(
        f"\nHow clients differ: updates of {len(advice.participants)} clients, "
        "on two halves of each client's data"
    )
    table = _table(
        "layer", "within-client\nvariance", "between-client\nvariance", "alpha*", "95 % interval"
    )
    for layer, variance in advice.variances.items():
        interval = f"{variance.low:.2f} to {variance.high:.2f}"
        table.add_row(
            layer,
            f"{variance.within_client:.2g}",
            f"{variance.between_client:.2g}",
            f"{variance.alpha:.2f}",
            interval,
        )
    _print_unwrapped(table)


def _print_halving(advice: Advice) -> None:
    metric = MetricFormat.of(advice.metric)
    clients = f"{len(advice.participants)} clients"
    print(f"\nThe search: {metric.label} on held-out data of {clients}")
    ends = sorted(set().union(*(row.figures for row in advice.rows)))
    table = _table(
        "",
        "sends",
        *(f"round {rounds}" for rounds in ends),
        "better than\nthe choice by",
        "95 % interval",
    )
    for row in sorted(advice.rows, key=_sort_key(metric)):
        figures = []
        for rounds in ends:
            figures.append(metric.number(row.figures[rounds]) if rounds in row.figures else "")
        table.add_row(
            row.candidate.name,
            f"{100 * row.sent_fraction:.1f} %",
            *figures,
            *_margin_cells(advice, row),
        )
    _print_unwrapped(table)


def _print_unwrapped(table: Table) -> None:
    """A table with all of its digits, even where lines are too short for them."""
    Console(width=max(Console().width, _MIN_WIDTH)).print(table, highlight=False)


def _sort_key(metric: MetricFormat) -> Callable[[CandidateResult], tuple[int, float]]:
    """Candidates that stayed longest first, the best of them on top."""

    def key(row: CandidateResult) -> tuple[int, float]:
        last = max(row.figures, default=0)
        figure = row.figures.get(last, 0.0)
        return -last, -figure if metric.higher_is_better else figure

    return key


def _margin_cells(advice: Advice, row: CandidateResult) -> tuple[str, str]:
    if row.lead is None or row.candidate == advice.choice:
        return "", ""
    return MetricFormat.of(advice.metric).signed(row.lead.mean), _interval(advice, row.lead)


def _interval(advice: Advice, lead: ConfidenceInterval) -> str:
    """The ends of an interval, in points for fractions."""
    metric = MetricFormat.of(advice.metric)
    return f"{metric.signed(lead.low)} to {metric.signed(lead.high)}"


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in rest:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def recommendation(advice: Advice) -> list[str]:
    """What to do, why, how certain that is, and what it cost, line by line."""
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
            "Share nothing after a warm start with FedAvg: fine-tune on every client.",
            f"  split.local = [{listed}]",
        ]
    return [
        f"Share {', '.join(choice.shared)}; keep {', '.join(choice.local)} local.",
        f"  split.local = [{listed}]",
    ]


def _reason_line(advice: Advice) -> str:
    alpha, expected = advice.variances["all"].alpha, advice.by_variances
    reason = (
        "the between-client variance is larger than the within-client variance"
        if alpha > _HALF
        else "the within-client variance is larger than the between-client variance"
    )
    text = f"Why: alpha* is {alpha:.2f}: {reason}"
    if not advice.ran_halving:
        return f"{text}; the budget was too small for a search, so only the linear theory decides."
    if expected == advice.choice.name:
        return f"{text}; the variances suggest '{expected}', and so does the search."
    verdict = _verdict(advice, expected)
    return f"{text}; the variances suggest '{expected}', which {verdict} in the search."


def _verdict(advice: Advice, name: str) -> str:
    """How a split that was not chosen did in comparison with the choice."""
    gap = _gap(advice, name)
    if gap.mean > 0:
        return "was ahead" if gap.low > 0 else "was ahead, but not clearly,"
    return "did about as well" if name in advice.equally_good or not gap.mean else "did worse"


def _gap(advice: Advice, name: str) -> ConfidenceInterval:
    """How much better a candidate is than the choice."""
    (gap,) = (row.lead for row in advice.rows if row.candidate.name == name)
    assert gap is not None
    return gap


def _confidence_line(advice: Advice) -> str:
    if not advice.ran_halving:
        return "Certainty: low; give it a larger budget."
    equally_good = [name for name in advice.equally_good if name != advice.choice.name]
    caveats = _local_only_caveat(advice)
    if not advice.finished:
        caveats += " The budget ended the search early."
    if equally_good:
        return (
            f"Certainty: {_comma_separated(equally_good)} did about as well in {_rounds(advice)}; "
            f"the choice {_sent_comparison(advice)}.{caveats}"
        )
    rivals = [
        row
        for row in advice.rows
        if row.candidate != advice.choice and max(row.figures, default=0) == advice.rounds
    ]
    if not rivals:
        return f"Certainty: the others were behind before round {advice.rounds}.{caveats}"
    nearest_row = max(rivals, key=lambda row: _gap(advice, row.candidate.name).mean)
    gap = _gap(advice, nearest_row.candidate.name)
    if gap.mean >= 0:
        as_well = (
            "" if gap.mean else f" '{nearest_row.candidate.name}' did as well in {_rounds(advice)}."
        )
        return f"Certainty: low.{as_well}{caveats}"
    ahead = ConfidenceInterval(-gap.mean, -gap.high, -gap.low)
    clear = "clearly" if ahead.low > 0 else "not clearly"
    return (
        f"Certainty: {clear} ahead of '{nearest_row.candidate.name}', "
        f"by {_amount(advice, ahead)}.{caveats}"
    )


def _sent_comparison(advice: Advice) -> str:
    """How much of the model the choice sends, in comparison with candidates as good."""
    sent = {row.candidate.name: 100 * row.sent_fraction for row in advice.rows}
    least = min(advice.equally_good, key=lambda name: sent[name])
    if advice.choice.name == least:
        return f"sends least of these, {sent[least]:.1f} % of the model"
    return (
        f"sends {sent[advice.choice.name]:.1f} % of the model, "
        f"'{least}' {sent[least]:.1f} % (--prefer bytes)"
    )


def _local_only_caveat(advice: Advice) -> str:
    """The caveat where sharing nothing was ahead of the choice, but not clearly."""
    if advice.choice.name == NOTHING or _gap(advice, NOTHING).mean <= 0:
        return ""
    gap = _gap(advice, NOTHING)
    return (
        f" '{NOTHING}' was ahead by {_amount(advice, gap)}, which is not clear enough: "
        "shared training often gains only after more rounds than the search has."
    )


def _amount(advice: Advice, lead: ConfidenceInterval) -> str:
    """A lead with its interval."""
    return f"{MetricFormat.of(advice.metric).amount(lead.mean)} ({_interval(advice, lead)})"


def _rounds(advice: Advice) -> str:
    return "1 round" if advice.rounds == 1 else f"{advice.rounds} rounds"


def _groups(advice: Advice) -> list[str]:
    if not advice.ran_halving:
        return []
    if not advice.groups:
        return ["Groups: no group clearly prefers another split; one split serves all."]
    return [
        f"Groups: clients {_comma_separated(map(str, group.clients))} "
        f"do better with '{group.candidate}', "
        f"by {_amount(advice, group.gain)}, on data not used to choose them: "
        f"{_group_advice(group)}."
        for group in advice.groups
    ]


def _group_advice(group: ClientGroup) -> str:
    if group.candidate == NOTHING:
        return "let each of them train alone"
    return "train them in a separate federation"


def _cost_line(advice: Advice) -> str:
    cost = advice.cost
    sent = format_bytes(cost.ledger.total.bytes)
    return f"Cost: {sent}, {cost.updates:,} client updates, {advice.seconds:.0f} s."


def _comma_separated(words: Iterable[str]) -> str:
    return ", ".join(words)
