"""Liang et al. 2020, Table 4: income on UCI Adult, from representations that hide race and sex.

The text gives neither the number of clients nor how their data are non-IID. Here there are ten
clients, and labels follow a Dirichlet distribution. Race and sex are protected attributes, no
inputs: attackers try to infer them.
"""

from dataclasses import replace
from typing import NamedTuple

from glocal.federate.fitting import Options
from glocal.studies.audit import AuditSettings
from glocal.studies.pretext import PretextSettings
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
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
_KEPT = Options(save="metrics", checkpoint_every=250)

_PAPER = Settings(
    data=DataSettings(source="adult", clients=10),
    model=ModelSettings("bottleneck_mlp", hidden=(32, 32), bottleneck=32, dropout=0.2),
    split=SplitSettings(local=("encoder",)),
    optimizer=OptimizerSettings(lr=0.1, momentum=0.5),
    plan=PlanSettings(clients_per_round=10, batch_size=32, local_epochs=10, seeds=10),
    run=_KEPT,
    audit=AuditSettings(layer="encoder", encoders=1),
)
_TUNED = replace(
    _PAPER,
    model=ModelSettings("bottleneck_mlp", hidden=(32, 32), bottleneck=1, noise_std=0.1),
    optimizer=OptimizerSettings("adam", lr=0.002),
    plan=PlanSettings(clients_per_round=10, batch_size=64, seeds=10),
)


_FEDAVG = ExperimentSettings("fedavg", rounds=10)


def _dealt(settings: Settings, name: str, split: str) -> Settings:
    partition = "iid" if split == "iid" else "dirichlet"
    return replace(
        settings, name=f"adult, {name}", data=replace(settings.data, partition=partition, alpha=3.0)
    )


def _paper(split: str) -> StudyPart:
    """The text's hyper-parameters: 50 rounds of FedAvg, or 10 local epochs and 10 rounds of LG.

    FedAvg and LG have an adversary that is trained along and does not change the model.
    """
    watched, hidden = replace(_ADVERSARY, weight=0.0), replace(_ADVERSARY, weight=1.0)
    experiments = {
        "FedAvg": ExperimentSettings("fedavg", rounds=50, pretext=watched),
        "LG": ExperimentSettings(
            "lg_fedavg", rounds=10, pretext=replace(watched, pretrain_epochs=10)
        ),
        "LG + Adv": ExperimentSettings(
            "lg_fedavg", rounds=10, pretext=replace(hidden, pretrain_epochs=10)
        ),
    }
    settings = replace(_dealt(_PAPER, f"paper, {split}", split), experiments=experiments)
    return StudyPart(_title(split), "paper", settings, published("table4", _SPLITS[split]))


def _tuned(split: str) -> StudyPart:
    """A representation one number wide, a stronger adversary with more steps, a start from FedAvg."""
    plain = {f"LG, rounds {rounds}": _open(rounds) for rounds in (3, 10, 30)}
    hidden = {f"LG + Adv, strength {strength}": _hiding(strength) for strength in STRENGTHS}
    experiments = {"FedAvg": _FEDAVG, **plain, **hidden}
    choices = {"FedAvg": ("FedAvg",), "LG": tuple(plain), "LG + Adv": tuple(hidden)}
    settings = replace(_dealt(_TUNED, f"tuned, {split}", split), experiments=experiments)
    return StudyPart(
        _title(split),
        "tuned",
        settings,
        published("table4", _SPLITS[split]),
        choices,
        leak_limits={"LG + Adv": LIMIT},
    )


def _open(rounds: int) -> ExperimentSettings:
    return ExperimentSettings("lg_fedavg", rounds=rounds, start_from="FedAvg")


def _hiding(strength: float) -> ExperimentSettings:
    pretext = PretextSettings(
        "adversary", layer="encoder", weight=strength, lr=0.004, steps_per_update=3
    )
    return replace(_open(30), pretext=pretext)


class Code(NamedTuple):
    """A representation trained against an adversary: its width, and the adversary's weight."""

    width: int
    strength: float


def _code_name(code: Code) -> str:
    return f"LG + Adv, code {code.width}, strength {code.strength}"


CODES = {
    _code_name(code): code
    for code in (Code(width, strength) for width in WIDTHS for strength in (1, *STRENGTHS))
}


def _curve(width: int) -> StudyPart:
    """Every strength of the adversary for one width of the representation."""
    experiments = {
        name: _hiding(code.strength) for name, code in CODES.items() if code.width == width
    }
    settings = _dealt(_TUNED, f"a code {width} wide", "iid")
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
    for way in ("paper", "tuned"):
        for split in _SPLITS:
            part = f"{way}-{split}"
            hidden, plain = (
                Measurement(part, experiment, "fresh") for experiment in ("LG + Adv", "LG")
            )
            statement = f"{part}: the best fresh attacker has a lower AUC on LG + Adv than on LG"
            claims.append(Claim(statement, (plain,), (hidden,)))
            right = [
                Measurement(part, experiment, "accuracy") for experiment in ("LG + Adv", "FedAvg")
            ]
            statement = f"{part}: LG + Adv costs little accuracy against FedAvg"
            margin = 4.0  # points: "around 4 %" in the text
            claims.append(Claim(statement, (right[0],), (right[1],), margin))
    return tuple(claims)


_VIEWS = {"own": "own rows", "pooled": "pooled", "strong": "strong"}
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
        **{f"code-{width}": _curve(width) for width in WIDTHS},
    },
    claims=_claims(),
    measures={
        "accuracy": "Accuracy",
        "auc": "Income AUC",
        "adversary": "Adversary AUC",
        **{
            f"{view}_{place}": f"{words}, {name}"
            for view, words in _VIEWS.items()
            for place, name in enumerate(("race", "sex"))
        },
    },
    figures={"tradeoff": "liang2020.tradeoff:draw_adult"},
    lower_is_better=frozenset(
        {"adversary", *(f"{view}_{place}" for view in _VIEWS for place in (0, 1))}
    ),
    protocols={
        "paper": "the hyper-parameters of the paper’s appendix, the last round tested",
        "tuned": (
            "our own: a representation one number wide, Adam, a start from FedAvg; "
            "the choice on validation data stands beside a row"
        ),
    },
    caption=(
        "Accuracy: each client’s own model on its own test data, over all people. Income AUC: the "
        "mean over clients of the area under the ROC curve. Adversary AUC: of the adversary that "
        "was trained along, the mean of race and sex, as in the paper. The other AUCs are those of "
        "the best of three fresh attackers (logistic regression, gradient boosting, a network), "
        "trained afterwards on frozen representations without noise: of a client’s own people "
        "(own rows), of all clients’ (pooled), or of one client’s encoder applied to all other "
        "clients’ data (strong). 50 is guessing. In `tuned` the strength is the best on validation "
        f"data of those with an AUC of pooled attackers of at most {100 * LIMIT:.0f} there (or the "
        "one with the lowest); LG’s number of rounds is chosen on validation data, too."
    ),
)
