"""An audit of a saved run: leakage from its representations, and group fairness.

As in a study's own audit, attackers are trained on training data and tested on test data; the
representations are frozen and without noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glocal.core.data import ClientData, Examples
from glocal.core.errors import InputError
from glocal.core.files import FORMAT, Json, write_json
from glocal.core.metric import Metric
from glocal.core.training import Batch
from glocal.core.values import concatenate_rows
from glocal.datasets import SOURCES
from glocal.evaluate.fairness import (
    FairnessMetrics,
    GroupPredictions,
    fairness_metrics,
    require_fairlearn,
)
from glocal.evaluate.leakage import (
    AttackResult,
    Labels,
    average_leakage,
    beyond_chance,
    run_attacks,
)
from glocal.personalize.class_targets import count_classes
from glocal.studies.audit import (
    AuditedClient,
    AuditSettings,
    Encoder,
    audited_clients,
    pool,
    predict,
    protected_attribute,
    protected_attributes,
    train_all_attackers,
)
from glocal.studies.metric_format import MetricFormat
from glocal.studies.representation_layer import default_representation
from glocal.studies.saved_experiment import SavedExperiment

RATES = ("selection_rate", "true_positive_rate", "false_positive_rate")  # of two classes


@dataclass(frozen=True)
class AuditQuery:
    """Which attribute is attacked, at which layer (default: the usual one), and how many encoders.

    `encoders` is how many clients' encoders strong attackers use.
    """

    attribute: str
    layer: str | None = None
    encoders: int = 3


class Predicted(NamedTuple):
    """Some people, a model's outputs for them (rows, ...), and one attribute of theirs (rows,)."""

    people: Examples
    outputs: Tensor
    attribute: Labels

    def of_group(self, value: int) -> "Predicted":
        """The people with one value of the attribute."""
        rows = np.flatnonzero(self.attribute == value)
        outputs = self.outputs[torch.from_numpy(rows)]
        return Predicted(self.people.take(rows), outputs, self.attribute[rows])

    def figure(self, metric: Metric) -> float | None:
        """A metric of all of them together; None where it is undefined."""
        count = self.people.num_rows
        if not count:
            return None
        if metric.of_client is not None:
            value = metric.of_client(self.outputs, self.people.y)
            return None if value is None or np.isnan(value) else float(value)
        mask = torch.ones(count, dtype=torch.bool)
        x, y, group = self.people
        sums, weights = metric.sums(self.outputs, Batch(x, y, group, mask, mask))
        figure = metric.figure(float(sums.double().sum()), float(weights.double().sum()))
        return None if np.isnan(figure) else figure


class SavedAudit:
    """One attribute of one seed of a saved experiment; what cannot be audited is refused."""

    def __init__(self, saved: SavedExperiment, question: AuditQuery) -> None:
        require_fairlearn()
        self.saved, self.seed = saved, saved.trained_federation.plan.seed
        self.name, self.column = find_attribute(saved, question.attribute)
        layer, self.layer_reason = (
            default_representation(saved)
            if question.layer is None
            else (question.layer, "as given")
        )
        self.settings = AuditSettings(layer, question.encoders)
        self.encode = Encoder(saved.trained_federation.task, layer)
        self.clients = audited_clients(
            saved.trained_federation.algorithm, saved.trained_federation.state, saved.federation
        )
        _require_rows(self.encode, self.clients[0], layer)

    def figures(self) -> Json:
        """The attackers' AUCs, the metrics of each group over all clients, and both per client."""
        results, task = self._attack_results(), self.saved.trained_federation.task
        predicted = [_predict(self.saved, client, self.column) for client in self.clients]
        classes = count_classes(task, self.saved.federation.train.examples)
        everybody = _together(predicted)
        fairness = _fairness(everybody, classes)
        rows = []
        for number, own in enumerate(results["own"]):
            rows.append(_client_row(number, predicted[number], own, task.metric, classes))
        return {
            "metric": MetricFormat.of(task.metric)._asdict(),
            "classes": classes,
            "leaks": _leak_rows(results),
            **fairness._asdict(),
            "groups": _group_rows(everybody, fairness, task.metric),
            "clients": rows,
        }

    def _attack_results(self) -> dict[str, list[dict[str, AttackResult]]]:
        """The attackers' results by what they know: per client, pooled, or per encoder."""
        encode, seed = self.encode, self.seed
        own, pooled, strong = train_all_attackers(
            encode, self.clients, self.column, encoders=self.settings.encoders, seed=seed
        )
        tests = [encode.observe(client.params, client.test, self.column) for client in self.clients]
        return {
            "own": [
                run_attacks(attackers, tests[number], seed=seed, client=number)
                for number, attackers in enumerate(own)
            ],
            "pooled": [run_attacks(pooled, pool(tests), seed=seed)],
            "strong": [
                run_attacks(attackers, tests[number], seed=seed, client=number)
                for number, attackers in enumerate(strong)
            ],
        }

    def save(self, folder: Path, figures: Json, about: Json) -> None:
        """Write all metrics, and what was audited."""
        source = self.saved.settings.data.source
        values = SOURCES[source].attributes[self.name] if source in SOURCES else ("0", "1")
        audit = {
            "format": FORMAT,
            **about,
            "experiment": self.saved.experiment,
            "algorithm": self.saved.trained_federation.algorithm.word,
            "seed": self.seed,
            "attribute": self.name,
            "values": values,
            "data": source,
            "settings": asdict(self.settings),
            "layer_reason": self.layer_reason,
        }
        write_json(folder / "audit.json", {**audit, **figures})


def find_attribute(saved: SavedExperiment, attribute: str) -> tuple[str, int]:
    """A protected attribute's name and column; one without a name goes by its number."""
    source = saved.settings.data.source
    train, test = saved.federation.train, saved.federation.test
    if train.examples.group is None or test.examples.group is None:
        others = "; ".join(
            f"those of {name} have {', '.join(each.attributes)}"
            for name, each in SOURCES.items()
            if each.attributes
        )
        raise InputError(
            f"audit: these data ({source}) have no protected columns; {others}, "
            "and your own may have (x, y, group)"
        )
    named = [*SOURCES[source].attributes] if source in SOURCES else []
    names = [
        *named,
        *(
            f"attribute {place}"
            for place in range(len(named), protected_attributes(train.examples).shape[1])
        ),
    ]
    by_name = {
        **{name.removeprefix("attribute "): name for name in names},
        **{name: name for name in names},
    }
    if attribute not in by_name:
        raise InputError(
            f"audit: there is no attribute '{attribute}'; there are {', '.join(names)}"
        )
    name = by_name[attribute]
    for part, split in (("training", train), ("test", test)):
        _require_both(name, _attribute_values(split, names.index(name)), part)
    return name, names.index(name)


def _attribute_values(split: ClientData, place: int) -> set[float]:
    """The values of an attribute in the data."""
    return {
        *protected_attributes(split.examples)[torch.from_numpy(split.all_rows()), place].tolist()
    }


def _require_both(name: str, values: set[float], part: str) -> None:
    if not values <= {0, 1}:
        raise InputError(
            f"audit: {name} has the value {max(values):g}; "
            "a protected attribute must be 0 or 1 for everybody"
        )
    if len(values) < 2:
        raise InputError(
            f"audit: everybody in the {part} data has the same {name}, "
            "so there are no groups to compare"
        )


def _require_rows(encode: Encoder, client: AuditedClient, layer: str) -> None:
    """Refuse a module that is not called, or whose output is not one row per example."""
    try:
        rows = len(encode(client.params, client.train.take(np.zeros(1, dtype=np.int64))))
    except (IndexError, AttributeError):  # it was not called, or its output is a tuple
        rows = 0
    if rows != 1:
        raise InputError(
            f"audit: the output of the module '{layer}' is not one tensor with a row per example; "
            "choose another with --layer"
        )


def _leak_rows(results: Mapping[str, Sequence[Mapping[str, AttackResult]]]) -> list[Json]:
    """One row per knowledge and attacker: the mean over clients or encoders, and their number."""
    attacks: dict[tuple[str, str], list[AttackResult]] = {}
    for knowledge, each in results.items():
        possible = [row for row in each if row]
        for attacker in possible[0] if possible else {}:
            attacks[knowledge, attacker] = [row[attacker] for row in possible]
    return [
        {
            "knowledge": knowledge,
            **average_leakage(attacker, row)._asdict(),
            "averaged_over": len(row),
            "beyond_chance": beyond_chance(row, comparisons=len(attacks)),
        }
        for (knowledge, attacker), row in attacks.items()
    ]


def _predict(saved: SavedExperiment, client: AuditedClient, place: int) -> Predicted:
    """What a client's own model gives for its own test data."""
    outputs = predict(saved.trained_federation.task, client.params, client.test)
    return Predicted(client.test, outputs, protected_attribute(client.test, place))


def _together(parts: Sequence[Predicted]) -> Predicted:
    """The people of all clients."""
    x = concatenate_rows([part.people.x for part in parts])
    y = concatenate_rows([part.people.y for part in parts])
    group = concatenate_rows([part.people.group for part in parts])
    outputs = torch.cat([part.outputs for part in parts])
    attribute = np.concatenate([part.attribute for part in parts])
    return Predicted(Examples(x, y, group), outputs, attribute)


def _fairness(predicted: Predicted, classes: int | None) -> FairnessMetrics:
    """The rates of groups; nothing where targets are no classes."""
    if classes is None:
        return FairnessMetrics([], None, None)
    guesses = predicted.outputs.argmax(1).numpy()
    predictions = GroupPredictions(predicted.people.y.numpy(), guesses, predicted.attribute)
    return fairness_metrics(predictions, classes=classes)


def _group_rows(predicted: Predicted, fairness: FairnessMetrics, metric: Metric) -> list[Json]:
    """Every group's people, the metric of its predictions, and its rates."""
    rates = {row.group: row for row in fairness.groups}
    rows: list[Json] = []
    for value in sorted({*predicted.attribute.tolist()}):
        own = predicted.of_group(value)
        row: Json = {"group": value, "people": own.people.num_rows, "figure": own.figure(metric)}
        for name in RATES:
            row[name] = getattr(rates[value], name) if value in rates else None
        rows.append(row)
    return rows


def _client_row(
    number: int,
    predicted: Predicted,
    own: Mapping[str, AttackResult],
    metric: Metric,
    classes: int | None,
) -> Json:
    fairness = _fairness(predicted, classes)
    return {
        "client": number,
        "people": [int((predicted.attribute == value).sum()) for value in (0, 1)],
        "figure": predicted.figure(metric),
        "demographic_parity_difference": fairness.demographic_parity_difference,
        "equalized_odds_difference": fairness.equalized_odds_difference,
        "leak": max((attack.auc for attack in own.values()), default=None),
    }
