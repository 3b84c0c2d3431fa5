"""A task: the model, its loss and its metrics, given once and carried by the algorithm."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core.bounds import require_count
from glocal.core.checks import require_choice, require_flag, require_instance, require_number
from glocal.core.errors import InputError, describe_value, suggest_name
from glocal.core.losses import IGNORED, Loss, PerExampleLoss, per_example_loss
from glocal.core.masked_mean import require_by_row
from glocal.core.metric import Metric
from glocal.core.metric_library import MetricLike, find_metric
from glocal.core.model_tensors import require_model
from glocal.core.modules import (
    Adapt,
    ForwardWithFeatures,
    Predictor,
    Tap,
    feature_extractor,
    forward_with_features,
    params_of,
    predictor,
    training_forward,
)
from glocal.core.split import Selector, layer_names, with_frozen
from glocal.core.training import (
    Augment,
    ModelLoss,
    Objective,
    require_trainable_names,
    with_augmentation,
)
from glocal.core.trees import Params
from glocal.core.values import Values

ENSEMBLES = ("mean", "probabilities", "votes")


class Pretext(Protocol):
    """Something else that a model learns in training, with a network of its own beside it."""

    def params(self) -> Params:
        """The network's tensors, under names that the model does not have."""

    def extend(self, objective: Objective, model: nn.Module) -> Objective:
        """The objective with the pretext's loss, and the network's tensors among the trainable."""


@dataclass(frozen=True, eq=False)
class Task:
    """What clients learn: a model, its loss and its metrics.

    - `loss` is one of torch's losses, or a function (outputs, targets) that gives one value per
      example, (rows,) or (rows, ...), or a pair of sums and weights (rows,).
    - `metrics` are names, metrics or functions; the first is the one that figures are about. With
      none, that is the loss.
    - `forward(model, x)` says how the model is called, where it is not by model(x).
    - `ensemble` says how the outputs of all clients' models become one on data of unknown origin:
      their "mean", the mean of their "probabilities", or "votes".
    - `augment(x, key)` changes training inputs; evaluation does without.
    - `make_targets(x)` gives the targets where data have none; the inputs otherwise.
    - `head` names the module that takes the representation; by default the last layer with weights.
    - `pretext` is what the model learns from besides its targets.
    - `frozen` selects parameters that nobody trains or sends, as in `Split.of`, besides those that
      need no gradient. The task's model is then a copy, which shares their values.
    - `has_ignored` says that some targets are -100, which do not count; `fit` finds out.

    >>> task = Task(nn.Linear(4, 2), nn.CrossEntropyLoss(), metrics=["accuracy"])
    >>> task.metric.name
    'accuracy'
    """

    model: nn.Module
    loss: Loss
    metrics: MetricLike | Sequence[MetricLike] = ()
    _: KW_ONLY
    forward: Adapt | None = None
    ensemble: str = "mean"
    augment: Augment | None = None
    make_targets: Callable[[Values], Values] | None = None
    head: str | None = None
    pretext: Pretext | None = None
    frozen: Selector | None = None
    has_ignored: bool = False

    def __post_init__(self) -> None:
        require_model("task: the model", self.model)
        if self.frozen is not None:
            object.__setattr__(self, "model", with_frozen(self.model, self.frozen))
        for name in ("forward", "augment", "make_targets"):
            require_instance(f"task: {name}", getattr(self, name), Callable | None, "a function")
        require_choice("task: ensemble", self.ensemble, ENSEMBLES)
        require_flag("task: has_ignored", self.has_ignored)
        _require_pretext(self.pretext)
        require_trainable_names(self.model)
        _require_head(self.model, self.head)
        _require_names_once(self.all_metrics)
        assert self.per_example is not None

    def __repr__(self) -> str:
        metrics = ", ".join(metric.name for metric in self.all_metrics)
        return f"Task({type(self.model).__name__}, {describe_loss(self.loss)}, metrics: {metrics})"

    @cached_property
    def per_example(self) -> PerExampleLoss:
        """The loss without reduction."""
        return per_example_loss(self.loss, has_ignored=self.has_ignored)

    @cached_property
    def all_metrics(self) -> tuple[Metric, ...]:
        """The metrics; the loss where none are named."""
        given = self.metrics
        listed = given if isinstance(given, list | tuple) else [given]
        return tuple(map(self._find, listed)) or (self._loss_metric(),)

    @property
    def metric(self) -> Metric:
        """The first metric."""
        return self.all_metrics[0]

    def find_metric(self, name: str) -> Metric:
        """The metric with this name, which may be "loss"."""
        known = {metric.name: metric for metric in self.all_metrics}
        known.setdefault("loss", self._loss_metric())
        require_instance("task: a metric's name", name, str, "a text")
        if name not in known:
            raise InputError(f"task: there is no metric '{name}'; {suggest_name(name, known)}")
        return known[name]

    @cached_property
    def objective(self) -> Objective:
        """What training minimises: one object, so that its steps are traced once."""
        forward = training_forward(self.model, self.forward)
        loss = ModelLoss(self.model, forward, self.per_example, self.forward)
        objective = Objective(loss, require_trainable_names(self.model))
        if self.augment:
            objective = with_augmentation(objective, self.augment)
        return self.pretext.extend(objective, self.model) if self.pretext else objective

    @property
    def trainable(self) -> frozenset[str]:
        """The names of the tensors that may train."""
        return self.objective.trainable

    @cached_property
    def head_name(self) -> str:
        """The module that takes the representation."""
        if self.head is not None:
            return self.head
        layers = layer_names(self.model)
        if len(layers) < 2:
            raise InputError(
                f"task: {type(self.model).__name__} has {len(layers)} layer with weights, and a "
                "head needs a body before it; name the head with head="
            )
        return layers[-1]

    @property
    def head_shape(self) -> tuple[int, int]:
        """Outputs and features of the head; one that is no linear layer is refused."""
        head = self.model.get_submodule(self.head_name)
        if not isinstance(head, nn.Linear):
            raise InputError(
                f"task: the head '{self.head_name}' is a {type(head).__name__}, and an nn.Linear "
                "was expected; name one with head="
            )
        return head.out_features, head.in_features

    def initial_params(self) -> Params:
        """A copy of all tensors that are not frozen, those of a pretext's network included."""
        own = params_of(self.model)
        return own if self.pretext is None else {**own, **self.pretext.params()}

    @cached_property
    def with_features(self) -> ForwardWithFeatures:
        """(params, x, mask, key) -> (output, input of the head, buffers), as in `model.train()`."""
        tap = Tap(self.head_name, is_input=True)
        return forward_with_features(self.model, tap, adapt=self.forward)

    @cached_property
    def represent(self) -> Predictor:
        """(params, x, mask) -> input of the head (rows, ...), as in `model.eval()`."""
        return feature_extractor(self.model, Tap(self.head_name, is_input=True), self.forward)

    @cached_property
    def predict(self) -> Predictor:
        """(params, x, mask) -> output, as in `model.eval()`."""
        return predictor(self.model, self.forward)

    def feature_extractor(self, layer: str) -> Predictor:
        """(params, x, mask) -> representation at a layer, as in `model.eval()`."""
        return feature_extractor(self.model, layer, self.forward)

    def _find(self, given: MetricLike) -> Metric:
        is_loss = isinstance(given, str) and given == "loss"
        return self._loss_metric() if is_loss else find_metric(given)

    def _loss_metric(self) -> Metric:
        """The loss as a metric."""
        return Metric("loss", per_example=_as_pair(self.loss), higher_is_better=False)


def classification(
    model: nn.Module,
    *,
    metrics: MetricLike | Sequence[MetricLike] = ("accuracy",),
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    forward: Adapt | None = None,
    ensemble: str = "mean",
    augment: Augment | None = None,
) -> Task:
    """One of several classes per example: logits (rows, classes), targets (rows,).

    >>> classification(nn.Linear(4, 3), metrics=["accuracy", "f1"])
    Task(Linear, CrossEntropyLoss(), metrics: accuracy, f1)
    """
    _require_weights("class_weights", class_weights)
    require_number(
        "task: label_smoothing", label_smoothing, lambda share: 0 <= share <= 1, "from 0 to 1"
    )
    loss = nn.CrossEntropyLoss(weight=class_weights, label_smoothing=label_smoothing)
    return Task(model, loss, metrics, forward=forward, ensemble=ensemble, augment=augment)


def regression(
    model: nn.Module,
    *,
    loss: Loss | None = None,
    metrics: MetricLike | Sequence[MetricLike] = ("rmse", "mae", "r2"),
    forward: Adapt | None = None,
    augment: Augment | None = None,
) -> Task:
    """Numbers per example: outputs and targets (rows,) or (rows, numbers).

    A model with one output (rows, 1) may have targets (rows,).

    >>> regression(nn.Linear(4, 1), metrics="mae")
    Task(Linear, squared error, metrics: mae)
    """
    return Task(
        model, _squared_error if loss is None else loss, metrics, forward=forward, augment=augment
    )


def multilabel(
    model: nn.Module,
    *,
    metrics: MetricLike | Sequence[MetricLike] = ("f1", "auroc"),
    positive_weights: Tensor | None = None,
    forward: Adapt | None = None,
    augment: Augment | None = None,
) -> Task:
    """Several labels of 0 or 1 per example: logits and targets (rows, labels).

    >>> multilabel(nn.Linear(4, 3), metrics="f1")
    Task(Linear, BCEWithLogitsLoss(), metrics: f1)
    """
    _require_weights("positive_weights", positive_weights)
    loss = nn.BCEWithLogitsLoss(pos_weight=positive_weights)
    return Task(model, loss, metrics, forward=forward, augment=augment)


def tokens(
    model: nn.Module,
    *,
    metrics: MetricLike | Sequence[MetricLike] = ("perplexity", "accuracy"),
    ignore_index: int = IGNORED,
    forward: Adapt | None = None,
) -> Task:
    """One token for each position of a text: outputs (rows, positions, tokens).

    Targets are (rows, positions); one that equals `ignore_index` does not count. Where data have
    no targets, each position's target is the token after it.

    >>> tokens(nn.Embedding(50, 50))
    Task(Embedding, CrossEntropyLoss(), metrics: perplexity, accuracy)
    """
    require_instance("task: forward", forward, Callable | None, "a function")
    require_count("task: ignore_index", ignore_index, -(2**31), 2**31)

    def tokens_first(module: nn.Module, x: Values) -> Tensor:
        """Outputs (rows, tokens, positions), as torch's losses take them."""
        output: Tensor = module(x) if forward is None else forward(module, x)
        return output.movedim(-1, 1)

    def next_tokens(x: Tensor) -> Tensor:
        return functional.pad(x[:, 1:].long(), (0, 1), value=ignore_index)

    loss = nn.CrossEntropyLoss(ignore_index=ignore_index)
    return Task(model, loss, metrics, forward=tokens_first, make_targets=next_tokens)


def describe_loss(loss: Loss) -> str:
    """A loss in a few words."""
    if isinstance(loss, nn.Module):
        return repr(loss).replace("\n", " ")
    function = getattr(loss, "func", loss)  # of a partial
    return str(getattr(function, "__name__", type(loss).__name__)).strip("_").replace("_", " ")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared error (rows,) or (rows, numbers); an axis of one number is not an axis."""
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != targets.shape:
        raise InputError(
            f"loss: the outputs are {tuple(outputs.shape)} and the targets {tuple(targets.shape)}; "
            "equal shapes were expected"
        )
    return (outputs - targets).square()


def _as_pair(loss: Loss) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A loss as sums and weights (rows,)."""
    per_example = per_example_loss(loss, has_ignored=True)

    def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        values = per_example(outputs, targets)
        require_by_row(values, len(outputs))
        if isinstance(values, tuple):
            return values
        by_row = values.flatten(1).mean(1) if values.dim() > 1 else values
        return by_row, torch.ones_like(by_row)

    return pair


def _require_weights(name: str, weights: object) -> None:
    require_instance(f"task: {name}", weights, Tensor | None, "a tensor of weights, or None,")


def _require_head(model: nn.Module, head: object) -> None:
    if head is not None:
        names = [name for name, _ in model.named_modules() if name]
        require_choice("task: head", head, names)


def _require_pretext(pretext: object) -> None:
    is_pretext = hasattr(pretext, "params") and hasattr(pretext, "extend")
    if pretext is not None and (isinstance(pretext, type) or not is_pretext):
        raise InputError(
            f"task: pretext is {describe_value(pretext)}; an object with params and extend was "
            "expected"
        )


def _require_names_once(metrics: Sequence[Metric]) -> None:
    names = [metric.name for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"task: two metrics are called '{name}'; name each once")
