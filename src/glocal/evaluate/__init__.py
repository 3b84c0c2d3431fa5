"""How good the models are, for the devices that trained them and for new ones."""

from glocal.evaluate import leakage, theory
from glocal.evaluate.accuracy import (
    Accuracies,
    Credit,
    Evaluation,
    NewTest,
    Spread,
    agreeing,
    ensemble_accuracy,
    ensemble_classes,
    guesses,
    local_test,
    local_tests,
    matching,
    new_test,
    spread,
)

__all__ = [
    "Accuracies",
    "Credit",
    "Evaluation",
    "NewTest",
    "Spread",
    "agreeing",
    "ensemble_accuracy",
    "ensemble_classes",
    "guesses",
    "leakage",
    "local_test",
    "local_tests",
    "matching",
    "new_test",
    "spread",
    "theory",
]
