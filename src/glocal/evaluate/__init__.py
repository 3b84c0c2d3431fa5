"""How good the models are, for the devices that trained them and for new ones."""

from glocal.evaluate import leakage
from glocal.evaluate.evaluation import (
    Accuracies,
    AccuracySummary,
    Evaluator,
    Metric,
    NewTest,
    accuracy,
    ensemble_accuracy,
    ensemble_classes,
    local_test,
    local_tests,
    new_test,
    predict_classes,
    summarize,
    vqa_accuracy,
)

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
