"""An audit in plain words: leakage of the attribute, and differences between groups."""

from glocal.core.files import Json
from glocal.report.formatting import PERCENT, pluralize
from glocal.studies.metric_format import MetricFormat

CHANCE_AUC = 50.0  # percent: the AUC of a random guess
KNOWLEDGE = {"own": "own rows", "pooled": "pooled", "strong": "strong"}
LEAKS_NOTE = (
    "Areas under the ROC curve. Attackers are trained afterwards on frozen, noise-free "
    "representations of training data, and tested on test data. In brackets: the 95 % bootstrap "
    "interval over people in the test data, with clients and attackers fixed. Bold: the best AUC "
    "among those above chance (with 95 % confidence, corrected for the number of attackers), or "
    "among all if none is above chance. As a maximum, it is biased upwards."
)
CLIENTS_NOTE = (
    "Each client’s own model on its own test data, and the AUC of the best attacker who knows the "
    "people of its training data. The two differences are those of the groups above, in points. "
    "With few people all values vary widely, and the best of three attackers exceeds 50 by "
    "chance. A dash: the client lacks one of the groups, or one of the classes within a group."
)


def metric_of(report: Json) -> MetricFormat:
    """The metric of the audited task."""
    return MetricFormat(**report["metric"])


def best_leak(report: Json) -> Json:
    """The highest AUC of all attackers; one beyond chance comes before others."""
    best: Json = max(
        report["leaks"], key=lambda row: (bool(row["beyond_chance"]), float(row["auc"]))
    )
    return best


def audit_headline(report: Json) -> str:
    """What the best attacker reads, in two sentences."""
    best, name = best_leak(report), report["attribute"]
    read = (
        f"The best attacker ({best['attacker']}, {KNOWLEDGE[best['knowledge']]}) has an AUC of "
        f"{with_interval(best)}: "
        f"{CHANCE_AUC:.0f} is guessing, 100 is certainty."
    )
    if best["beyond_chance"]:
        return f"From these representations {name} can be predicted better than by guessing. {read}"
    return (
        f"From these representations {name} cannot be predicted better than by guessing, as far as "
        "the "
        f"test data show. {read}"
    )


def audit_summary(report: Json) -> str:
    """What was audited."""
    people = sum(row["people"] for row in report["groups"])
    return (
        f"This audit is of {report['experiment']} ({report['algorithm']}, seed {report['seed']}) "
        f"in the run {report['run']}: "
        f"{pluralize(len(report['clients']), 'client')} with {people:,} people in their test data "
        f"({report['data']}). "
        f"The representation is the output of the module ‘{report['settings']['layer']}’ "
        f"({report['layer_reason']}). "
        "No file of that run was changed."
    )


def attacker_data_text(report: Json) -> list[tuple[str, str]]:
    """What attackers know, for each knowledge that could be tried."""
    over, name = (
        {row["knowledge"]: row["averaged_over"] for row in report["leaks"]},
        report["attribute"],
    )
    texts = {
        "own": f"{name} of the people in a client’s training data; they attack its test data. The "
        "mean over "
        f"{pluralize(over.get('own', 0), 'client')}.",
        "pooled": f"{name} of everybody in the training data, each as seen by the encoder of their "
        "own client.",
        "strong": f"the encoder of one client, and {name} of all other clients’ people, to whose "
        "data they apply it; they attack that client’s "
        f"test data. The mean over {pluralize(over.get('strong', 0), 'encoder')}.",
    }
    return [
        (KNOWLEDGE[knowledge], texts[knowledge]) for knowledge in KNOWLEDGE if knowledge in over
    ]


def differences(report: Json) -> list[tuple[str, str]]:
    """Both differences, each with what it means here."""
    if report["classes"] != 2:
        return [("No differences.", _too_many(report["classes"]))]
    parity, odds = report["demographic_parity_difference"], report["equalized_odds_difference"]
    return [
        (
            f"Demographic parity difference: {_points(parity)}.",
            "" if parity is None else _parity_words(report),
        ),
        (
            f"Equalised odds difference: {_points(odds)}.",
            _one_sided(report) if odds is None else _odds_words(report),
        ),
    ]


def _too_many(classes: int | None) -> str:
    there = "The targets are no classes" if classes is None else f"The data have {classes} classes"
    return f"{there}. Demographic parity and equalised odds are defined for two classes only."


def _parity_words(report: Json) -> str:
    one, other = report["groups"]
    return (
        f"Class 1 is predicted for {_share(one, 'selection_rate')} of the people with "
        f"{_of(report, one)} and for "
        f"{_share(other, 'selection_rate')} of those with {_of(report, other)}. At 0 both groups "
        "are selected equally often, "
        "whatever their true classes are."
    )


def _odds_words(report: Json) -> str:
    one, other = report["groups"]
    return (
        f"Of the people who are of class 1, {_share(one, 'true_positive_rate')} are found among "
        f"those with {_of(report, one)} and "
        f"{_share(other, 'true_positive_rate')} among those with {_of(report, other)}; of the "
        "people of class 0, "
        f"{_share(one, 'false_positive_rate')} and {_share(other, 'false_positive_rate')} are "
        "taken for class 1. The larger "
        "of these two gaps counts. At 0 both groups have the same true and false positive rates."
    )


def _one_sided(report: Json) -> str:
    return f"A group of {report['attribute']} has people of one class only, or nobody."


def _of(report: Json, row: Json) -> str:
    return f"{report['attribute']} = {report['values'][row['group']]}"


def with_interval(row: Json) -> str:
    """An AUC in percent, and its interval."""
    return f"{PERCENT * row['auc']:.1f} [{PERCENT * row['low']:.1f}, {PERCENT * row['high']:.1f}]"


def _points(value: float | None) -> str:
    return "not defined" if value is None else f"{PERCENT * value:.1f} points"


def _share(row: Json, rate: str) -> str:
    return f"{PERCENT * row[rate]:.1f} %"
