"""Rewrite the keys of results that version 0.1 wrote; every figure stays as it was written.

python docs/convert_results.py docs/results/*.json papers/liang2020/results/*.json

Run when names changed; kept to show what was done. It works on the text: a key is
replaced where it stands, so that no number is read and written again.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# paths of keys, from the outermost table; * is any one name, ** any number of them
SETTINGS = {
    "optimiser": "optimizer",
    "newcomer": "new_client",
    "cases": "experiments",
    "data/devices": "clients",
    "data/classes_per_device": "classes_per_client",
    "data/keep_devices": "keep_clients",
    "data/labelled": "labeled_fraction",
    "model/code": "bottleneck",
    "model/blur": "noise_std",
    "optimiser/rate": "lr",
    "optimiser/decay": "lr_decay",
    "optimiser/shrink": "lr_gamma",
    "optimiser/shrink_every": "lr_step_size",
    "plan/cohort": "clients_per_round",
    "plan/epochs": "local_epochs",
    "plan/batch": "batch_size",
    "plan/weights": "aggregation",
    "plan/weighting": "aggregation",
    "plan/tokens": "max_tokens",
    "plan/tries": "restarts",
    "run/chunk": "chunk_size",
    "run/keep": "save",
    "run/keep_every": "checkpoint_every",
    "audit/at": "layer",
    "ordinal/one_class": "one_class_fraction",
    "cases/*/cohort": "clients_per_round",
    "cases/*/rate": "lr",
    "cases/*/local_rate": "local_lr",
    "cases/*/after": "start_from",
    "cases/*/after_round": "start_round",
    "cases/*/after_model": "start_model",
    "cases/*/without": "skip_seeds",
    "cases/*/tie": "lam",
    "cases/*/welcome": "join_plan",
    "cases/*/welcome/guests": "existing_clients",
    "cases/*/learns": "pretext",
    "cases/*/learns/at": "layer",
    "cases/*/learns/rate": "lr",
    "cases/*/learns/turns": "steps_per_update",
    "cases/*/learns/pretrain": "pretrain_epochs",
    "groups/newcomers": "joiners",
    "groups/*/devices": "clients",
    "groups/*/arrives": "join_round",
    "groups/*/leaves": "leave_round",
    "groups/*/drifts_from": "drift_start",
    "groups/*/drifts_until": "drift_end",
}
KEYS = {
    **{f"settings/{path}": new for path, new in SETTINGS.items()},
    **{f"parts/*/settings/{path}": new for path, new in SETTINGS.items()},
    "parts/*/cases": "experiments",
    "parts/*/cases/*/arrival_bytes": "join_bytes",
    "parts/*/cases/*/course": "validation_curve",
    "**/newcomers": "joiners",
    "results/*/devices": "clients",
    "results/*/groups": "subgroups",
    "results/*/devices/device": "client",
    "results/*/groups/*/arrival": "first",
    "trials/cases": "experiments",
    "trials/cases/case": "experiment",
    "trials/optimiser": "optimizer",
    "trials/optimiser/rate": "lr",
    "trials/optimiser/decay": "lr_decay",
    "case": "experiment",
    "newcomer": "new_client",
    "newcomer/device": "client",
    "newcomer/tested on": "test_examples",
    "settings/members": "ensemble_size",
    "settings/sample": "sample_size",
    "settings/welcome": "join_plan",
    "settings/welcome/guests": "existing_clients",
    "rows/way": "method",
    "rows/devices": "clients",
    "rows/cohort": "clients_per_round",
    "rows/batch": "batch_size",
    "kinds/devices": "clients",
    "**/classes per device": "classes per client",
    "**/seconds until the device is back": "seconds until the client is back",
    "**/seconds until all devices are back at a killed server": (
        "seconds until all clients are back at a killed server"
    ),
    "**/each device's own best": "each client's own best",
    "**/advice/race": "halving",
    "**/advice/racers": "participants",
    "**/variances/*/device": "between_client",
    "**/variances/*/data": "within_client",
    "devices with a last batch of one, of 100": "clients with a last batch of one, of 100",
    "four devices, a process each": "four clients, a process each",
    "four devices in a gateway": "four clients in a gateway",
    "twenty devices in a gateway": "twenty clients in a gateway",
    "roofline/copy_of_a_device_gbs": "copy_of_a_client_gbs",
}
# words in a name of an experiment, of a part, of settings or of a client, wherever it stands
NAMES = {
    re.compile(r"^LG \+ puzzle$"): "LG + jigsaw",
    re.compile(r"^Majority answer of each device$"): "Majority answer of each client",
    re.compile(r"^MTL, tie (?=[\d.]+$)"): "MTL, lam ",
    re.compile(r", rate (?=[\d.]+$)"): ", lr ",
    re.compile(r"^LG \+ Adv, code (?=\d+, )"): "LG + Adv, bottleneck ",
    re.compile(r"^code-(?=\d+$)"): "bottleneck-",
    re.compile(r"^adult, a code (?=\d+ wide$)"): "adult, a bottleneck ",
    re.compile(r"^(vqa, [\w-]+), kinds\b"): r"\1, question_types",
    re.compile(r"^device-(?=\d+$)"): "client-",
}
NAMED = ("settings/name", "/after", "/start_from")  # endings of paths whose value is a name
# words that are a setting's value
VALUES = {
    ("data/partition", '"kinds"'): '"question_types"',
    ("model/name", '"coded_mlp"'): '"bottleneck_mlp"',
    ("model/name", '"coded_cnn"'): '"bottleneck_cnn"',
    ("learns/kind", '"puzzle"'): '"jigsaw"',
    ("run/keep", '"figures"'): '"metrics"',
    ("model/name", '"mood_lstm"'): '"liang2020.mood_model:build_mood_lstm"',
    ("model/name", '"vqa"'): '"liang2020.vqa_model:build_vqa_net"',
    ("model/encoder", '"frozen"'): '"liang2020.vqa_model:frozen_resnet"',
    ("algorithm", '"glocal.studies.majority:majority"'): '"liang2020.majority:Majority"',
    ("algorithm", '"glocal.studies.majority:own_majority"'): '"liang2020.majority:OwnMajority"',
    ("algorithm", '"liang2020.majority:majority"'): '"liang2020.majority:Majority"',
    ("algorithm", '"liang2020.majority:own_majority"'): '"liang2020.majority:OwnMajority"',
    ("plan/weights", '"equal"'): '"mean(clients)"',
    ("plan/weighting", '"equal"'): '"mean(clients)"',
    ("advice/by", '"race"'): '"halving"',
    ("rows/axis", '"cohort"'): '"clients_per_round"',
    ("rows/axis", '"devices"'): '"clients"',
}
# texts in a command, in the data that it names, and in a file's words about itself
COMMANDS = {
    "optimiser.rate": "optimizer.lr",
    "optimiser settings": "optimizer settings",
    "optimizer.lr=RATE": "optimizer.lr=LR",
    "run.chunk=": "run.chunk_size=",
    "run.keep_every": "run.checkpoint_every",
    "[cases.NAME]": "[experiments.NAME]",
    "after, after_round, rate and local_rate": "start_from, start_round, lr and local_lr",
    "--devices": "--clients",
    "examples.newcomers:": "examples.new_clients:",
    "advice-settling.json": "advice-other-plans.json",
    "FedAvg at two rates": "FedAvg with two learning rates",
    "what the rates of `longer` of paper-vqa were settled on": (
        "by them the learning rates of `longer` of paper-vqa were chosen"
    ),
    "before the rule of choice was settled": "before the rule of choice was final",
    "--part 'code-*'": "--part 'bottleneck-*'",
    **{
        f"docs/results/{name}": f"papers/liang2020/results/{name}"
        for name in (
            "adult-inputs.json",
            "batch-of-one.json",
            "mood-baselines.json",
            "selection-on-test.json",
            "vqa-round-cpu.json",
            "vqa-round-gpu.json",
        )
    },
}
# texts in the description of an engine
ENGINES = {
    r"(\d+ threads), one \w+ at a time each, with fused steps": r"fused C++ on \1",
    r"(\d+ processes), one \w+ at a time each": r"traced steps in \1",
    "one (?:device|client) after the other": "looped, one client at a time",
    "all (?:devices|clients) in one batched step": "vmapped, all clients in one batch",
    "all (?:devices|clients) at once, whole rounds replayed as a CUDA graph": "CUDA graphs",
    "CUDA graphs, with fused steps": "CUDA graphs, fused Triton kernels",
    "CUDA graphs, with compiled steps": "CUDA graphs, compiled steps",
    r" \(they know all its layers\)": "",
}
FORMAT = '"format": "0.2",'  # in files that are read again
# weights by examples are the algorithms' own, and are not written any more
OWN_WEIGHTS = re.compile(r',\s*"aggregation": "examples"(?=\s*\})|"aggregation": "examples",\s*')
TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+)')


class Place(NamedTuple):
    """A key, or a plain value, in the text: where it stands, and the keys that lead to it."""

    start: int
    end: int
    path: str
    is_key: bool


def places(text: str) -> Iterator[Place]:
    """Every key and every plain value, in the order of the text."""
    keys: list[str | None] = []  # of each open table or list; None in a list
    key: str | None = None
    position = 0
    while match := TOKEN.match(text, position):
        position, token = match.end(), match[1]
        if token in "{[":
            keys.append(key)
            key = None
        elif token in "}]":
            keys.pop()
        elif token == ",":
            key = None
        elif token != ":":
            is_key = text[position:].lstrip().startswith(":")
            if is_key:
                key = json.loads(token)
            named = [name for name in (*keys, key) if name is not None]
            yield Place(match.start(1), position, "/".join(named), is_key)


def converted(text: str) -> str:
    """The same text with the keys of 0.2."""
    patterns = {_pattern(path): new for path, new in KEYS.items()}
    pieces, done = [], 0
    for place in places(text):
        token = text[place.start : place.end]
        if place.is_key:
            new = _new_key(place.path, patterns) or _new_name(token)
        else:
            new = _new_value(place.path, token)
        pieces += [text[done : place.start], new]
        done = place.end
    new_text = OWN_WEIGHTS.sub("", "".join([*pieces, text[done:]]))
    read_again = '"parts": ' in text or ('"new_client": ' in new_text and '"rows": ' in text)
    if read_again and FORMAT not in new_text:
        return new_text.replace("{\n", "{\n " + FORMAT + "\n", 1)
    return new_text


def _pattern(path: str) -> re.Pattern[str]:
    whole = re.escape(path).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]+")
    return re.compile(whole)


def _new_key(path: str, patterns: dict[re.Pattern[str], str]) -> str | None:
    new = next((new for pattern, new in patterns.items() if pattern.fullmatch(path)), None)
    return None if new is None else json.dumps(new)


def _new_value(path: str, token: str) -> str:
    if path.endswith(("command", "about", "data")):
        return _with_texts(token, COMMANDS)
    if path.endswith("/engine"):
        return _with_engine(token)
    if path.endswith(NAMED):
        return _new_name(token)
    for (ending, old), new in VALUES.items():
        if path.endswith(ending) and token == old:
            return new
    return token


def _with_texts(token: str, texts: Mapping[str, str]) -> str:
    for old_text, new in texts.items():
        token = token.replace(old_text, new)
    return token


def _with_engine(token: str) -> str:
    for pattern, new in ENGINES.items():
        token = re.sub(pattern, new, token)
    return token


def _new_name(token: str) -> str:
    """A name in the words of 0.2; any other text as it stands, character by character."""
    if not token.startswith('"'):
        return token
    name = new = json.loads(token)
    for pattern, words in NAMES.items():
        new = pattern.sub(words, new)
    return token if new == name else json.dumps(new)


def main() -> None:
    """Rewrite the files that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(converted(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
