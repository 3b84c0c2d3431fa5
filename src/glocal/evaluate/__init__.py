"""Evaluation: personalised models (Local Test), unseen clients (New Test), leakage."""

from glocal.evaluate import leakage
from glocal.evaluate.local_test import (
    Evaluator,
    Figures,
    Floats,
    Summary,
    local_figures,
    local_test,
    local_tests,
    predict_classes,
    summarize,
)
from glocal.evaluate.new_test import (
    NewTest,
    ensemble_classes,
    ensemble_figure,
    evaluator_of_whole_models,
    new_test,
)
from glocal.evaluate.vqa import VQA_ACCURACY, vqa_accuracy

__all__ = [
    "VQA_ACCURACY",
    "Evaluator",
    "Figures",
    "Floats",
    "NewTest",
    "Summary",
    "ensemble_classes",
    "ensemble_figure",
    "evaluator_of_whole_models",
    "leakage",
    "local_figures",
    "local_test",
    "local_tests",
    "new_test",
    "predict_classes",
    "summarize",
    "vqa_accuracy",
]
