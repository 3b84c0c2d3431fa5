"""Any `nn.Module` as a pure function of its parameters: no state leaks between clients.

The structure of the model (its skeleton) is copied once, without weights. Each call puts the given
tensors into the skeleton. Layers that mix the examples of a batch, or draw random numbers, are
replaced: they read the mask of real rows, or the key of the step, from buffers that each call sets.
"""

import copy
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from glocal.core import trees
from glocal.core.errors import InputError, suggest_name
from glocal.core.model_tensors import (
    FrozenTensors,
    canonical_names,
    client_tensors,
    frozen_tensors,
    require_model,
    unique_tensors,
)
from glocal.core.pure_layers import KeyedDropout, KeyedGaussianNoise, MaskedBatchNorm
from glocal.core.recurrent import make_batchable
from glocal.core.trees import Params
from glocal.core.values import Values

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MAX_NOISE_STD = 1000
_NORM_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)

Forward = Callable[[Params, Values, Tensor, Tensor], tuple[Any, Params]]
ForwardWithFeatures = Callable[[Params, Values, Tensor, Tensor], tuple[Any, Tensor, Params]]
FeatureHook = Callable[[Tensor], Tensor]
Predictor = Callable[[Params, Values, Tensor], Tensor]
Adapt = Callable[[nn.Module, Values], Any]  # what the module takes and gives, adapted
_Mode = Callable[[nn.Module], nn.Module]


def params_of(model: nn.Module) -> Params:
    """A copy of every parameter and buffer that is not frozen, by name.

    >>> {name: tuple(tensor.shape) for name, tensor in params_of(nn.Linear(4, 2)).items()}
    {'weight': (2, 4), 'bias': (2,)}
    """
    require_model("model: it", model)
    _refuse_unusable(model)
    if not unique_tensors(model):
        raise InputError("model: it has no parameters; there is nothing to train")
    for name, tensor in unique_tensors(model).items():
        if tensor.is_meta:
            raise InputError(
                f"model: '{name}' is on the device meta, which holds no values; "
                "make the model on the cpu"
            )
    tensors = client_tensors(model)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def trainable_names(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that are not frozen; no buffers."""
    return frozenset(
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    )


def training_forward(model: nn.Module, adapt: Adapt | None = None) -> Forward:
    """(params, x, mask, key) -> (output, buffers after the step), as in `model.train()`.

    Rows with mask False do not count. With `adapt`, the output is adapt(model, x).
    """
    call = _functional(model, nn.Module.train, adapt)
    buffers = _buffer_names(model)

    def forward(params: Params, x: Values, mask: Tensor, key: Tensor) -> tuple[Tensor, Params]:
        output, after = call(params, x, mask, key)
        return output, trees.pick(after, buffers)

    return forward


class Tap(NamedTuple):
    """Where a model's representation is read: the output of a module, or the input of one."""

    layer: str
    is_input: bool = False


def forward_with_features(
    model: nn.Module, tap: Tap | str, hook: FeatureHook | None = None, adapt: Adapt | None = None
) -> ForwardWithFeatures:
    """As `training_forward`, and returns the representation; a name is that of a module's output.

    The layers after it see hook(representation), if there is a hook.
    """
    call = _functional_with_features(model, nn.Module.train, tap, hook, adapt)
    buffers = _buffer_names(model)

    def forward(
        params: Params, x: Values, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Params]:
        output, features, after = call(params, x, mask, key)
        return output, features, trees.pick(after, buffers)

    return forward


def feature_extractor(model: nn.Module, tap: Tap | str, adapt: Adapt | None = None) -> Predictor:
    """(params, x, mask) -> representation (rows, ...), as in `model.eval()`."""
    call = _functional_with_features(model, nn.Module.eval, tap, None, adapt)

    def represent(params: Params, x: Values, mask: Tensor) -> Tensor:
        return call(params, x, mask, _unused_key(mask))[1]

    return represent


def predictor(model: nn.Module, adapt: Adapt | None = None) -> Predictor:
    """(params, x, mask) -> output, as in `model.eval()`."""
    call = _functional(model, nn.Module.eval, adapt)

    def predict(params: Params, x: Values, mask: Tensor) -> Tensor:
        output: Tensor = call(params, x, mask, _unused_key(mask))[0]
        return output

    return predict


def _unused_key(mask: Tensor) -> Tensor:
    """A key for evaluation, where no layer draws."""
    return mask.new_zeros((), dtype=torch.int64)


def _buffer_names(model: nn.Module) -> list[str]:
    """The names of the buffers that are not frozen."""
    frozen = frozen_tensors(model)
    return [name for name, _ in model.named_buffers() if name not in frozen]


def _functional(model: nn.Module, mode: _Mode, adapt: Adapt | None) -> Forward:
    """(params, x, mask, key) -> (output, every tensor after the call)."""
    return _functional_call(model, _in_mode(model, mode), adapt)


def _functional_with_features(
    model: nn.Module,
    mode: _Mode,
    tap: Tap | str,
    hook: FeatureHook | None,
    adapt: Adapt | None,
) -> ForwardWithFeatures:
    """The same with what goes into or comes out of one module, at whatever depth it is."""
    tap = Tap(tap) if isinstance(tap, str) else tap
    known = [name for name, _ in model.named_modules() if name]
    if tap.layer not in known:
        raise InputError(
            f"model: there is no module '{tap.layer}' to take the representation from; "
            f"{suggest_name(tap.layer, known)}"
        )
    skeleton = _in_mode(model, mode)
    recorded: list[Tensor] = []

    def record_output(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        recorded[:] = [output]
        return hook(output) if hook else output

    def record_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        recorded[:] = [inputs[0]]
        return (hook(inputs[0]), *inputs[1:]) if hook else inputs

    if tap.is_input:
        skeleton.get_submodule(tap.layer).register_forward_pre_hook(record_input)
    else:
        skeleton.get_submodule(tap.layer).register_forward_hook(record_output)
    # The record is read inside the lock of the call: another thread's call would overwrite it.
    call = _functional_call(model, skeleton, adapt, lambda: recorded.pop())

    def call_with_features(
        params: Params, x: Values, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Params]:
        (output, features), after = call(params, x, mask, key)
        return output, features, after

    return call_with_features


def _functional_call(
    model: nn.Module,
    skeleton: nn.Module,
    adapt: Adapt | None,
    read_record: Callable[[], Tensor] | None = None,
) -> Callable[..., tuple[Any, Params]]:
    """The skeleton as a pure function of the model's tensors: a missing tensor is an error.

    With `read_record`, its result after the call is returned beside the output.
    """
    names, frozen = canonical_names(model), FrozenTensors(model)
    mask_names = _tensor_names(skeleton, MaskedBatchNorm, "rows")
    key_names = _tensor_names(skeleton, (KeyedDropout, KeyedGaussianNoise), "key")
    buffers = _buffer_names(model)
    keyed_layers = _keyed_layers(skeleton)
    called, prefix = (_Adapted(skeleton, adapt), "module.") if adapt else (skeleton, "")
    one_call_at_a_time = Lock()  # a call puts its tensors into the one skeleton

    def call(params: Params, x: Values, mask: Tensor, key: Tensor) -> tuple[Any, Params]:
        copies = {name: params[name].clone() for name in buffers}  # a module may write into them
        params = {**params, **copies, **frozen.on(mask.device)}
        tensors = {name: params[first] for name, first in names.items()}
        tensors |= dict.fromkeys(mask_names, mask) | dict.fromkeys(key_names, key)
        with one_call_at_a_time:
            for layer in keyed_layers:
                layer.calls = 0
            own = {prefix + name: tensor for name, tensor in tensors.items()}
            output = functional_call(called, own, (x,), tie_weights=False, strict=True)
            # what the module wrote into its buffers is in `own` now
            after = {name: own[prefix + name] for name in tensors}
            return ((output, read_record()) if read_record else output), after

    return call


class _Adapted(nn.Module):
    """A module that is called as adapt(module, x)."""

    def __init__(self, module: nn.Module, adapt: Adapt) -> None:
        super().__init__()
        self.module, self.adapt = module, adapt

    def forward(self, x: Values) -> Any:
        return self.adapt(self.module, x)


def state_dict(model: nn.Module, params: Params) -> Params:
    """Params under the names of `model.state_dict()`, tied names included: they load strictly."""
    return _named_copies(model, {**params, **frozen_tensors(model)})


def client_state_dict(model: nn.Module, params: Params) -> Params:
    """The same without the frozen tensors, which are not copied either."""
    return _named_copies(model, trees.pick(params, client_tensors(model)))


def _named_copies(model: nn.Module, tensors: Params) -> Params:
    """Copies of these tensors under each name that they have in the model's state dict."""
    names, copies = canonical_names(model), {}
    for name in model.state_dict():
        if names.get(name) in tensors:
            copies[name] = tensors[names[name]].detach().clone()
    return copies


def make_dropout(rate: float | None) -> nn.Dropout:
    """A dropout layer; a rate of None drops nothing."""
    require_dropout_rate("model: dropout", rate)
    return nn.Dropout(rate or 0.0)


def require_dropout_rate(name: str, rate: float | None) -> None:
    """Refuse a dropout rate outside 0 to 1."""
    if rate is not None and not 0 <= rate < 1:
        raise InputError(f"{name} is {rate}; a rate from 0 to below 1 was expected")


def require_noise_std(name: str, std: float | None) -> None:
    """Refuse a negative noise std, and one that would drown every representation."""
    if std is not None and not 0 <= std <= _MAX_NOISE_STD:
        raise InputError(f"{name} is {std}; it must be from 0 to {_MAX_NOISE_STD}")


class GaussianNoise(nn.Module):
    """Adds normal noise with this std in training: the representation holds less information."""

    def __init__(self, std: float) -> None:
        super().__init__()
        require_noise_std("model: the noise std", std)
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        """With torch's own generator; on clients, `KeyedGaussianNoise` takes its place."""
        return x + self.std * torch.randn_like(x) if self.training else x


def _keyed_layers(skeleton: nn.Module) -> list[KeyedDropout | KeyedGaussianNoise]:
    layers = []
    for module in skeleton.modules():
        if isinstance(module, KeyedDropout | KeyedGaussianNoise):
            layers.append(module)
    return layers


def _in_mode(model: nn.Module, mode: _Mode) -> nn.Module:
    """The skeleton in training or evaluation mode; frozen batch norms are always in the latter."""
    skeleton, frozen = mode(_skeleton(model)), frozen_tensors(model)
    names = canonical_names(model)
    for name, module in skeleton.named_modules():
        statistics = f"{name}.running_mean".lstrip(".")
        if isinstance(module, MaskedBatchNorm) and names.get(statistics) in frozen:
            module.eval()
    return skeleton


def _skeleton(model: nn.Module) -> nn.Module:
    """The structure of a model without its weights, and with layers that take a mask or a key."""
    _refuse_unusable(model)
    skeleton = copy.deepcopy(model).to("meta")
    replacements: dict[int, nn.Module] = {}  # a layer in two places stays one layer
    for layer, (name, module) in enumerate(list(skeleton.named_modules(remove_duplicate=False))):
        replacement = replacements.setdefault(id(module), _replacement(module, layer))
        if replacement is module:
            continue
        if not name:
            skeleton = replacement
            continue
        parent, _, child = name.rpartition(".")
        setattr(skeleton.get_submodule(parent), child, replacement)
    return skeleton


def _replacement(module: nn.Module, layer: int) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return MaskedBatchNorm(module)
    if isinstance(module, _DropoutNd) and type(module) in _DROPOUTS:
        return KeyedDropout(module, layer)
    if isinstance(module, GaussianNoise):
        return KeyedGaussianNoise(module.std, layer)
    return make_batchable(module)


def _tensor_names(
    skeleton: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...], tensor: str
) -> list[str]:
    """The full names of a tensor in all layers of a kind."""
    modules = skeleton.named_modules(remove_duplicate=False)
    return [f"{name}.{tensor}".lstrip(".") for name, module in modules if isinstance(module, kind)]


def _refuse_unusable(model: nn.Module) -> None:
    """Refuse a model that cannot be federated; the message names the layer and the fix."""
    for name, tensor in unique_tensors(model).items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise InputError(
                f"model: '{name}' has no shape yet (a lazy layer); "
                "run one batch through the model first"
            )
    for name, module in model.named_modules():
        _refuse_unusable_layer(name, module)


def _refuse_unusable_layer(name: str, module: nn.Module) -> None:
    if isinstance(module, _DropoutNd) and not 0 <= module.p <= 1:
        raise InputError(f"model: '{name}' has the dropout rate {module.p}; give one from 0 to 1")
    if isinstance(module, GaussianNoise):
        require_noise_std(f"model: the noise std of '{name}'", module.std)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise InputError(
            f"model: '{name}' tracks running statistics over padded rows; "
            "use track_running_stats=False"
        )
    if isinstance(module, _BatchNorm) and type(module).forward not in _NORM_FORWARDS:
        raise InputError(
            f"model: '{name}' is a batch norm of your own, and padded rows would enter it; "
            "use torch's"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise InputError(
            f"model: '{name}' rewrites its weights whenever it is used; use max_norm=None"
        )
