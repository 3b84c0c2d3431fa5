"""Any `nn.Module` as a pure function of its parameters: nothing is stored, nothing leaks from one device to the next."""

import copy
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from glocal.core import random, trees
from glocal.core.errors import InputError, suggest_name
from glocal.core.split import canonical_names, unique_tensors
from glocal.core.trees import Params

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MOST_NOISE = 1000
_NORM_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

Forward = Callable[[Params, Tensor, Tensor, Tensor], tuple[Tensor, Params]]
ForwardWithFeatures = Callable[[Params, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Params]]
FeatureHook = Callable[[Tensor], Tensor]
Predictor = Callable[[Params, Tensor, Tensor], Tensor]


def params_of(model: nn.Module) -> Params:
    """A copy of every parameter and buffer, by name."""
    _refuse_unusable(model)
    if not unique_tensors(model):
        raise InputError("model: it has no parameters; there is nothing to train")
    return {name: tensor.detach().clone() for name, tensor in unique_tensors(model).items()}


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The names that gradient descent moves: parameters that are not frozen, no buffers."""
    return frozenset(
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    )


def training_forward(model: nn.Module) -> Forward:
    """(params, x, mask, key) -> (output, buffers after the step), as in `model.train()`; rows with mask False count for nothing."""
    call, buffers = _functional(model, nn.Module.train), [name for name, _ in model.named_buffers()]

    def forward(params: Params, x: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        output, used = call(params, x, mask, key)
        return output, trees.pick(used, buffers)

    return forward


def forward_with_features(
    model: nn.Module, layer: str, hook: FeatureHook | None = None
) -> ForwardWithFeatures:
    """As `training_forward`, with what the module `layer` puts out, the representation; `hook` stands in the way from there on."""
    buffers = [name for name, _ in model.named_buffers()]
    call = _functional_with_features(model, nn.Module.train, layer, hook)

    def forward(
        params: Params, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Params]:
        output, seen, used = call(params, x, mask, key)
        return output, seen, trees.pick(used, buffers)

    return forward


def feature_extractor(model: nn.Module, layer: str) -> Predictor:
    """(params, x, mask) -> representation (rows, ...), as in `model.eval()`."""
    call = _functional_with_features(model, nn.Module.eval, layer, None)

    def represent(params: Params, x: Tensor, mask: Tensor) -> Tensor:
        return call(params, x, mask, mask.new_zeros((), dtype=torch.int64))[1]

    return represent


def predictor(model: nn.Module) -> Predictor:
    """(params, x, mask) -> output, as in `model.eval()`."""
    call = _functional(model, nn.Module.eval)

    def predict(params: Params, x: Tensor, mask: Tensor) -> Tensor:
        return call(params, x, mask, mask.new_zeros((), dtype=torch.int64))[0]

    return predict


def _functional(model: nn.Module, mode: Callable[[nn.Module], nn.Module]) -> Forward:
    """(params, x, mask, key) -> (output, every tensor as the call left it); a tensor that is not given is an error."""
    return _functional_call(model, mode(_skeleton(model)))


def _functional_with_features(
    model: nn.Module, mode: Callable[[nn.Module], nn.Module], layer: str, hook: FeatureHook | None
) -> Callable[[Params, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Params]]:
    """The same with what one module puts out, whatever comes after it."""
    known = [name for name, _ in model.named_modules() if name]
    if layer not in known:
        raise InputError(
            f"model: there is no module '{layer}' to take the representation from; {suggest_name(layer, known)}"
        )
    skeleton = mode(_skeleton(model))
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        seen[:] = [output]
        return hook(output) if hook else output

    skeleton.get_submodule(layer).register_forward_hook(keep)
    call = _functional_call(model, skeleton, lambda: seen.pop())

    def tapped(
        params: Params, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Params]:
        (output, tap), used = call(params, x, mask, key)
        return output, tap, used

    return tapped


def _functional_call(
    model: nn.Module, skeleton: nn.Module, also: Callable[[], Tensor] | None = None
) -> Callable[..., tuple[Any, Params]]:
    """The skeleton as a pure function of the model's tensors; what `also` gives after a call comes with its output."""
    names = canonical_names(model)
    need_mask = _tensor_names(skeleton, MaskedBatchNorm, "rows")
    need_key = _tensor_names(skeleton, (KeyedDropout, KeyedGaussianNoise), "key")
    buffers = [name for name, _ in model.named_buffers()]
    drawing = [
        module
        for module in skeleton.modules()
        if isinstance(module, KeyedDropout | KeyedGaussianNoise)
    ]
    one_at_a_time = Lock()  # tensors are put into the skeleton for the time of a call

    def call(params: Params, x: Tensor, mask: Tensor, key: Tensor) -> tuple[Any, Params]:
        params = {
            **params,
            **{name: params[name].clone() for name in buffers},
        }  # a module may write into its buffers
        given = {name: params[first] for name, first in names.items()}
        given |= dict.fromkeys(need_mask, mask) | dict.fromkeys(need_key, key)
        with one_at_a_time:
            for layer in drawing:
                layer.calls = 0
            output = functional_call(skeleton, given, (x,), tie_weights=False, strict=True)
            return (output, also()) if also else output, given

    return call


def state_dict(model: nn.Module, params: Params) -> Params:
    """Params under the names of `model.state_dict()`, tied names included, so that they load back strictly."""
    names = canonical_names(model)
    return {
        name: params[names[name]].detach().clone() for name in model.state_dict() if name in names
    }


class MaskedBatchNorm(nn.Module):
    """Batch normalisation whose statistics see only real rows; `rows` is handed in like any other tensor."""

    rows: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.momentum, self.affine = norm.eps, norm.momentum, norm.affine
        self.track_running_stats = norm.track_running_stats
        self._parameters.update(norm._parameters)
        self._buffers.update(norm._buffers)
        self.register_buffer("rows", torch.ones(1, device="meta"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (batch, channels, ...) per channel."""
        mean, variance = (
            self._batch_statistics(x)
            if self.training or not self.track_running_stats
            else self._running_statistics()
        )
        shape = (1, -1, *(1,) * (x.dim() - 2))
        normalised = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.affine:
            normalised = normalised * self._tensor("weight").view(shape) + self._tensor(
                "bias"
            ).view(shape)
        return normalised.to(x.dtype)

    def _tensor(self, name: str) -> Tensor:
        tensor = {**self._parameters, **self._buffers}[name]
        assert tensor is not None
        return tensor

    def _running_statistics(self) -> tuple[Tensor, Tensor]:
        return self._tensor("running_mean"), self._tensor("running_var")

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (
            x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        )  # sums of many halves overflow
        # a model that folds time into the batch has several rows per example, one after the other
        rows = self.rows.repeat_interleave(x.shape[0] // self.rows.shape[0])
        weight = rows.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))
        axes = [0, *range(2, x.dim())]
        total = (weight.sum() * (x[0, 0].numel())).clamp(min=1)
        mean = (x * weight).sum(axes) / total
        centred = (x - mean.view(1, -1, *(1,) * (x.dim() - 2))) * weight
        variance = centred.square().sum(axes) / total
        if self.training and self.track_running_stats:
            _, old = self._running_statistics()
            unbiased = variance.detach() * total / (total - 1).clamp(min=1)
            self._track(
                mean.detach(), torch.where(total > 1, unbiased, old)
            )  # one value has no variance
        return mean, variance

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        old_mean, old_variance = self._running_statistics()
        batches = self._tensor("num_batches_tracked") + 1
        factor = 1 / batches if self.momentum is None else self.momentum
        self._buffers["num_batches_tracked"] = batches
        self._buffers["running_mean"] = old_mean + factor * (mean - old_mean)
        self._buffers["running_var"] = old_variance + factor * (variance - old_variance)


class KeyedDropout(nn.Module):
    """Dropout whose pattern is computed from a key, so that a device drops the same units alone and in a batch."""

    key: Tensor

    def __init__(self, dropout: _DropoutNd, layer: int) -> None:
        super().__init__()
        self.p, self.layer, self.calls = dropout.p, layer, 0
        self.whole_channels = not isinstance(dropout, nn.Dropout)
        self.register_buffer(
            "key", torch.zeros((), dtype=torch.int64, device="meta"), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Set units of x (batch, ...), or whole channels, to zero at rate p."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else tuple(x.shape)
        self.calls += 1  # one layer used twice in a step drops other units the second time
        kept = (
            random.uniform(random.fold_in(random.fold_in(self.key, self.layer), self.calls), shape)
            >= self.p
        )
        return x * kept / (1 - self.p)


def make_dropout(share: float | None) -> nn.Dropout:
    """Dropout of a share of its input while training; of nothing where none is given."""
    require_dropout_rate("model: dropout", share)
    return nn.Dropout(share or 0.0)


def require_dropout_rate(name: str, share: float | None) -> None:
    """Refuse a share to be dropped that is none."""
    if share is not None and not 0 <= share < 1:
        raise InputError(f"{name} is {share}; a share from 0 to below 1 was expected")


def require_noise_std(name: str, std: float | None) -> None:
    """Refuse noise that is none, or that would drown every representation."""
    if std is not None and not 0 <= std <= _MOST_NOISE:
        raise InputError(f"{name} is {std}; it must be from 0 to {_MOST_NOISE}")


class GaussianNoise(nn.Module):
    """Adds normal noise of this deviation while training: what a representation says is then blurred."""

    def __init__(self, std: float) -> None:
        super().__init__()
        require_noise_std("model: the noise's deviation", std)
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        """With torch's own generator; where devices train, the numbers are computed from their keys."""
        return x + self.std * torch.randn_like(x) if self.training else x


class KeyedGaussianNoise(nn.Module):
    """The same, with numbers computed from a key."""

    key: Tensor

    def __init__(self, noisy: GaussianNoise, layer: int) -> None:
        super().__init__()
        self.std, self.layer, self.calls = noisy.std, layer, 0
        self.register_buffer(
            "key", torch.zeros((), dtype=torch.int64, device="meta"), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Blur x (batch, ...)."""
        if not self.training or self.std == 0:
            return x
        self.calls += 1
        return x + self.std * random.normal(
            random.fold_in(random.fold_in(self.key, self.layer), self.calls), x.shape
        )


def _skeleton(model: nn.Module) -> nn.Module:
    """The model's structure without its weights; layers that mix a batch or draw numbers are swapped for ones that are told how."""
    _refuse_unusable(model)
    skeleton = copy.deepcopy(model).to("meta")
    swapped: dict[int, nn.Module] = {}  # a layer that stands in two places is one layer still
    for layer, (name, module) in enumerate(list(skeleton.named_modules(remove_duplicate=False))):
        replacement = swapped.setdefault(id(module), _replacement(module, layer))
        if replacement is not module and name:
            parent, _, child = name.rpartition(".")
            setattr(skeleton.get_submodule(parent), child, replacement)
        elif replacement is not module:
            skeleton = replacement
    return skeleton


def _replacement(module: nn.Module, layer: int) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return MaskedBatchNorm(module)
    if isinstance(module, _DropoutNd) and type(module) in _DROPOUTS:
        return KeyedDropout(module, layer)
    if isinstance(module, GaussianNoise):
        return KeyedGaussianNoise(module, layer)
    return module


def _tensor_names(
    skeleton: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], tensor: str
) -> list[str]:
    """The full names of what each layer of a kind must be told."""
    modules = skeleton.named_modules(remove_duplicate=False)
    return [f"{name}.{tensor}".lstrip(".") for name, module in modules if isinstance(module, kind)]


def _refuse_unusable(model: nn.Module) -> None:
    """Refuse at the door what could not be federated, name the layer, suggest the fix."""
    for name, tensor in unique_tensors(model).items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise InputError(
                f"model: '{name}' has no shape yet (a lazy layer); run one batch through the model first"
            )
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and not 0 <= module.p <= 1:
            raise InputError(f"model: '{name}' drops a share of {module.p}; give one from 0 to 1")
        if isinstance(module, GaussianNoise):
            require_noise_std(f"model: the deviation of '{name}'", module.std)
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise InputError(
                f"model: '{name}' tracks running statistics over padded rows; use track_running_stats=False"
            )
        if isinstance(module, _BatchNorm) and type(module).forward not in _NORM_FORWARDS:
            raise InputError(
                f"model: '{name}' is a batch norm of your own, and padded rows would enter it; use torch's"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise InputError(
                f"model: '{name}' rewrites its weights whenever it is used; use max_norm=None"
            )
