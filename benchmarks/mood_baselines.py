"""Baselines for mood networks on the splits of the study, and the words that are lost.

python -m benchmarks.mood_baselines --out papers/liang2020/results/mood-baselines.json
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import fmean

from glocal.datasets import load_texts, partition_texts
from glocal.datasets.federated import FederatedData
from glocal.datasets.texts import MAX_WORDS, UNKNOWN_WORD, Texts
from glocal.studies.ordinal import OrdinalSettings, baseline_metrics

MEASURES = ("accuracy", "error", "accuracy_rest", "error_rest")


def truncated_share(texts: Texts, people: int | None) -> float:
    """The percentage of words beyond MAX_WORDS, for the people with most texts."""
    counts = Counter(texts.person)
    selected = {*sorted(counts, key=lambda person: (-counts[person], person))[:people]}
    lengths = [
        len(words)
        for words, person in zip(texts.words, texts.person, strict=True)
        if person in selected
    ]
    return round(100 * sum(max(0, length - MAX_WORDS) for length in lengths) / sum(lengths), 1)


def unknown_share(federation: FederatedData) -> float:
    """The fraction of words in test texts that are in no training text."""
    words = federation.test.examples.x[federation.test.all_rows()]
    return float((words == UNKNOWN_WORD).sum() / (words > 0).sum())


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts, result = load_texts("mood_essays"), {}
    for part, people in (("14-people", 14), ("all-people", None)):
        partitions = partition_texts(texts, seeds=range(options.seeds), people=people)
        rows = [
            baseline_metrics(federation, OrdinalSettings(bag_of_words=True))
            for federation in partitions
        ]
        result[part] = {
            "words lost, %": truncated_share(texts, people),
            "unknown words in tests, %": round(100 * fmean(map(unknown_share, partitions)), 1),
            **{
                name: {
                    key: round(fmean(row[name]["ordinal"][key] for row in rows), 4)
                    for key in MEASURES
                }
                for name in rows[0]
            },
        }
        print(part, json.dumps(result[part], indent=1), flush=True)
    if options.out:
        command = f"python -m benchmarks.mood_baselines --seeds {options.seeds} --out {options.out}"
        options.out.write_text(json.dumps({"command": command, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
