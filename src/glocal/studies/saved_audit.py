"""An audit of a saved run: leakage from its representations, and group fairness.

As in a study's own audit, attackers are trained on training data and tested on test data; the
representations are frozen and without noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.files import FORMAT, Json, write_json
from glocal.datasets import SOURCES
from glocal.evaluate.fairness import (
    FairnessMetrics,
    GroupPredictions,
    fairness_metrics,
    require_fairlearn,
)
from glocal.evaluate.leakage import AttackResult, average_leakage, beyond_chance, run_attacks
from glocal.federate.outputs import num_classes
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
from glocal.studies.representation_layer import default_representation
from glocal.studies.saved_experiment import SavedExperiment


@dataclass(frozen=True)
class AuditQuery:
    """Which attribute is attacked, at which layer (default: the usual one), and how many encoders.

    `encoders` is how many clients' encoders strong attackers use.
    """

    attribute: str
    layer: str | None = None
    encoders: int = 3


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
        results = self._attack_results()
        predictions = [_predictions(self.saved, client, self.column) for client in self.clients]
        classes = num_classes(
            self.saved.trained_federation.task, self.saved.federation.train.examples.x
        )
        everybody = GroupPredictions(*map(np.concatenate, zip(*predictions, strict=True)))
        rows = []
        for number, own in enumerate(results["own"]):
            metrics = fairness_metrics(predictions[number], classes=classes)
            rows.append(_client_row(number, metrics, own))
        return {
            "classes": classes,
            "leaks": _leak_rows(results),
            **_as_json(fairness_metrics(everybody, classes=classes)),
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


def _predictions(saved: SavedExperiment, client: AuditedClient, place: int) -> GroupPredictions:
    """The predictions of a client's own model on its own test data."""
    classes = predict(saved.trained_federation.task, client.params, client.test).argmax(1)
    return GroupPredictions(
        client.test.y.numpy(), classes.numpy(), protected_attribute(client.test, place)
    )


def _as_json(metrics: FairnessMetrics) -> Json:
    return {**metrics._asdict(), "groups": [rates._asdict() for rates in metrics.groups]}


def _client_row(number: int, metrics: FairnessMetrics, own: Mapping[str, AttackResult]) -> Json:
    people = {rates.group: rates.people for rates in metrics.groups}
    correct = sum(rates.people * rates.accuracy for rates in metrics.groups)
    return {
        "client": number,
        "people": [people.get(group, 0) for group in (0, 1)],
        "accuracy": correct / sum(people.values()) if people else None,
        "demographic_parity_difference": metrics.demographic_parity_difference,
        "equalized_odds_difference": metrics.equalized_odds_difference,
        "leak": max((attack.auc for attack in own.values()), default=None),
    }
