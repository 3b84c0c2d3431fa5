"""Ready metrics by name, and how a function or an object of torchmetrics becomes a metric.

Outputs are what the model gives. Three kinds of them are known by the shapes alone:

- classes: logits (rows, classes) or (rows, classes, positions), as torch's cross entropy takes
  them, with class numbers (rows,) or (rows, positions);
- labels: one logit per label, with 0 or 1 as targets of the same shape; one logit per example
  may be (rows,) or (rows, 1) with targets (rows,);
- numbers, of the same shape as their targets, or (rows, 1) with targets (rows,).

A negative class number or label, such as -100, is ignored. The functions of examples use only
operations that torch.func.vmap can batch, and check nothing but shapes; the functions of a client
check the targets' values too. Outputs that are NaN give NaN, or count as torch's argmax counts
them.
"""

import math
import re
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from glocal.core.errors import InputError, describe_value, suggest_name
from glocal.core.metric import Metric, PerExample, describe_shapes
from glocal.core.torch_metrics import from_torchmetrics, is_of_torchmetrics

MetricLike = Any  # a name, a Metric, a function or an object of torchmetrics
_SumsAndWeights = tuple[Tensor, Tensor]


class _Labels(NamedTuple):
    """Labels of a client's examples, or its classes one versus rest, each (examples, labels).

    `predicted` and `positive` are False where a label is not `known`.
    """

    scores: Tensor
    predicted: Tensor
    positive: Tensor
    known: Tensor

    def right(self) -> Tensor:
        """How often each label is predicted and right (labels,)."""
        return (self.predicted & self.positive).sum(0)


def find_metric(metric: str | Metric | PerExample) -> Metric:
    """A metric by its name, by a function (outputs, targets), or by an object of torchmetrics.

    A function gives one value per example, of which higher is better.

    >>> find_metric("top_3").name
    'top_3'
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return _named(metric)
    if is_of_torchmetrics(metric):
        return from_torchmetrics(metric)
    name = getattr(metric, "__name__", "")
    if isinstance(metric, type) or not callable(metric) or not name.isidentifier():
        raise InputError(
            f"metric: {name or describe_value(metric)} was given; a metric's name, a function with "
            "a name or an object of torchmetrics was expected; "
            "give glocal.Metric(name, per_example=...) for anything else"
        )
    return Metric(name, per_example=metric)


def top_k(k: int) -> Metric:
    """The fraction of examples whose class is among the k highest logits.

    Of equal logits the earlier class is the higher, as in argmax.

    >>> top_k(5).name
    'top_5'
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(
            f"metric: top_k was given {describe_value(k)}; a whole number of at least 1 was "
            "expected; choose one, such as 5"
        )
    return Metric(f"top_{k}", per_example=partial(_top_k, k=k), is_fraction=True)


def _named(name: str) -> Metric:
    top = re.fullmatch(r"top_([1-9][0-9]*)", name)
    if top:
        return top_k(int(top[1]))
    if name not in METRICS:
        raise InputError(f"metric: there is no metric '{name}'; {suggest_name(name, METRICS)}")
    return METRICS[name]


# ---- per example: within vmap


def _accuracy(outputs: Tensor, targets: Tensor) -> _SumsAndWeights:
    classes = _class_numbers("accuracy", outputs, targets)
    return _count(outputs.argmax(1) == classes), _count(classes >= 0)


def _top_k(outputs: Tensor, targets: Tensor, *, k: int) -> _SumsAndWeights:
    classes = _class_numbers(f"top_{k}", outputs, targets)
    if outputs.shape[1] < k:
        raise InputError(
            f"top_{k}: the outputs have {outputs.shape[1]} classes; at least {k} were expected; "
            "choose a smaller k"
        )
    highest = outputs.argsort(stable=True, dim=1, descending=True)[:, :k]
    is_among = (highest == classes.unsqueeze(1)).any(1)
    return _count(is_among), _count(classes >= 0)


def _label_accuracy(outputs: Tensor, targets: Tensor) -> _SumsAndWeights:
    predicted = _aligned("label_accuracy", outputs, targets) > 0
    return _count(predicted == targets), _count(targets >= 0)


def _absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return _by_row(_difference("mae", outputs, targets).abs()).mean(1)


def _squared_error(outputs: Tensor, targets: Tensor, *, name: str) -> Tensor:
    return _by_row(_difference(name, outputs, targets).square()).mean(1)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> _SumsAndWeights:
    """The cross entropy of every example, summed over positions that are not ignored."""
    classes = _class_numbers("perplexity", outputs, targets)
    known = classes >= 0
    column = classes.clamp(min=0).unsqueeze(1)
    log_probability = _precise(outputs).log_softmax(1).gather(1, column).squeeze(1)
    return _by_row(torch.where(known, -log_probability, 0)).sum(1), _count(known)


def _exp(value: float) -> float:
    """The exponential; infinity where it overflows."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


# ---- of all of a client's examples


def _balanced_accuracy(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean recall of the classes that the client has."""
    labels = _classes_as_labels("balanced_accuracy", outputs, targets)
    return _mean_ratio(labels.right(), labels.positive.sum(0))


def _f1(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean F1 of the classes or labels that occur in targets or predictions."""
    labels = _labels("f1", outputs, targets)
    occurrences = labels.predicted.sum(0) + labels.positive.sum(0)
    return _mean_ratio(2 * labels.right(), occurrences)


def _auroc(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean area of the classes (one versus rest) or labels with ones and zeros."""
    labels = _labels("auroc", outputs, targets)
    areas: list[float] = []
    for column in range(labels.scores.shape[1]):
        known = labels.known[:, column]
        positive = labels.positive[known, column].numpy()
        if 0 < positive.sum() < len(positive):
            areas.append(auc(labels.scores[known, column].numpy(), positive))
    return fmean(areas) if areas else None


def _r2(outputs: Tensor, targets: Tensor) -> float | None:
    """The mean R2 of the columns whose targets differ."""
    errors = _by_row(_difference("r2", outputs.double(), targets))
    truth = _by_row(targets.double())
    if len(truth) < 2:
        return None
    varies = truth.amax(0) > truth.amin(0)
    variation = (truth - truth.mean(0)).square().sum(0)
    unexplained = errors.square().sum(0)[varies] / variation[varies]
    return float(1 - unexplained.mean()) if varies.any() else None


def _mean_ratio(numerators: Tensor, denominators: Tensor) -> float | None:
    """The mean of the ratios with a denominator above 0; None without any."""
    defined = denominators > 0
    if not defined.any():
        return None
    return float((numerators[defined].double() / denominators[defined]).mean())


def auc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve: how often a 1 has a higher score than a 0, ties counting half.

    >>> import numpy
    >>> auc(numpy.array([0.1, 0.4, 0.4, 0.8]), numpy.array([0, 0, 1, 1]))
    0.875
    """
    from scipy.stats import rankdata

    ones = int(labels.sum())
    above = float(rankdata(scores)[labels == 1].sum()) - ones * (ones + 1) / 2
    return above / (ones * (len(labels) - ones))


# ---- shapes


def _class_numbers(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """The targets as whole numbers, of the outputs' shape without their classes."""
    expected = (*outputs.shape[:1], *outputs.shape[2:])
    has_classes = outputs.ndim > 1 and outputs.shape[1] > 1
    if not has_classes or targets.shape != expected or targets.is_floating_point():
        raise InputError(
            f"{name}: {describe_shapes(outputs, targets)}; logits (rows, classes, ...) "
            "and whole class numbers (rows, ...) were expected; "
            "for one logit per label choose label_accuracy, f1 or auroc"
        )
    return targets.long()


def _aligned(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """The outputs in the targets' shape: (rows, 1) becomes (rows,), and nothing is broadcast."""
    if outputs.shape == (*targets.shape, 1):
        return outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise InputError(
            f"{name}: {describe_shapes(outputs, targets)}; "
            "equal shapes were expected; change the model's last layer or the targets"
        )
    return outputs


def _difference(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Outputs minus targets, at least in float32."""
    return _precise(_aligned(name, outputs, targets)) - _precise(targets)


def _precise(values: Tensor) -> Tensor:
    """The values at least in float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _by_row(values: Tensor) -> Tensor:
    """Values (rows, ...) as (rows, values of a row)."""
    return values.unsqueeze(1).flatten(1)


def _count(is_so: Tensor) -> Tensor:
    """How often it is so in each row (rows,)."""
    return _by_row(is_so).sum(1, dtype=torch.float32)


def _labels(name: str, outputs: Tensor, targets: Tensor) -> _Labels:
    """A client's labels, or its classes one versus rest."""
    if outputs.shape != targets.shape or _is_one_logit(outputs):
        return _classes_as_labels(name, outputs, targets)
    scores, values = _classes_last(outputs), _classes_last(targets)
    _check_values(name, values, 2)
    known = values >= 0
    return _Labels(scores, (scores > 0) & known, values == 1, known)


def _classes_as_labels(name: str, outputs: Tensor, targets: Tensor) -> _Labels:
    """Each class against the rest; one logit per example is that of class 1 against 0."""
    if _is_one_logit(outputs):
        outputs, targets = _as_two_classes(name, outputs, targets)
    numbers = _class_numbers(name, outputs, targets).flatten()
    _check_values(name, numbers, outputs.shape[1])
    logits = _classes_last(outputs)[numbers >= 0]
    predicted = _one_hot(logits.argmax(1), logits)
    positive = _one_hot(numbers[numbers >= 0], logits)
    return _Labels(_class_scores(logits), predicted, positive, torch.ones_like(positive))


def _as_two_classes(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One logit per example as logits of classes 0 and 1, and its targets as class numbers."""
    logit = _aligned(name, outputs, targets).flatten()
    _check_values(name, targets, 2)
    return torch.stack([torch.zeros_like(logit), logit], 1), targets.flatten().long()


def _is_one_logit(outputs: Tensor) -> bool:
    return outputs.shape[1:].numel() == 1


def _one_hot(numbers: Tensor, logits: Tensor) -> Tensor:
    """Which class each number is (examples, classes)."""
    return functional.one_hot(numbers, logits.shape[1]).bool()


def _class_scores(logits: Tensor) -> Tensor:
    """Scores in the order of softmax (examples, classes).

    Of two classes it is the order of their difference, which has no ties where softmax is near 1.
    """
    if logits.shape[1] == 2:
        return logits - logits.flip(1)
    return logits.softmax(1)


def _classes_last(values: Tensor) -> Tensor:
    """Values (rows, classes, ...) as (examples, classes) in float64."""
    return values.double().movedim(1, -1).reshape(-1, values.shape[1])


def _check_values(name: str, targets: Tensor, classes: int) -> None:
    """Refuse targets that are neither ignored nor one of the classes."""
    values = targets.double()
    wrong = values[(values != values.floor()) | (values >= classes)]
    if len(wrong):
        raise InputError(
            f"{name}: a target is {wrong[0].item():g}; whole numbers below {classes} were "
            "expected, or negative ones to be ignored; change the targets or the model's last "
            "layer"
        )


# ---- the ready metrics

accuracy = Metric("accuracy", per_example=_accuracy, is_fraction=True)
balanced_accuracy = Metric("balanced_accuracy", of_client=_balanced_accuracy, is_fraction=True)
f1 = Metric("f1", of_client=_f1, is_fraction=True)
auroc = Metric("auroc", of_client=_auroc, is_fraction=True)
label_accuracy = Metric("label_accuracy", per_example=_label_accuracy, is_fraction=True)
mae = Metric("mae", per_example=_absolute_error, higher_is_better=False)
mse = Metric("mse", per_example=partial(_squared_error, name="mse"), higher_is_better=False)
rmse = Metric(
    "rmse",
    per_example=partial(_squared_error, name="rmse"),
    finish=math.sqrt,
    higher_is_better=False,
)
r2 = Metric("r2", of_client=_r2)
perplexity = Metric("perplexity", per_example=_cross_entropy, finish=_exp, higher_is_better=False)
_CLASSES = (accuracy, top_k(5), balanced_accuracy, f1, auroc, label_accuracy)
_NUMBERS = (mae, mse, rmse, r2, perplexity)
METRICS: dict[str, Metric] = {metric.name: metric for metric in (*_CLASSES, *_NUMBERS)}
