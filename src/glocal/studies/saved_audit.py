"""An audit of a saved run: what its representations give away about one protected attribute, and how its predictions treat groups.

As in a study's own audit attackers learn from training data and are tested on test data, frozen and without noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.files import Json, write_json
from glocal.datasets import SOURCES
from glocal.evaluate.fairness import (
    FairnessMetrics,
    GroupPredictions,
    fairness_metrics,
    require_fairlearn,
)
from glocal.evaluate.leakage import AttackResult, average_leakage, beyond_chance, run_attacks
from glocal.federate.fitting import num_classes
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
    """Which attribute is looked for, in what a module puts out (by default the usual one), through how many devices' encoders."""

    attribute: str
    layer: str | None = None
    encoders: int = 3


class SavedAudit:
    """One attribute of one seed of a saved case; what cannot be audited is refused at once."""

    def __init__(self, saved: SavedExperiment, question: AuditQuery) -> None:
        require_fairlearn()
        self.saved, self.seed = saved, saved.trained_federation.plan.seed
        self.name, self.column = find_attribute(saved, question.attribute)
        layer, self.layer_reason = (
            default_representation(saved)
            if question.layer is None
            else (question.layer, "as asked for")
        )
        self.settings = AuditSettings(layer, question.encoders)
        self.encode = Encoder(saved.trained_federation.model, layer)
        self.clients = audited_clients(
            saved.trained_federation.algorithm, saved.trained_federation.state, saved.federation
        )
        _require_rows(self.encode, self.clients[0], layer)

    def figures(self) -> Json:
        """What attackers read, how the groups of all devices together are treated, and both for each device."""
        found, judged = (
            self._readings(),
            [_predictions(self.saved, device, self.column) for device in self.clients],
        )
        classes = num_classes(self.saved.trained_federation.model, self.saved.federation)
        everybody = GroupPredictions(*map(np.concatenate, zip(*judged, strict=True)))
        each = enumerate(zip(judged, found["own"], strict=True))
        return {
            "classes": classes,
            "leaks": _leak_rows(found),
            **_as_json(fairness_metrics(everybody, classes=classes)),
            "clients": [
                _device_row(number, fairness_metrics(of, classes=classes), own)
                for number, (of, own) in each
            ],
        }

    def _readings(self) -> dict[str, list[dict[str, AttackResult]]]:
        """By what attackers know, what each of them reads: from every device, from all at once, or through each encoder."""
        encode, seed = self.encode, self.seed
        own, pooled, strong = train_all_attackers(
            encode, self.clients, self.column, encoders=self.settings.encoders, seed=seed
        )
        tests = [encode.observe(device.params, device.test, self.column) for device in self.clients]
        return {
            "own": [
                run_attacks(of, tests[number], seed=seed, client=number)
                for number, of in enumerate(own)
            ],
            "pooled": [run_attacks(pooled, pool(tests), seed=seed)],
            "strong": [
                run_attacks(of, tests[number], seed=seed, client=number)
                for number, of in enumerate(strong)
            ],
        }

    def save(self, folder: Path, figures: Json, about: Json) -> None:
        """All figures, and what they are of."""
        trained_federation = self.saved.trained_federation
        source = self.saved.settings.data.source
        values = SOURCES[source].attributes[self.name] if source in SOURCES else ("0", "1")
        of = {
            "experiment": self.saved.experiment,
            "algorithm": trained_federation.algorithm.name,
            "seed": self.seed,
            "attribute": self.name,
            "values": values,
        }
        told = {
            **about,
            **of,
            "data": source,
            "settings": asdict(self.settings),
            "layer_reason": self.layer_reason,
        }
        write_json(folder / "audit.json", {**told, **figures})


def find_attribute(saved: SavedExperiment, wanted: str) -> tuple[str, int]:
    """A protected attribute's name and column; one without a name goes by its number."""
    source = saved.settings.data.source
    train, test = saved.federation.train, saved.federation.test
    if train.examples.group is None or test.examples.group is None:
        others = "; ".join(
            f"those of {name} have {', '.join(of.attributes)}"
            for name, of in SOURCES.items()
            if of.attributes
        )
        raise InputError(
            f"audit: these data ({source}) have no protected columns; {others}, and your own may have (x, y, group)"
        )
    named = [*SOURCES[source].attributes] if source in SOURCES else []
    names = [
        *named,
        *(
            f"attribute {place}"
            for place in range(len(named), protected_attributes(train.examples).shape[1])
        ),
    ]
    known = {
        **{name.removeprefix("attribute "): name for name in names},
        **{name: name for name in names},
    }
    if wanted not in known:
        raise InputError(f"audit: there is no attribute '{wanted}'; there are {', '.join(names)}")
    name = known[wanted]
    for part, holdings in (("training", train), ("test", test)):
        _require_both(name, _attribute_values(holdings, names.index(name)), part)
    return name, names.index(name)


def _attribute_values(holdings: ClientData, place: int) -> set[float]:
    """The values of an attribute that somebody has."""
    return {
        *protected_attributes(holdings.examples)[
            torch.from_numpy(holdings.all_rows()), place
        ].tolist()
    }


def _require_both(name: str, values: set[float], part: str) -> None:
    if not values <= {0, 1}:
        raise InputError(
            f"audit: {name} is {max(values):g} for somebody; a protected attribute must be 0 or 1 for everybody"
        )
    if len(values) < 2:
        raise InputError(
            f"audit: everybody in the {part} data has the same {name}, so that there are no groups to compare"
        )


def _require_rows(encode: Encoder, device: AuditedClient, layer: str) -> None:
    """Refuse a module that is there and puts out something else than a row for each person, or is never asked to."""
    try:
        rows = len(encode(device.params, device.train.take(np.zeros(1, dtype=np.int64))))
    except (IndexError, AttributeError):  # it was not called; it puts out a tuple
        rows = 0
    if rows != 1:
        raise InputError(
            f"audit: the module '{layer}' does not put out one tensor with a row for everybody; choose another with --at"
        )


def _leak_rows(found: Mapping[str, Sequence[Mapping[str, AttackResult]]]) -> list[Json]:
    """One row for each knowledge and attacker: the mean over those that it could be tried on, and how many they are."""
    tried = {
        (knowledge, attacker): [each[attacker] for each in read if each]
        for knowledge, read in found.items()
        for attacker in next(filter(None, read), {})
    }
    return [
        {
            "knowledge": knowledge,
            **average_leakage(attacker, read)._asdict(),
            "averaged_over": len(read),
            "beyond_chance": beyond_chance(read, comparisons=len(tried)),
        }
        for (knowledge, attacker), read in tried.items()
    ]


def _predictions(saved: SavedExperiment, device: AuditedClient, place: int) -> GroupPredictions:
    """A device's own test people, as its own model sees them."""
    guess = predict(saved.trained_federation.model, device.params, device.test).argmax(1)
    return GroupPredictions(
        device.test.y.numpy(), guess.numpy(), protected_attribute(device.test, place)
    )


def _as_json(found: FairnessMetrics) -> Json:
    return {**found._asdict(), "groups": [rates._asdict() for rates in found.groups]}


def _device_row(number: int, found: FairnessMetrics, own: Mapping[str, AttackResult]) -> Json:
    people = {rates.group: rates.people for rates in found.groups}
    right = sum(rates.people * rates.accuracy for rates in found.groups)
    return {
        "client": number,
        "people": [people.get(group, 0) for group in (0, 1)],
        "accuracy": right / sum(people.values()) if people else None,
        "demographic_parity_difference": found.demographic_parity_difference,
        "equalized_odds_difference": found.equalized_odds_difference,
        "leak": max((reading.auc for reading in own.values()), default=None),
    }
