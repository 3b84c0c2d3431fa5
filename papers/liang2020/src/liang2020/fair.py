"""Liang et al. 2020, Table 4: income on UCI Adult, from representations that hide race and sex.

The text gives neither the number of clients nor how their data are non-IID. Here there are ten
clients, and labels follow a Dirichlet distribution. Race and sex are protected attributes: they are
no inputs of the model, and attackers try to infer them from its representations.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from glocal.studies.audit import AuditSettings
from glocal.studies.pretext import PretextSettings
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    RunSettings,
    Settings,
    SplitSettings,
)
from glocal.studies.study import Claim, Measurement, Study, StudyPart
from liang2020.published import published

STRENGTHS = (3, 10, 30)
WIDTHS = (1, 2, 8, 32)
LIMIT = 0.57  # the AUC that fresh attackers may reach on validation data
_SPLITS = {"iid": 10, "noniid": 2}  # as the published tables number them
_ADVERSARY = PretextSettings("adversary", layer="encoder", hidden=(32, 32, 32))
_RUN = RunSettings(save="metrics", checkpoint_every=250)

_PAPER = Settings(
    data=DataSettings(source="adult", clients=10),
    model=ModelSettings("bottleneck_mlp", hidden=(32, 32), bottleneck=32, dropout=0.2),
    split=SplitSettings(local=("encoder",)),
    optimizer=OptimizerSettings(lr=0.1, momentum=0.5),
    plan=PlanSettings(clients_per_round=10, batch_size=32, local_epochs=10, seeds=10),
    run=_RUN,
    audit=AuditSettings(layer="encoder", encoders=1),
)
_TUNED = replace(
    _PAPER,
    model=ModelSettings("bottleneck_mlp", hidden=(32, 32), bottleneck=1, noise_std=0.1),
    optimizer=OptimizerSettings("adam", lr=0.002),
    plan=PlanSettings(clients_per_round=10, batch_size=64, seeds=10),
)
_FEDAVG = ExperimentSettings("fedavg", rounds=10)


def _with_partition(settings: Settings, name: str, split: str) -> Settings:
    partition = "iid" if split == "iid" else "dirichlet"
    data = replace(settings.data, partition=partition, alpha=3.0)
    return replace(settings, name=f"adult, {name}", data=data)


def _paper(split: str) -> StudyPart:
    """The text's hyper-parameters: 50 rounds of FedAvg, or 10 local epochs and 10 rounds of LG.

    With FedAvg and LG, an adversary is trained beside the model and does not change it.
    """
    observer = replace(_ADVERSARY, weight=0.0)
    observer_of_lg = replace(observer, pretrain_epochs=10)
    adversary_of_lg = replace(_ADVERSARY, weight=1.0, pretrain_epochs=10)
    experiments = {
        "FedAvg": ExperimentSettings("fedavg", rounds=50, pretext=observer),
        "LG": ExperimentSettings("lg_fedavg", rounds=10, pretext=observer_of_lg),
        "LG + Adv": ExperimentSettings("lg_fedavg", rounds=10, pretext=adversary_of_lg),
    }
    settings = replace(_with_partition(_PAPER, f"paper, {split}", split), experiments=experiments)
    return StudyPart(_title(split), "paper", settings, published("table4", _SPLITS[split]))


def _tuned(split: str) -> StudyPart:
    """One number as representation, a stronger adversary with more steps, a start from FedAvg."""
    plain: dict[str, ExperimentSettings] = {}
    adversarial: dict[str, ExperimentSettings] = {}
    choices: dict[str, str] = {}
    for rounds in (3, 10, 30):
        name = f"LG, rounds {rounds}"
        plain[name] = _plain(rounds)
        choices[name] = f"rounds {rounds}"
    for strength in STRENGTHS:
        name = f"LG + Adv, strength {strength}"
        adversarial[name] = _adversarial(strength)
        choices[name] = f"strength {strength}"
    experiments = {"FedAvg": _FEDAVG, **plain, **adversarial}
    candidates = {"FedAvg": ("FedAvg",), "LG": tuple(plain), "LG + Adv": tuple(adversarial)}
    settings = replace(_with_partition(_TUNED, f"tuned, {split}", split), experiments=experiments)
    return StudyPart(
        _title(split),
        "tuned",
        settings,
        published("table4", _SPLITS[split]),
        candidates,
        choices=choices,
        leak_limits={"LG + Adv": LIMIT},
    )


def _plain(rounds: int) -> ExperimentSettings:
    return ExperimentSettings("lg_fedavg", rounds=rounds, start_from="FedAvg")


def _adversarial(strength: float) -> ExperimentSettings:
    pretext = PretextSettings(
        "adversary", layer="encoder", weight=strength, lr=0.004, steps_per_update=3
    )
    return replace(_plain(30), pretext=pretext)


class Bottleneck(NamedTuple):
    """A representation trained against an adversary: its width, and the adversary's weight."""

    width: int
    strength: float


def _experiment_name(bottleneck: Bottleneck) -> str:
    return f"LG + Adv, bottleneck {bottleneck.width}, strength {bottleneck.strength}"


_BOTTLENECKS = [Bottleneck(*pair) for pair in product(WIDTHS, (1, *STRENGTHS))]
BOTTLENECKS = {_experiment_name(bottleneck): bottleneck for bottleneck in _BOTTLENECKS}


def _curve(width: int) -> StudyPart:
    """Every strength of the adversary for one width of the representation."""
    experiments = {
        name: _adversarial(bottleneck.strength)
        for name, bottleneck in BOTTLENECKS.items()
        if bottleneck.width == width
    }
    settings = _with_partition(_TUNED, f"a bottleneck {width} wide", "iid")
    settings = replace(
        settings,
        model=replace(settings.model, bottleneck=width),
        experiments={"FedAvg": _FEDAVG, **experiments},
    )
    return StudyPart(f"a representation {width} wide, IID", "tuned", settings)


def _title(split: str) -> str:
    return {"iid": "IID client data", "noniid": "non-IID client data"}[split]


def _claims() -> tuple[Claim, ...]:
    """The paper's claims about Table 4, and the same about fresh attackers."""
    claims = []
    for protocol, split in product(("paper", "tuned"), _SPLITS):
        part = f"{protocol}-{split}"
        leak = Measurement(part, "LG", "fresh")
        adversarial_leak = Measurement(part, "LG + Adv", "fresh")
        statement = f"{part}: the best fresh attacker has a lower AUC on LG + Adv than on LG"
        claims.append(Claim(statement, (leak,), (adversarial_leak,)))
        accuracy = Measurement(part, "LG + Adv", "accuracy")
        fedavg_accuracy = Measurement(part, "FedAvg", "accuracy")
        statement = f"{part}: LG + Adv costs little accuracy against FedAvg"
        margin = 4.0  # points: "around 4 %" in the text
        claims.append(Claim(statement, (accuracy,), (fedavg_accuracy,), margin))
    return tuple(claims)


def _fresh_measures() -> dict[str, str]:
    """The AUCs of fresh attackers by key, for what they see and for both attributes."""
    views = {"own": "own rows", "pooled": "pooled", "strong": "strong"}
    measures = {}
    for view, words in views.items():
        for number, attribute in enumerate(("race", "sex")):
            measures[f"{view}_{number}"] = f"{words}, {attribute}"
    return measures


_FRESH_MEASURES = _fresh_measures()
FAIR = Study(
    name="paper-adult",
    title="UCI Adult: representations that hide race and sex",
    source="Liang et al. 2020, Table 4",
    statement=(
        "LG-FedAvg with adversarial training learns fair local representations that are unable to "
        "predict protected attributes (around 50 % adversary AUC) with only a small drop in "
        "accuracy (around 4 %)."
    ),
    parts={
        **{f"paper-{split}": _paper(split) for split in _SPLITS},
        **{f"tuned-{split}": _tuned(split) for split in _SPLITS},
        **{f"bottleneck-{width}": _curve(width) for width in WIDTHS},
    },
    claims=_claims(),
    measures={
        "accuracy": "Accuracy",
        "auc": "Income AUC",
        "adversary": "Adversary AUC",
        **_FRESH_MEASURES,
    },
    figures={"tradeoff": "liang2020.tradeoff:draw_adult"},
    lower_is_better=frozenset({"adversary", *_FRESH_MEASURES}),
    protocols={
        "paper": "the hyper-parameters of the paper’s appendix, the last round tested",
        "tuned": (
            "our own settings: a representation one number wide, Adam, a start from FedAvg; "
            "a row names what was chosen on validation data"
        ),
    },
    caption=(
        "Accuracy: each client’s own model on its own test data, over all people. Income AUC: the "
        "mean over clients of the area under the ROC curve. Adversary AUC: of the adversary "
        "trained with the model, the mean of race and sex, as in the paper. The other AUCs are of "
        "the best of three fresh attackers (logistic regression, gradient boosting, a network). "
        "They are trained afterwards on frozen representations without noise: of a client’s own "
        "people (own rows), of all clients’ people (pooled), or of one client’s encoder on all "
        "other clients’ data (strong). Guessing has 50. In `tuned`, the strength is the best on "
        "validation data among those where pooled attackers reach an AUC of at most "
        f"{100 * LIMIT:.0f} there, or else the one with the lowest AUC. LG’s number of rounds is "
        "chosen on validation data too."
    ),
)
