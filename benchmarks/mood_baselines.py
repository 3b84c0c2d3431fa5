"""What a mood network has to beat on the very splits of the study, and what is lost in reading texts.

python -m benchmarks.mood_baselines --out docs/results/mood-baselines.json
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from glocal.datasets import load_texts, partition_texts
from glocal.datasets.federated import FederatedData
from glocal.datasets.texts import MAX_WORDS, UNKNOWN_WORD, Texts
from glocal.studies.ordinal import OrdinalSettings, baseline_metrics

MEASURES = ("accuracy", "error", "accuracy_rest", "error_rest")


def lost(texts: Texts, people: int | None) -> float:
    """The share of words beyond the last that is read, of those with most texts."""
    written = {person: 0 for person in texts.person}
    for person in texts.person:
        written[person] += 1
    kept = {*sorted(written, key=lambda person: (-written[person], person))[:people]}
    lengths = [
        len(words)
        for words, person in zip(texts.words, texts.person, strict=True)
        if person in kept
    ]
    return round(100 * sum(max(0, length - MAX_WORDS) for length in lengths) / sum(lengths), 1)


def unknown(federation: FederatedData) -> float:
    """The share of words of test texts that no training text has."""
    words = federation.test.examples.x[federation.test.all_rows()]
    return float((words == UNKNOWN_WORD).sum() / (words > 0).sum())


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    texts, told = load_texts("mood_essays"), {}
    for part, people in (("14-people", 14), ("all-people", None)):
        dealt = partition_texts(texts, seeds=range(given.seeds), people=people)
        rows = [
            baseline_metrics(federation, OrdinalSettings(bag_of_words=True)) for federation in dealt
        ]
        told[part] = {
            "words lost, %": lost(texts, people),
            "unknown words in tests, %": round(100 * fmean(map(unknown, dealt)), 1),
            **{
                name: {
                    key: round(fmean(row[name]["ordinal"][key] for row in rows), 4)
                    for key in MEASURES
                }
                for name in rows[0]
            },
        }
        print(part, json.dumps(told[part], indent=1), flush=True)
    if given.out:
        command = f"python -m benchmarks.mood_baselines --seeds {given.seeds} --out {given.out}"
        given.out.write_text(json.dumps({"command": command, **told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
