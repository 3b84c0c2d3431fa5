"""How good the models are, for the devices that trained them and for new ones."""

from glocal.measure.accuracy import (
    Accuracies,
    Evaluation,
    NewTest,
    Spread,
    ensemble_accuracy,
    ensemble_classes,
    guesses,
    local_test,
    local_tests,
    new_test,
    spread,
)

__all__ = [
    "Accuracies",
    "Evaluation",
    "NewTest",
    "Spread",
    "ensemble_accuracy",
    "ensemble_classes",
    "guesses",
    "local_test",
    "local_tests",
    "new_test",
    "spread",
]
