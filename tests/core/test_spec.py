"""The spec of a value: equal where numbers are, different wherever something changes them."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal.core.errors import InputError
from glocal.core.spec import describe_spec, fingerprint, first_difference, spec_of
from glocal.wire import Chain, Half
from tests.support import world

pytestmark = pytest.mark.quick

SIZES = {"inputs": world.FEATURES, "hidden": 8, "outputs": world.CLASSES}


def mlp(*, hidden=8, activation=nn.ReLU, dropout=0.0, seed=0, frozen=()):
    def make():
        return nn.Sequential(
            nn.Linear(world.FEATURES, hidden),
            activation(),
            nn.Dropout(dropout),
            nn.Linear(hidden, world.CLASSES),
        )

    model = world.seeded(make, seed)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def algorithm(kind=glocal.FedAvg, *, model=None, optimizer=None, task=None, **settings):
    task = task or glocal.classification(model or mlp())
    return kind(task, optimizer=optimizer or glocal.SGD(lr=0.1), **settings)


def task_of(loss=None, metrics=(), **settings):
    return algorithm(task=glocal.Task(mlp(), loss or nn.CrossEntropyLoss(), metrics, **settings))


def weighted(*weights):
    return nn.CrossEntropyLoss(weight=torch.tensor(weights))


class Own(nn.Module):
    """A loss of the user's, with a setting that its repr does not show."""

    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, outputs, targets):
        return (outputs.amax(1) - self.margin).relu()


DIFFERENT = {
    "the plain algorithm": lambda: algorithm(),
    "the learning rate": lambda: algorithm(optimizer=glocal.SGD(lr=0.2)),
    "its last bit": lambda: algorithm(optimizer=glocal.SGD(lr=0.1 + 2**-55)),
    "momentum": lambda: algorithm(optimizer=glocal.SGD(lr=0.1, momentum=0.5)),
    "weight decay": lambda: algorithm(optimizer=glocal.SGD(lr=0.1, weight_decay=0.5)),
    "decay of the learning rate": lambda: algorithm(optimizer=glocal.SGD(lr=0.1, lr_decay=0.5)),
    "a schedule": lambda: algorithm(optimizer=glocal.SGD(lr=0.1, lr_schedule=glocal.StepLR())),
    "another schedule": lambda: algorithm(
        optimizer=glocal.SGD(lr=0.1, lr_schedule=glocal.StepLR(step_size=2))
    ),
    "the optimizer": lambda: algorithm(optimizer=glocal.Adam(lr=0.1)),
    "its decoupled form": lambda: algorithm(optimizer=glocal.AdamW(lr=0.1, weight_decay=0.0)),
    "betas": lambda: algorithm(optimizer=glocal.Adam(lr=0.1, betas=(0.8, 0.999))),
    "the algorithm": lambda: algorithm(glocal.LocalOnly),
    "its strength": lambda: algorithm(glocal.FedProx, mu=0.1),
    "another strength": lambda: algorithm(glocal.FedProx, mu=0.2),
    "a local part": lambda: algorithm(local="0"),
    "another local part": lambda: algorithm(local="3"),
    "several names of it": lambda: algorithm(local=["0", "3"]),
    "the aggregation's weights": lambda: algorithm(aggregation=glocal.Mean(by="clients")),
    "the aggregation": lambda: algorithm(aggregation=glocal.Median()),
    "the model's width": lambda: algorithm(model=mlp(hidden=9)),
    "an activation without tensors": lambda: algorithm(model=mlp(activation=nn.Tanh)),
    "its setting": lambda: algorithm(model=mlp(activation=nn.LeakyReLU)),
    "another setting of it": lambda: algorithm(model=mlp(activation=partial(nn.LeakyReLU, 0.5))),
    "a rate of dropout": lambda: algorithm(model=mlp(dropout=0.5)),
    "the type of the weights": lambda: algorithm(model=mlp().double()),
    "what is frozen": lambda: algorithm(model=mlp(frozen=["0.weight"])),
    "the values of what is frozen": lambda: algorithm(model=mlp(seed=1, frozen=["0.weight"])),
    "metrics": lambda: algorithm(task=glocal.classification(mlp(), metrics=["accuracy", "f1"])),
    "the order of metrics": lambda: algorithm(
        task=glocal.classification(mlp(), metrics=["f1", "accuracy"])
    ),
    "no metrics": lambda: task_of(),
    "class weights": lambda: task_of(weighted(1.0, 2.0, 3.0)),
    "other class weights": lambda: task_of(weighted(1.0, 2.0, 4.0)),
    "label smoothing": lambda: task_of(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "the ignored index": lambda: task_of(nn.CrossEntropyLoss(ignore_index=1)),
    "the loss": lambda: task_of(nn.MultiMarginLoss()),
    "its margin": lambda: task_of(nn.MultiMarginLoss(margin=2)),
    "the loss as a function": lambda: task_of(functional.cross_entropy),
    "its settings": lambda: task_of(partial(functional.cross_entropy, label_smoothing=0.1)),
    "a loss of the user's": lambda: task_of(Own(1.0)),
    "its hidden setting": lambda: task_of(Own(2.0)),
    "how the model is called": lambda: task_of(forward=lambda model, x: model(x)),
    "the ensemble": lambda: task_of(ensemble="votes"),
    "the head": lambda: task_of(head="0"),
    "augmentation": lambda: task_of(augment=glocal.crop_and_flip(2)),
    "its padding": lambda: task_of(augment=glocal.crop_and_flip(3)),
    "its colours": lambda: task_of(augment=glocal.crop_and_flip(2, (0.5, 0.5, 0.5))),
}


def test_everything_that_changes_numbers_changes_the_spec():
    prints = {name: fingerprint(make().spec) for name, make in DIFFERENT.items()}
    twice = [name for name, text in prints.items() if list(prints.values()).count(text) > 1]
    assert not twice


@pytest.mark.parametrize("name", DIFFERENT)
def test_equal_settings_have_equal_specs_that_json_can_hold(name):
    one, again = DIFFERENT[name]().spec, DIFFERENT[name]().spec
    assert one == again
    assert json.loads(json.dumps(one)) == one


def test_initial_weights_do_not_count():
    assert algorithm(model=mlp(seed=0)).spec == algorithm(model=mlp(seed=1)).spec


def test_training_mode_and_weights_after_training_do_not_count():
    model = mlp()
    before = algorithm(model=model).spec
    model.eval()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert algorithm(model=model).spec == before


def test_frozen_weights_that_are_not_frozen_do_not_count():
    specs = [algorithm(model=mlp(seed=seed, frozen=["3.bias"])).spec for seed in (0, 1)]
    assert specs[0] != specs[1]
    path, *_ = first_difference(*specs)
    assert path == "task.model.tensors.3.bias.values"


def test_a_whole_number_is_the_same_as_the_float():
    assert spec_of(1) == spec_of(1.0) != spec_of(1.5)
    assert spec_of(True) is True
    assert spec_of(float("nan")) == spec_of(float("nan"))


def test_floats_that_differ_in_their_last_bit_differ():
    assert spec_of(0.1 + 0.2) != spec_of(0.3)


def test_tensors_and_arrays_count_by_shape_type_and_values():
    values = [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2).double(),
        torch.tensor([0.0, 1.0]),
        torch.zeros(2).bfloat16(),
        torch.zeros(2, dtype=torch.int32),
    ]
    assert len({fingerprint(spec_of(value)) for value in values}) == len(values)
    assert spec_of(np.zeros(2, np.float32)) == spec_of(torch.zeros(2))
    assert spec_of(torch.zeros(2, device="meta")) == {"shape": [2], "dtype": "torch.float32"}


# ---- functions of the user's


def own(source, name="own", **held):
    """A function from its source, as in a module of the user's."""
    names = {"__name__": "users_module", "torch": torch, **held}
    exec(compile(source, "<users file>", "exec"), names)
    return names[name]


PLAIN = "def own(outputs, targets):\n    return (outputs - targets).abs()"
EDITED = {
    "a constant": PLAIN.replace("abs()", "abs() * 2"),
    "another constant": PLAIN.replace("abs()", "abs() * 3"),
    "an operation": PLAIN.replace("-", "+"),
    "a method": PLAIN.replace("abs", "square"),
    "a default": PLAIN.replace("targets):", "targets, scale=1):"),
    "another default": PLAIN.replace("targets):", "targets, scale=2):"),
    "a keyword's default": PLAIN.replace("targets):", "targets, *, scale=1):"),
    "another keyword's default": PLAIN.replace("targets):", "targets, *, scale=2):"),
    "a function inside": PLAIN.replace("(outputs - targets)", "(lambda a: a + 1)(outputs)"),
    "another one inside": PLAIN.replace("(outputs - targets)", "(lambda a: a + 2)(outputs)"),
}


def test_every_edit_of_a_users_function_changes_the_spec():
    functions = [own(text) for text in (PLAIN, *EDITED.values())]
    assert len({fingerprint(spec_of(function)) for function in functions}) == len(functions)
    assert spec_of(own(PLAIN)) == spec_of(own(PLAIN))


def test_another_place_in_the_file_does_not_count():
    assert spec_of(own("\n\n# a remark\n" + PLAIN)) == spec_of(own(PLAIN))


USING = "def own(outputs, targets):\n    return SCALE * helper(outputs)"


@pytest.mark.parametrize("changed", ["SCALE", "helper"])
def test_what_a_users_function_uses_of_its_module_counts(changed):
    helpers = [own(f"def helper(x):\n    return x + {n}", "helper") for n in (1, 2)]
    before = {"SCALE": 1.5, "helper": helpers[0]}
    after = {**before, changed: {"SCALE": 2.5, "helper": helpers[1]}[changed]}
    assert spec_of(own(USING, **before)) == spec_of(own(USING, **before))
    assert spec_of(own(USING, **before)) != spec_of(own(USING, **after))


def closure(scale):
    def scaled(outputs, targets):
        return scale * (outputs - targets).abs()

    return scaled


def test_what_a_function_closes_over_counts():
    assert spec_of(closure(2.0)) == spec_of(closure(2.0))
    specs = [spec_of(closure(scale)) for scale in (2.0, 2.5, torch.ones(1), glocal.SGD(lr=1.0))]
    assert len({fingerprint(spec) for spec in specs}) == len(specs)


def test_a_partial_counts_with_its_arguments():
    specs = [spec_of(partial(closure, scale)) for scale in (1, 2)]
    assert specs[0] != specs[1]
    assert specs[0] == spec_of(partial(closure, 1)) != spec_of(partial(closure, scale=1))


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def loss(self, outputs, targets):
        return self.scale * outputs


@dataclass(frozen=True)
class Frozen:
    scale: float = 1.0

    def loss(self, outputs, targets):
        return self.scale * outputs


def test_a_method_counts_with_its_object():
    assert spec_of(Frozen(2.0).loss) == spec_of(Frozen(2.0).loss) != spec_of(Frozen(3.0).loss)


def test_functions_that_refer_to_each_other_have_a_spec():
    source = "def own(x):\n    return other(x)\ndef other(x):\n    return own(x) if x else x"
    assert spec_of(own(source)) == spec_of(own(source))
    assert spec_of(own(source)) != spec_of(own(source.replace("else x", "else -x")))


def test_without_code_an_edit_does_not_count_and_a_setting_does():
    """A server and its clients may have different versions of Python."""
    one, other = own(PLAIN), own(EDITED["an operation"])
    assert spec_of(one, with_code=False) == spec_of(other, with_code=False)
    assert "code" not in json.dumps(spec_of(task_of(closure(2.0)), with_code=False))
    defaults = own(EDITED["a default"]), own(EDITED["another default"])
    assert spec_of(defaults[0], with_code=False) != spec_of(defaults[1], with_code=False)
    closures = [spec_of(closure(scale), with_code=False) for scale in (2.0, 3.0)]
    assert closures[0] != closures[1]


ALGORITHM = """
import glocal

class Own(glocal.FedAvg):
    strength: float = 1.0

    def client_update(self, message, private, work):
        update = super().client_update(message, private, work)
        return update

    @property
    def factor(self):
        return 2 * self.strength
"""


def test_every_edit_of_a_users_algorithm_changes_the_spec():
    texts = [
        ALGORITHM,
        ALGORITHM.replace("return update", "return update._replace(private=private)"),
        ALGORITHM.replace("2 * self", "3 * self"),
        ALGORITHM.replace("strength: float = 1.0", "strength: float = 2.0"),
        ALGORITHM.replace("    strength: float", "    more: int = 0\n    strength: float"),
    ]
    specs = [algorithm(own(text, "Own")).spec for text in texts]
    assert len({fingerprint(spec) for spec in specs}) == len(specs)
    assert algorithm(own(ALGORITHM, "Own")).spec == specs[0]


MODEL = """
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x).relu()
"""


def test_an_edit_of_a_users_model_changes_the_spec():
    specs = [
        algorithm(model=own(text, "Own")()).spec for text in (MODEL, MODEL.replace("relu", "tanh"))
    ]
    assert specs[0] != specs[1]
    assert algorithm(model=own(MODEL, "Own")()).spec == specs[0]


# ---- what cannot be distinguished


class HiddenState:
    pass


@dataclass(frozen=True)
class Remembering:
    scale: float = 1.0

    @cached_property
    def doubled(self):
        return 2 * self.scale


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (HiddenState(), "the value is a HiddenState, and two of them cannot be distinguished"),
        ({"a": [1, HiddenState()]}, r"a\[1\] is a HiddenState"),
        (partial(closure, HiddenState()), r"\[0\] is a HiddenState"),
        (closure(HiddenState()), "HiddenState"),
        (Scaled(2.0).loss, "is a Scaled"),
        (Chain((Half(), HiddenState())), r"codecs\[1\] is a HiddenState"),
        (np.random.default_rng(0), "is a Generator"),
        (Counter, None),
        (len, None),
    ],
)
def test_what_cannot_be_distinguished_is_refused_with_its_path(value, message):
    if message is None:
        assert spec_of(value) == spec_of(value)
        return
    with pytest.raises(InputError, match=f"^spec: .*{message}.*frozen dataclass"):
        spec_of(value)


def test_an_algorithm_is_refused_where_its_metric_cannot_be_distinguished():
    own_metric = glocal.Metric("own", per_example=Scaled(2.0).loss)
    with pytest.raises(InputError, match=r"^spec: task\.metrics\[0\].* is a Scaled"):
        assert task_of(metrics=[own_metric]).spec


def test_an_attribute_that_is_no_field_is_refused():
    value = Frozen(2.0)
    object.__setattr__(value, "more", 3)
    with pytest.raises(InputError, match=r"has \['more'\], which are no fields of the dataclass"):
        spec_of(value)


def test_what_a_value_has_worked_out_already_does_not_count():
    fresh, used = Remembering(2.0), Remembering(2.0)
    assert used.doubled == 4
    assert spec_of(used) == spec_of(fresh)
    trained = algorithm()
    before = spec_of(trained)
    assert trained.objective
    assert trained.split
    assert trained.spec == spec_of(trained) == before


# ---- in another process


SCRIPT = """
import json, sys
import torch
from torch import nn
import glocal
from glocal.core.spec import spec_of

def half(outputs, targets):
    known = {"one", "two", "three", "four"}
    return (outputs - targets).abs() / len(known) * (1 if "two" in {"one", "two", "five"} else 2)

task = glocal.Task(nn.Linear(6, 3), half, metrics=["accuracy", "mae"])
algorithm = glocal.LGFedAvg(task, optimizer=glocal.Adam(lr=0.1), local={"weight", "weight*"})
print(json.dumps([algorithm.spec, spec_of({"a", "b", "c", 1})]))
"""


def test_two_processes_have_the_same_spec(tmp_path):
    """Sets have another order in each: PYTHONHASHSEED differs."""
    (tmp_path / "script.py").write_text(SCRIPT)
    specs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(tmp_path / "script.py")]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120, env=environment
        )
        specs.append(json.loads(ended.stdout))
    assert specs[0] == specs[1]


# ---- what messages say


def test_the_first_difference_has_a_path_and_both_values():
    before, after = (algorithm(optimizer=glocal.SGD(lr=lr)).spec for lr in (0.25, 0.5))
    path, old, new = first_difference(before, after)
    assert path == "optimizer.lr"
    assert (describe_spec(old), describe_spec(new)) == ("0.25", "0.5")
    assert first_difference(before, before) is None


@pytest.mark.parametrize(
    ("before", "after", "path"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"a": 1, "b": 2}, {"a": 1}, "b"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a[1]"),
        ({"a": [1, 2]}, {"a": [1]}, "a"),
        (1, 2, ""),
    ],
)
def test_every_difference_is_found(before, after, path):
    assert first_difference(before, after)[0] == path


def test_the_kind_of_an_optimizer_is_described_by_its_name():
    before, after = (algorithm(optimizer=kind(lr=0.1)).spec for kind in (glocal.SGD, glocal.Adam))
    path, old, new = first_difference(before["optimizer"]["type"], after["optimizer"]["type"])
    assert (path, describe_spec(old), describe_spec(new)) == ("", "SGD", "Adam")
