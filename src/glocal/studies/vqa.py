"""Table 2 and the VQA figure of Liang et al. 2020: large private encoders of pictures and questions, a small shared part.

Devices are dealt questions by how they begin, one shard each: shards by answer would give the answer away. Ours are 33,183
questions where the paper speaks of 0.76 million, so that a device takes far fewer steps in a round: five. `paper` is the text as it
stands; `longer` takes six times its rounds, of Adam, with convolutions that are frozen.
"""

from dataclasses import replace

from glocal.fitting import Options
from glocal.studies.settings import (
    CaseSettings,
    DataSettings,
    ModelSettings,
    OptimiserSettings,
    PlanSettings,
    Settings,
    SplitSettings,
)
from glocal.studies.study import Claim, Figure, Part, Published, Score, Study
from glocal.studies.vqa_model import PAPER, SHARED

_ROUNDS, _START, _LG_ROUNDS = 47, 32, 17
_TIMES = 6  # after four times the paper's rounds FedAvg still learnt
_EARLIER = (128, 160)  # rounds of FedAvg in `longer` after which LG-FedAvg takes over in two more rows
# Settled on validation data of three seeds that the study has not (docs/results/vqa-trial.json); larger steps of encoders alone
# gained nothing there.
_RATE, _SMALL = 0.001, 0.0001
_SLOWLY = "FedAvg, then small steps"
_EPOCHS = 20  # of every device by itself
_PUBLISHED = {
    "FedAvg": Published((Score(40.02, None),), 13.97e10, "13.97e10"),
    "LG": Published((Score(40.94, None),), 9.99e10, "9.99e10"),
}
_CONTROLS = {"none": "questions only", "shuffled": "shuffled pictures"}
_MAJORITY = {
    "Majority answer": CaseSettings("glocal.studies.majority:majority", rounds=1, cohort=50),
    "Majority answer of each device": CaseSettings("glocal.studies.majority:own_majority", rounds=1, cohort=50),
}
_TEXT = Settings(
    name="vqa, paper",
    data=DataSettings(source="vqav2", partition="kinds", devices=50, validation=0.1),
    model=ModelSettings("vqa", hidden=tuple(PAPER), dropout=0.5),
    split=SplitSettings(shared=SHARED),
    optimiser=OptimiserSettings(rate=0.01, momentum=0.9, decay=0.0005),
    plan=PlanSettings(cohort=5, batch=100, seeds=3),
    # convolutions as wide as these are slower when devices share a batch
    run=Options(
        engine="looped",
        precision="tf32",
        select="best",
        keep="figures",
        validate_every=1,
        keep_every=1000,
        tests="local",
    ),
    cases={
        **_MAJORITY,
        "Local only": CaseSettings("local_only", rounds=5, cohort=50),
        "FedAvg": CaseSettings("fedavg", rounds=_ROUNDS),
        "LG": CaseSettings("lg_fedavg", rounds=_LG_ROUNDS, after="FedAvg", after_round=_START),
    },
)
_LONGER = replace(
    _TEXT,
    model=replace(_TEXT.model, encoder="frozen"),
    optimiser=OptimiserSettings("adam", rate=_RATE),
    plan=replace(_TEXT.plan, seeds=12),
    run=replace(_TEXT.run, engine="auto", chunk=60, validate_every=2),  # all devices of all seeds at once nearly fill a GPU
)


def _paper(partition: str) -> Part:
    settings = replace(_TEXT, name=f"vqa, paper, {partition}", data=replace(_TEXT.data, partition=partition))
    return Part(_title(partition), "paper", settings, _PUBLISHED if partition == "kinds" else {}, goal="FedAvg")


def _longer(partition: str, pictures: str | None = None) -> Part:
    """The paper's rounds times six; LG-FedAvg's own in small steps, and FedAvg's too, to tell what is due to these alone."""
    lg = CaseSettings(
        "lg_fedavg", rounds=_TIMES * _LG_ROUNDS, after="FedAvg", after_round=_TIMES * _START, after_model="last", rate=_SMALL
    )
    cases = {"FedAvg": CaseSettings("fedavg", rounds=_TIMES * _ROUNDS), "LG": lg}
    data = replace(_LONGER.data, partition=partition, pictures=pictures)
    settings = replace(_LONGER, name=f"vqa, longer, {partition}, {pictures or 'own'} pictures", data=data)
    if pictures:
        return Part(_title(partition), "longer", replace(settings, cases=cases), control=_CONTROLS[pictures])
    alone = CaseSettings("local_only", rounds=_EPOCHS, cohort=50)
    earlier = {f"LG from round {start}": replace(lg, after_round=start) for start in _EARLIER}
    cases = {**_MAJORITY, **cases, **earlier, _SLOWLY: replace(lg, algorithm="fedavg"), "Local only": alone}
    published = _PUBLISHED if partition == "kinds" else {}
    return Part(_title(partition), "longer", replace(settings, cases=cases), published, goal="FedAvg")


def _title(partition: str) -> str:
    return "iid device data" if partition == "iid" else "non-iid device data, by how questions begin"


def _claims() -> tuple[Claim, ...]:
    def local(part: str, case: str) -> tuple[Figure, ...]:
        return (Figure(part, case, "local"),)

    claims = []
    for part in ("paper", "longer"):
        claims += [
            Claim(f"`{part}`: LG is above FedAvg on Local Test", local(part, "LG"), local(part, "FedAvg")),
            Claim(f"`{part}`: LG is above local only on Local Test", local(part, "LG"), local(part, "Local only")),
        ]
    claims += [Claim("`longer`: LG is above FedAvg in small steps", local("longer", "LG"), local("longer", _SLOWLY))]
    for part, words in zip(("questions", "shuffled"), _CONTROLS.values(), strict=True):
        claims += [
            Claim(f"`longer`: {case} is above {case} with {words}", local("longer", case), local(part, case))
            for case in ("FedAvg", "LG")
        ]
    return tuple(claims)


VQA = Study(
    name="paper-vqa",
    title="VQA: private encoders of pictures and questions, a small shared part",
    source="Liang et al. 2020, Table 2 and the figure of appendix C.3",
    says=(
        "LG-FedAvg reaches FedAvg's goal accuracy of 40 % with 71.5 % of the parameters communicated (32 rounds of FedAvg and 17 "
        "of its own against 47), and ends above it."
    ),
    parts={
        "paper": _paper("kinds"),
        "paper-iid": _paper("iid"),
        "longer": _longer("kinds"),
        "longer-iid": _longer("iid"),
        "questions": _longer("kinds", "none"),
        "shuffled": _longer("kinds", "shuffled"),
    },
    claims=_claims(),
    measures={"local": "Local Test"},
    protocols={
        "paper": "the text as it stands; a device takes 5 steps in a round, far fewer than the paper's devices",
        "longer": (
            f"six times the paper’s rounds: {_TIMES * _ROUNDS} of FedAvg, or its first {_TIMES * _START} and then "
            f"{_TIMES * _LG_ROUNDS} of LG-FedAvg, and in two more rows fewer before these; LG-FedAvg starts from the model of that "
            "round, not from the best until then; convolutions frozen, as they were given (`model.weights`, `model.encoder`) or "
            f"drawn at random; Adam at {_RATE:g}, in LG-FedAvg’s own rounds at {_SMALL:g}; “{_SLOWLY}” is FedAvg at {_SMALL:g} "
            f"from round {_TIMES * _START} on"
        ),
    },
    columns=(
        "Local Test: VQA accuracy, min(1, people who agree / 3), of each device’s own model on its own test questions, mean over "
        "devices. **The questions are a small part of VQA v2, balanced by the type of answer, and pictures are 128 x 128: no "
        "figure can be held against the paper’s.** Parameters sent by the paper’s count, as if every device received in every "
        "round; our vocabulary has 5,027 words where the paper’s count asks for 64,437, so that our model is smaller. Frozen "
        "convolutions are never sent. On the wire: what really crosses, evaluation included."
    ),
)
