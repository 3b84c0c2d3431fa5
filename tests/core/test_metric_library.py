"""Ready metrics are scikit-learn's, and objects of torchmetrics are metrics."""

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn import metrics as sklearn_metrics
from torch import nn
from torchmetrics import classification

import glocal
from glocal.core.errors import InputError
from glocal.core.metric_library import METRICS, find_metric
from glocal.core.training import Batch
from tests.support import world

ROWS, CLASSES = 57, 4


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def classes(seed=0):
    """Logits and class numbers, of which one class is rare."""
    generator = drawn(seed)
    outputs = torch.randn(ROWS, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES - 1, (ROWS,), generator=generator)
    targets[:2] = CLASSES - 1
    return outputs, targets


def labels(seed=0):
    generator = drawn(seed)
    outputs = torch.randn(ROWS, 3, generator=generator)
    return outputs, torch.randint(0, 2, (ROWS, 3), generator=generator)


def numbers(seed=0):
    generator = drawn(seed)
    shape = (ROWS, 2)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def figure(metric, outputs, targets):
    """The figure of one client whose examples come in two batches."""
    if metric.of_client is not None:
        return metric.of_client(outputs, targets)
    total = weight = 0.0
    for part in (slice(0, 20), slice(20, None)):
        y = targets[part]
        mask = torch.ones(len(y), dtype=torch.bool)
        batch = Batch(outputs[part], y, None, mask, torch.tensor(0))
        sums, weights = metric.sums(outputs[part], batch)
        total, weight = total + float(sums.double().sum()), weight + float(weights.sum())
    return metric.figure(total, weight)


def of_classes(function, **settings):
    return lambda outputs, targets: function(targets, outputs.argmax(1), **settings)


def top_2(outputs, targets):
    return sklearn_metrics.top_k_accuracy_score(targets, outputs, k=2, labels=range(CLASSES))


def auroc_of_classes(outputs, targets):
    return sklearn_metrics.roc_auc_score(targets, outputs.softmax(1), multi_class="ovr")


KNOWN = {
    "accuracy": (classes, of_classes(sklearn_metrics.accuracy_score)),
    "top_2": (classes, top_2),
    "balanced_accuracy": (classes, of_classes(sklearn_metrics.balanced_accuracy_score)),
    "f1": (classes, of_classes(sklearn_metrics.f1_score, average="macro")),
    "auroc": (classes, auroc_of_classes),
    "f1 of labels": (labels, lambda o, t: sklearn_metrics.f1_score(t, o > 0, average="macro")),
    "auroc of labels": (labels, lambda o, t: sklearn_metrics.roc_auc_score(t, o)),
    "label_accuracy": (labels, lambda o, t: float(((o > 0) == t).float().mean())),
    "mae": (numbers, lambda o, t: sklearn_metrics.mean_absolute_error(t, o)),
    "mse": (numbers, lambda o, t: sklearn_metrics.mean_squared_error(t, o)),
    "rmse": (numbers, lambda o, t: sklearn_metrics.mean_squared_error(t, o) ** 0.5),
    "r2": (numbers, lambda o, t: sklearn_metrics.r2_score(t, o)),
    "perplexity": (classes, lambda o, t: float(nn.functional.cross_entropy(o, t).exp())),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", KNOWN)
def test_a_ready_metric_is_that_of_scikit_learn(name, seed):
    draw, expected = KNOWN[name]
    outputs, targets = draw(seed)
    metric = find_metric(name.split(" ")[0])
    assert figure(metric, outputs, targets) == pytest.approx(expected(outputs, targets), abs=1e-6)


def test_every_ready_metric_is_compared():
    assert {name.split(" ")[0] for name in KNOWN} >= {*METRICS} - {"top_5"}


@pytest.mark.parametrize("name", ["accuracy", "top_2", "balanced_accuracy", "f1", "perplexity"])
def test_an_ignored_target_does_not_count(name):
    outputs, targets = classes()
    metric, real = find_metric(name), targets.clone()
    real[::3] = -100
    rest = real >= 0
    assert figure(metric, outputs, real) == pytest.approx(
        KNOWN[name][1](outputs[rest], targets[rest]), abs=1e-6
    )


@pytest.mark.parametrize("name", ["auroc", "r2"])
def test_a_metric_of_one_value_is_undefined(name):
    outputs = torch.randn(6, 1)
    assert find_metric(name).of_client(outputs, torch.ones(6, dtype=torch.int64)) is None


OF_TORCHMETRICS = {
    "multiclass_f1_score": classification.MulticlassF1Score(num_classes=CLASSES),
    "multiclass_auroc": classification.MulticlassAUROC(num_classes=CLASSES),
    "multiclass_accuracy": classification.MulticlassAccuracy(num_classes=CLASSES, average="micro"),
}


@pytest.mark.parametrize("name", OF_TORCHMETRICS)
def test_an_object_of_torchmetrics_gives_its_own_figure(name):
    given = OF_TORCHMETRICS[name]
    outputs, targets = classes()
    metric = find_metric(given)
    assert (metric.name, metric.higher_is_better) == (name, True)
    for _ in range(2):  # its state is reset
        assert metric.of_client(outputs, targets) == pytest.approx(float(given(outputs, targets)))


def test_an_error_of_torchmetrics_is_better_when_it_is_lower():
    metric = find_metric(torchmetrics.MeanAbsoluteError())
    assert (metric.name, metric.higher_is_better) == ("mean_absolute_error", False)
    outputs, targets = numbers()
    assert metric.of_client(outputs, targets) == pytest.approx(KNOWN["mae"][1](outputs, targets))


def test_torchmetrics_of_one_class_is_undefined_and_one_figure_per_class_is_refused():
    outputs, targets = classes()
    area = find_metric(OF_TORCHMETRICS["multiclass_auroc"])
    assert area.of_client(outputs, torch.zeros_like(targets)) is None
    several = find_metric(classification.MulticlassF1Score(num_classes=CLASSES, average=None))
    with pytest.raises(InputError, match="one number was expected; set its argument average"):
        several.of_client(outputs, targets)


def test_a_run_is_tested_and_selected_by_an_object_of_torchmetrics(tmp_path):
    own = classification.MulticlassF1Score(num_classes=world.CLASSES)
    model = nn.Sequential(nn.Flatten(), nn.Linear(world.FEATURES, world.CLASSES))
    task = glocal.classification(model, metrics=[own, "f1"])
    result = glocal.fit(
        glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1)),
        world.federation(),
        rounds=4,
        clients_per_round=3,
        select="max multiclass_f1_score",
        folder=tmp_path,
        progress=False,
    )
    by_client = result.metrics.where(split="test", metric="multiclass_f1_score")
    assert np.isfinite([row.value for row in by_client if row.value is not None]).all()
    assert result.metrics.mean("multiclass_f1_score") > 0
