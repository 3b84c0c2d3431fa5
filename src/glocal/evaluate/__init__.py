"""Evaluation: personalised accuracy (Local Test), unseen clients (New Test), leakage."""

from glocal.evaluate import leakage
from glocal.evaluate.local_test import (
    Accuracies,
    AccuracySummary,
    Evaluator,
    local_test,
    local_tests,
    predict_classes,
    summarize,
)
from glocal.evaluate.metrics import Metric, accuracy, vqa_accuracy
from glocal.evaluate.new_test import NewTest, ensemble_accuracy, ensemble_classes, new_test

__all__ = [
    "Accuracies",
    "AccuracySummary",
    "Evaluator",
    "Metric",
    "NewTest",
    "accuracy",
    "ensemble_accuracy",
    "ensemble_classes",
    "leakage",
    "local_test",
    "local_tests",
    "new_test",
    "predict_classes",
    "summarize",
    "vqa_accuracy",
]
