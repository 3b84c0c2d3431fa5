"""Liang et al. 2020, section 5.2 and Figure 2(d): mood from texts, on public data.

The paper's MAPS data are private; here the texts are mood essays. The network, the hyper-parameters
and the ten random 80/10/10 splits are the paper's. Each split has five restarts, and the best on
validation data counts. The text leaves open the width of word vectors, the learning-rate schedule
and the number of rounds; they are set below.
"""

from dataclasses import replace

from glocal.studies.ordinal import OrdinalSettings
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    RunSettings,
    Settings,
)
from glocal.studies.study import Claim, Measurement, Study, StudyPart

PEOPLE = 14
ROUNDS = 30
_START = 20  # rounds of FedAvg before its head becomes local
_LR_STEP_SIZE = 10
_LAYERS = (
    "words.first",
    "words.second",
    "lstm.forwards",
    "lstm.backwards",
    "head.layer1",
    "head.layer[23]",
)
# the number of layers before the cut of an α-split; SHARES has the shares of parameters
_CUTS = {".2": 1, ".4": 2, ".6": 3, ".8": 5}
_WHOLE = 4  # layers of the encoder: words and LSTM
_ENCODER, _HEAD = "encoder local", "head local"
SHARES_BY_DIRECTION = {
    _ENCODER: {
        f"{_ENCODER}, α = .2": 0.209,
        f"{_ENCODER}, α = .4": 0.418,
        f"{_ENCODER}, α = .6": 0.571,
        f"{_ENCODER}, α = .8": 0.815,
        f"{_ENCODER}, all of it": 0.724,
    },
    _HEAD: {
        f"{_HEAD}, α = .2": 0.185,
        f"{_HEAD}, α = .4": 0.429,
        f"{_HEAD}, α = .6": 0.582,
        f"{_HEAD}, α = .8": 0.791,
        f"{_HEAD}, all of it": 0.276,
    },
}
SHARES = {**SHARES_BY_DIRECTION[_ENCODER], **SHARES_BY_DIRECTION[_HEAD]}
FINE_TUNED = "FedAvg, then head local"
BEST_SPLIT, BEST = "best split from the start", "best mix"
BASELINES = (
    "Majority",
    "Majority per person",
    "Bag of words, per person",
    "Bag of words, pooled",
    "Bag of words, pooled, knows the person",
)


def _mixes() -> dict[str, ExperimentSettings]:
    """Every split of the layers: the first few local, or the last few."""
    local_layers = {f"{_ENCODER}, α = {alpha}": _LAYERS[:cut] for alpha, cut in _CUTS.items()}
    local_layers[f"{_ENCODER}, all of it"] = _LAYERS[:_WHOLE]
    # where the encoder's share is .8, the head's is .2
    for alpha, cut in zip(_CUTS, reversed(_CUTS.values()), strict=True):
        local_layers[f"{_HEAD}, α = {alpha}"] = _LAYERS[cut:]
    local_layers[f"{_HEAD}, all of it"] = _LAYERS[_WHOLE:]
    return {
        name: ExperimentSettings("lg_fedavg", local=layers) for name, layers in local_layers.items()
    }


def _experiments() -> dict[str, ExperimentSettings]:
    """Every method for the same number of rounds."""
    head = ExperimentSettings(
        "lg_fedavg",
        rounds=ROUNDS - _START,
        start_from="FedAvg",
        start_round=_START,
        local=_LAYERS[_WHOLE:],
        # the schedule counts all rounds, so that the first of these has a learning rate of 0.001
        lr=1e-3 * 2 ** (_START // _LR_STEP_SIZE),
    )
    return {
        "FedAvg": ExperimentSettings("fedavg"),
        **_mixes(),
        "Local only": ExperimentSettings("local_only"),
        FINE_TUNED: head,
    }


_ESSAYS = Settings(
    data=DataSettings("mood_essays", "natural", validation=0.1),
    model=ModelSettings("liang2020.mood_model:build_mood_lstm"),
    optimizer=OptimizerSettings("adam", lr=5e-3, lr_gamma=0.5, lr_step_size=_LR_STEP_SIZE),
    plan=PlanSettings(
        rounds=ROUNDS,
        clients_per_round=PEOPLE,
        batch_size=32,
        max_tokens=2000,
        seeds=10,
        restarts=5,
    ),
    # 10 splits x 5 restarts x 14 people in chunks of 100: few shapes
    run=RunSettings(
        select="best", save="metrics", validate_every=1, checkpoint_every=1000, chunk_size=100
    ),
    ordinal=OrdinalSettings(bag_of_words=True),
    experiments=_experiments(),
)


def _part(title: str, settings: Settings) -> StudyPart:
    rows = {name: (name,) for name in settings.experiments}
    best = {BEST_SPLIT: tuple(SHARES), BEST: (*SHARES, FINE_TUNED)}
    return StudyPart(title, "paper", settings, candidates={**rows, **best}, baselines=BASELINES)


def _few() -> StudyPart:
    settings = replace(
        _ESSAYS, name="mood, 14 people", data=replace(_ESSAYS.data, keep_clients=PEOPLE)
    )
    return _part(f"{PEOPLE} people with most texts", settings)


def _all() -> StudyPart:
    """All people; one restart on three splits, because ten do not fit into a GPU's memory."""
    plan = replace(_ESSAYS.plan, clients_per_round=182, seeds=3, restarts=1)
    run = replace(_ESSAYS.run, chunk_size=192)
    return _part("all 182 people", replace(_ESSAYS, name="mood, all people", plan=plan, run=run))


def _claims() -> tuple[Claim, ...]:
    """The paper's claims about its figure, and the levels expected from trials on these data."""
    few = "14-people"
    local, fedavg, mix = (_accuracy(few, row) for row in ("Local only", "FedAvg", BEST))
    words = _accuracy(few, BASELINES[-1])
    return (
        *_above_both_ends(few),
        *_above_both_ends("all-people"),
        Claim("14-people: local only has an accuracy of 48 % or more", (local,), (), level=48),
        Claim("14-people: FedAvg has an accuracy above 42 %", (fedavg,), (), level=42),
        Claim("14-people: the best mix has an accuracy of 56 % or more", (mix,), (), level=56),
        Claim(
            "14-people: the best mix is above the bag of words with the person's identity",
            (mix,),
            (words,),
        ),
    )


def _above_both_ends(part: str) -> list[Claim]:
    """The best mix, and the best split from the start, are above local only and above FedAvg."""
    local, fedavg = _accuracy(part, "Local only"), _accuracy(part, "FedAvg")
    mix, split = _accuracy(part, BEST), _accuracy(part, BEST_SPLIT)
    return [
        Claim(f"{part}: the best mix is above local only", (mix,), (local,)),
        Claim(f"{part}: the best mix is above FedAvg", (mix,), (fedavg,)),
        Claim(f"{part}: the best split from the start is above local only", (split,), (local,)),
        Claim(f"{part}: the best split from the start is above FedAvg", (split,), (fedavg,)),
    ]


def _accuracy(part: str, row: str) -> Measurement:
    return Measurement(part, row, "accuracy")


def _shares_text() -> str:
    """The shares of parameters at which the network can be cut."""
    return "; ".join(f"{100 * share:.1f} % ({name})" for name, share in SHARES.items())


MOOD = Study(
    name="paper-mood",
    title="Mood from texts, with a part of the network local",
    source=(
        "Liang et al. 2020, section 5.2 and Figure 2(d), here on the SemEval-2026 mood essays "
        "in place of the private MAPS data"
    ),
    statement=(
        "an α-split across local and global models leverages both personalised representations and "
        "statistical strength, outperforming either local or global extremes. The paper prints no "
        "numbers beside its figure."
    ),
    parts={"14-people": _few(), "all-people": _all()},
    claims=_claims(),
    measures={
        "accuracy": "Accuracy",
        "error": "Mean absolute error",
        "accuracy_rest": "Accuracy, without one-class people",
        "error_rest": "Mean absolute error, without one-class people",
    },
    figures={
        "14-people": "liang2020.mood_figure:draw_14_people",
        "all-people": "liang2020.mood_figure:draw_all_people",
    },
    lower_is_better=frozenset({"error", "error_rest"}),
    protocols={
        "paper": (
            "Bi-LSTM of 128 and MLP of 512 and 512, Adam at 0.005 that halves every ten rounds, "
            "batches of at most 2,000 tokens and 32 texts, 80/10/10 splits; the best of all "
            "restarts and rounds on validation data"
        )
    },
    caption=(
        "Accuracy: each person’s own model on their own test texts, over all texts. Mean absolute "
        "error: in percent of a class, so that 100 is one of five classes off. One-class people "
        "have 95 % of their texts in one class. α is the share of parameters that stay local; "
        f"layers can be cut at {_shares_text()}. {BEST_SPLIT}: the split that is best on "
        f"validation data, named beside it. {BEST}: the same, with {FINE_TUNED!r} among the "
        "candidates. Baselines see the same words on the same splits."
    ),
)
