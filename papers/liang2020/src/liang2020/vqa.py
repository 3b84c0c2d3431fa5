"""Table 2 and the VQA figure of Liang et al. 2020: large local encoders, a small shared part.

Clients get questions by their first two words, one shard each: shards by answer would give the
answer away. We have 33,183 questions where the paper has 0.76 million, so a client takes far fewer
steps in a round: five. `paper` has the text's settings. `longer` takes four times its rounds and
`longest` six times, with Adam and frozen convolutions.
"""

from dataclasses import replace
from typing import NamedTuple

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
from glocal.studies.study import Claim, Measurement, PublishedRow, Score, Study, StudyPart
from liang2020.vqa_model import PAPER, SHARED

_CLIENTS = 50
_ROUNDS, _START, _LG_ROUNDS = 47, 32, 17
# Chosen on validation data of three seeds that the study does not have (results/vqa-trial.json).
# There a larger learning rate for the local encoders alone was no better.
_LR, _SMALL_LR = 0.001, 0.0001
_SMALL_STEPS = "FedAvg, then small steps"
_PUBLISHED = {
    "FedAvg": PublishedRow((Score(40.02, None),), 13.97e10, exponent=10, decimals=2),
    "LG": PublishedRow((Score(40.94, None),), 9.99e10, exponent=10, decimals=2),
}
_TIMES = {4: "four times", 6: "six times"}
_CONTROLS = {"none": "questions only", "shuffled": "shuffled pictures"}
_MAJORITY = {
    "Majority answer": ExperimentSettings(
        "liang2020.majority:Majority", rounds=1, clients_per_round=_CLIENTS
    ),
    "Majority answer of each client": ExperimentSettings(
        "liang2020.majority:OwnMajority", rounds=1, clients_per_round=_CLIENTS
    ),
}
_TEXT = Settings(
    name="vqa, paper, question_types",
    data=DataSettings(source="vqav2", partition="question_types", clients=_CLIENTS, validation=0.1),
    model=ModelSettings("liang2020.vqa_model:build_vqa_net", hidden=tuple(PAPER), dropout=0.5),
    split=SplitSettings(shared=SHARED),
    optimizer=OptimizerSettings(lr=0.01, momentum=0.9, lr_decay=0.0005),
    plan=PlanSettings(clients_per_round=5, batch_size=100, seeds=3),
    run=RunSettings(
        engine="looped",  # convolutions as wide as these are slower when clients share a batch
        precision="tf32",
        select="best",
        save="metrics",
        validate_every=1,
        checkpoint_every=1000,
        tests="local",
    ),
    experiments={
        **_MAJORITY,
        "Local only": ExperimentSettings("local_only", rounds=5, clients_per_round=_CLIENTS),
        "FedAvg": ExperimentSettings("fedavg", rounds=_ROUNDS),
        "LG": ExperimentSettings(
            "lg_fedavg", rounds=_LG_ROUNDS, start_from="FedAvg", start_round=_START
        ),
    },
)
_ADAM = replace(
    _TEXT,
    model=replace(_TEXT.model, encoder="liang2020.vqa_model:frozen_resnet"),
    optimizer=OptimizerSettings("adam", lr=_LR),
)


class _Protocol(NamedTuple):
    """`times` the paper's rounds, with Adam.

    `earlier_starts` are the rounds of FedAvg from which LG-FedAvg starts in additional rows.
    `start_model` is "last" if LG-FedAvg starts from the model of that round, and None if it starts
    from the best so far. `local_epochs` are those of local training without a federation.
    """

    name: str
    times: int
    earlier_starts: tuple[int, ...]
    seeds: int
    run: RunSettings
    start_model: str | None = None
    local_epochs: int = 0

    @property
    def rounds(self) -> int:
        """Rounds of FedAvg."""
        return self.times * _ROUNDS

    @property
    def start_round(self) -> int:
        """The round of FedAvg from which LG-FedAvg starts, as in the paper."""
        return self.times * _START

    @property
    def lg_rounds(self) -> int:
        """Rounds of LG-FedAvg after those of FedAvg."""
        return self.times * _LG_ROUNDS


# All clients of all seeds at once nearly fill a GPU, hence the chunk sizes.
_LONGER = _Protocol(
    "longer",
    4,
    (96, 112),
    6,
    replace(_TEXT.run, engine="auto", precision="fp32", chunk_size=50, validate_every=4),
    local_epochs=20,
)
_LONGEST = _Protocol(
    "longest",
    6,
    (128, 160),
    12,
    replace(_TEXT.run, engine="auto", chunk_size=60, validate_every=2),
    start_model="last",
)


def _part(protocol: _Protocol, *, partition: str = "question_types") -> StudyPart:
    """A part in which every question has its own picture."""
    settings = _settings(protocol, partition, None)
    settings = replace(settings, experiments=_experiments(protocol))
    published = _PUBLISHED if partition == "question_types" else {}
    title = _title(_times_title(protocol), partition)
    return StudyPart(title, protocol.name, settings, published, goal="FedAvg")


def _control(protocol: _Protocol, pictures: str) -> StudyPart:
    """FedAvg and LG-FedAvg without pictures, or with those of other questions."""
    settings = _settings(protocol, "question_types", pictures)
    settings = replace(settings, experiments=_fedavg_and_lg(protocol))
    title = _title(_times_title(protocol), "question_types")
    return StudyPart(title, protocol.name, settings, control=_CONTROLS[pictures])


def _settings(protocol: _Protocol, partition: str, pictures: str | None) -> Settings:
    return replace(
        _ADAM,
        name=f"vqa, {protocol.name}, {partition}, {pictures or 'own'} pictures",
        data=replace(_ADAM.data, partition=partition, pictures=pictures),
        plan=replace(_ADAM.plan, seeds=protocol.seeds),
        run=protocol.run,
    )


def _fedavg_and_lg(protocol: _Protocol) -> dict[str, ExperimentSettings]:
    """FedAvg, and LG-FedAvg from the round where the paper starts it, with small steps."""
    lg = ExperimentSettings(
        "lg_fedavg",
        rounds=protocol.lg_rounds,
        start_from="FedAvg",
        start_round=protocol.start_round,
        start_model=protocol.start_model,
        lr=_SMALL_LR,
    )
    return {"FedAvg": ExperimentSettings("fedavg", rounds=protocol.rounds), "LG": lg}


def _experiments(protocol: _Protocol) -> dict[str, ExperimentSettings]:
    """The two of a control, LG-FedAvg from earlier rounds, and the baselines.

    FedAvg with LG-FedAvg's small steps separates their effect from that of local encoders.
    """
    experiments = {**_MAJORITY, **_fedavg_and_lg(protocol)}
    lg = experiments["LG"]
    for start in protocol.earlier_starts:
        experiments[f"LG from round {start}"] = replace(lg, start_round=start)
    experiments[_SMALL_STEPS] = replace(lg, algorithm="fedavg")
    if protocol.local_epochs:
        experiments["Local only"] = ExperimentSettings(
            "local_only", rounds=protocol.local_epochs, clients_per_round=_CLIENTS
        )
    return experiments


def _times_title(protocol: _Protocol) -> str:
    return f"{_TIMES[protocol.times]} the rounds"


def _title(rounds: str, partition: str = "question_types") -> str:
    """The title of a table; each has its own number of rounds, because traffic depends on it."""
    if partition == "iid":
        return f"{rounds}, IID client data"
    return f"{rounds}, non-IID client data, by how questions begin"


def _above(part: str, experiment: str, other: Measurement, words: str) -> Claim:
    """The claim that an experiment is above another on Local Test."""
    statement = f"`{part}`: {experiment} is above {words}"
    return Claim(statement, (Measurement(part, experiment, "local"),), (other,))


def _lg_above(part: str, experiment: str, words: str) -> Claim:
    """The claim that LG-FedAvg is above another experiment of its part on Local Test."""
    return _above(part, "LG", Measurement(part, experiment, "local"), words)


def _above_control(part: str, control: str, words: str) -> list[Claim]:
    """The claims that FedAvg and LG-FedAvg are above a control on Local Test."""
    claims = []
    for experiment in ("FedAvg", "LG"):
        other = Measurement(control, experiment, "local")
        claims.append(_above(part, experiment, other, f"{experiment} with {words}"))
    return claims


def _claims() -> tuple[Claim, ...]:
    claims: list[Claim] = []
    for part in ("paper", "longer", "longest", "longest-iid"):
        claims.append(_lg_above(part, "FedAvg", "FedAvg on Local Test"))
    for part in ("paper", "longer"):
        claims.append(_lg_above(part, "Local only", "local only on Local Test"))
    for part in ("longer", "longest"):
        claims.append(_lg_above(part, _SMALL_STEPS, "FedAvg in small steps"))
    claims += _above_control("longer", "questions", _CONTROLS["none"])
    claims += _above_control("longer", "shuffled", _CONTROLS["shuffled"])
    claims += _above_control("longest", "longest-questions", _CONTROLS["none"])
    return tuple(claims)


def _describe(protocol: _Protocol) -> str:
    """A protocol in words."""
    is_last = protocol.start_model == "last"
    model = "the model of that round" if is_last else "the best model so far on validation data"
    small = f"{_SMALL_LR:g}"
    return (
        f"{_TIMES[protocol.times]} the paper’s rounds: {protocol.rounds} of FedAvg, or its first "
        f"{protocol.start_round} and then {protocol.lg_rounds} of LG-FedAvg, which starts earlier "
        f"in two more rows; LG-FedAvg starts from {model}; convolutions are frozen, pretrained "
        "(`model.weights`, `model.encoder`) or random; Adam with a learning rate of "
        f"{_LR:g}, in LG-FedAvg’s own rounds {small}; “{_SMALL_STEPS}” is FedAvg with "
        f"{small} from round {protocol.start_round} on; precision {protocol.run.precision}"
    )


VQA = Study(
    name="paper-vqa",
    title="VQA: local encoders of pictures and questions, a small shared part",
    source="Liang et al. 2020, Table 2 and the figure of appendix C.3",
    statement=(
        "LG-FedAvg reaches FedAvg's goal accuracy of 40 % with 71.5 % of the parameters "
        "communicated (32 rounds of FedAvg and 17 of its own against 47), and ends above it."
    ),
    parts={
        "paper": StudyPart(_title("the paper’s rounds"), "paper", _TEXT, _PUBLISHED, goal="FedAvg"),
        "longer": _part(_LONGER),
        "questions": _control(_LONGER, "none"),
        "shuffled": _control(_LONGER, "shuffled"),
        "longest": _part(_LONGEST),
        "longest-questions": _control(_LONGEST, "none"),
        "longest-iid": _part(_LONGEST, partition="iid"),
    },
    claims=_claims(),
    measures={"local": "Local Test"},
    protocols={
        "paper": (
            "the text’s settings; a client takes 5 steps in a round, far fewer than the paper’s "
            "clients; precision tf32"
        ),
        "longer": _describe(_LONGER),
        "longest": _describe(_LONGEST),
    },
    caption=(
        "Local Test: VQA accuracy, min(1, people who agree / 3), of each client’s own model on its "
        "own test questions, mean over clients. **The questions are a small part of VQA v2, "
        "balanced by the type of answer, and pictures are 128 x 128: no accuracy can be compared "
        "with the paper’s.** Parameters sent: by the paper’s count, as if every client received in "
        "every round. Our vocabulary has 5,027 words where the paper’s count requires 64,437, so "
        "that our model is smaller. Frozen convolutions are never sent. On the wire: what is "
        "really sent, evaluation included."
    ),
)
