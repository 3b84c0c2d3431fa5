"""The compiled step trains as the general path does, or declines with a reason."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from glocal.core import random, trees
from glocal.core.data import Examples
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, Adam
from glocal.core.task import Task, classification
from glocal.core.training import Proximal, Work, local_train, with_augmentation
from glocal.datasets import crop_and_flip
from glocal.engines.fused import compiler
from glocal.engines.fused.compiler import NoFusedStepError, load_step
from glocal.engines.fused.cpu import FusedCpuTraining, merge_proximal

CLASSES = 5
MANY = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def fused(tmp_path_factory):
    """Compiled once for all workers of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOCAL_CACHE", str(tmp_path_factory.getbasetemp().parent / "cache"))
        try:
            return FusedCpuTraining()
        except NoFusedStepError as error:
            pytest.skip(str(error))


def work_of(shape, order, *, seed=0, round_index=0):
    """Random examples of a shape, and an order over them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, *shape, generator=generator)
    y = torch.randint(CLASSES, (30,), generator=generator)
    order = torch.as_tensor(order)
    order = order[None] if order.dim() == 2 else order
    return Work.of(Examples(x, y, None), order, torch.tensor(seed), torch.tensor(round_index))


def cross_entropy(model):
    return classification(model).objective


def random_order(steps, batch, *, seed, padding=0.0):
    """Rows of a store of 30; some of them are padding, and some steps are only padding."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(30, (steps, batch), generator=generator)
    order[torch.rand(steps, batch, generator=generator) < padding] = -1
    order[torch.rand(steps, generator=generator) < padding] = -1
    return order


def doubled(tree):
    return {name: tensor.double() for name, tensor in tree.items()}


def in_double(objective, params, work, optimizer):
    """The general path in float64: the reference for steps in float32."""
    examples = work.examples.with_dtype(torch.float64)
    proximal = tuple(Proximal(doubled(anchor), strength) for anchor, strength in objective.proximal)
    return local_train(
        objective._replace(proximal=proximal),
        doubled(params),
        work._replace(examples=examples),
        optimizer,
    )


def assert_agrees(fused, objective, params, work, optimizer):
    before = {name: tensor.clone() for name, tensor in params.items()}
    result = fused(objective, params, work, optimizer)
    assert result is not None, fused.reason
    expected = in_double(objective, params, work, optimizer)
    assert list(result.params) == list(params)
    assert trees.same_bits(params, before)
    for name, tensor in result.params.items():
        scale = expected.params[name].abs().max().clamp(min=0.1)
        assert tensor.dtype == torch.float32
        assert float((tensor - expected.params[name]).abs().max() / scale) < 1e-5, name
    ours, truth = result.loss.mean.double(), expected.loss.mean.double()
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)
    assert result.loss.weight == expected.loss.weight


def mlp(*widths, bias=True):
    layers = [
        layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m, bias=bias), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


rules = st.builds(
    SGD,
    st.sampled_from([0.05, 0.2]),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01]),
    lr_decay=st.sampled_from([0.0, 0.5]),
)


@MANY
@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    batch=st.integers(1, 12) | st.sampled_from([16, 20, 27, 32]),
    steps=st.integers(1, 5),
    epochs=st.integers(1, 2),
    padding=st.sampled_from([0.0, 0.0, 0.3, 0.9]),
    rule=rules,
    bias=st.booleans(),
    round_index=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_linear_chains_agree_with_the_general_path(
    fused, widths, batch, steps, epochs, padding, rule, bias, round_index, seed
):
    torch.manual_seed(seed)
    model = mlp(*widths, CLASSES, bias=bias)
    order = torch.stack(
        [random_order(steps, batch, seed=seed + epoch, padding=padding) for epoch in range(epochs)]
    )
    work = work_of((widths[0],), order, seed=seed, round_index=round_index)
    assert_agrees(fused, cross_entropy(model), params_of(model), work, rule)


@st.composite
def conv_layers(draw):
    """A convolution, and the ReLU and max-pool that may follow it."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    after = draw(st.sampled_from([[], ["relu"], ["pool"], ["relu", "pool"]]))
    return {
        "outputs": draw(st.sampled_from([1, 2, 3, 5, 6, 16, 19, 33])),
        "kernel": kernel,
        "stride": draw(st.sampled_from([(1, 1), stride])),
        "padding": draw(st.sampled_from([(0, 0), (kernel[0] // 2, kernel[1] // 2)])),
        "after": draw(st.permutations(after)),
        "side": draw(st.integers(1, 4)),
        "bias": draw(st.booleans()),
    }


def conv_net(shape, convs, hidden):
    """The convolutions that fit, then linear layers; inputs are (channels, height, width)."""
    layers, image = [], torch.zeros(1, *shape)
    for conv in convs:
        block = conv_block(image.shape[1], **conv)
        try:
            image = nn.Sequential(*block)(image).detach()
        except RuntimeError:  # torch refuses an image that shrinks to nothing
            break
        layers += block
    return nn.Sequential(*layers, nn.Flatten(), mlp(image.numel(), *hidden, CLASSES))


def conv_block(channels, *, outputs, kernel, stride, padding, after, side, bias):
    block = [nn.Conv2d(channels, outputs, kernel, stride, padding, bias=bias)]
    for kind in after:
        block.append(nn.ReLU() if kind == "relu" else nn.MaxPool2d(side))
    return block


@MANY
@given(
    shape=st.tuples(st.sampled_from([1, 2, 3, 7]), st.integers(5, 15), st.integers(5, 15)),
    convs=st.lists(conv_layers(), min_size=1, max_size=3),
    hidden=st.lists(st.integers(1, 20), max_size=1),
    batch=st.integers(1, 12),
    rule=rules,
    seed=st.integers(0, 2**20),
)
def test_convolutional_chains_agree_with_the_general_path(
    fused, shape, convs, hidden, batch, rule, seed
):
    torch.manual_seed(seed)
    model = conv_net(shape, convs, hidden)
    # one step: where two outputs of a pool window are nearly equal, two correct paths diverge
    work = work_of(shape, random_order(1, batch, seed=seed), seed=seed)
    assert_agrees(fused, cross_entropy(model), params_of(model), work, rule)


def lenet():
    features = [
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*features, mlp(400, 120, 100, CLASSES))


def test_a_few_steps_of_lenet_agree_with_the_general_path(fused):
    torch.manual_seed(0)
    model = lenet()
    work = work_of((3, 32, 32), random_order(3, 25, seed=1, padding=0.2))
    assert_agrees(fused, cross_entropy(model), params_of(model), work, SGD(0.1, momentum=0.5))


def brightened(x, key):
    """Inner pixels only, each image brighter by its own random number."""
    return x[:, :, 1:-1, 1:-1] + random.uniform(key, (x.shape[0], 1, 1, 1))


@pytest.mark.parametrize("augment", [crop_and_flip(2), brightened])
def test_augmented_examples_agree_with_the_general_path(fused, augment):
    torch.manual_seed(0)
    side = augment(torch.zeros(1, 2, 6, 6), torch.tensor(0)).shape[-1]
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * (side - 2) ** 2, CLASSES)
    )
    work = work_of((2, 6, 6), random_order(3, 5, seed=1, padding=0.3), seed=11)
    assert_agrees(
        fused,
        with_augmentation(cross_entropy(model), augment),
        params_of(model),
        work,
        SGD(0.1, momentum=0.5),
    )


def test_the_first_of_equal_values_in_a_window_gets_the_gradient_as_in_torch(fused):
    """On the background of a drawing all outputs of a window are equal."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(4, 16, 2),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    model = nn.Sequential(*model, nn.Linear(64, CLASSES))
    work = work_of((1, 12, 12), random_order(1, 8, seed=0))
    work.examples.x[:] = torch.where(work.examples.x > 1.5, work.examples.x, 0)
    assert_agrees(fused, cross_entropy(model), params_of(model), work, SGD(0.1))


@MANY
@given(
    strengths=st.lists(st.sampled_from([0.0, 0.1, 2.0]), min_size=1, max_size=3),
    momentum=st.sampled_from([0.0, 0.9]),
)
def test_proximal_terms_are_part_of_gradients_and_loss(fused, strengths, momentum):
    torch.manual_seed(0)
    for model, shape in (
        (mlp(9, 12, 7, CLASSES), (9,)),
        (conv_net((2, 8, 8), [PLAIN], [6]), (2, 8, 8)),
    ):
        objective, params = cross_entropy(model), params_of(model)
        for strength in strengths:
            anchor = {
                name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in params.items()
            }
            objective = objective.near(anchor, strength)
        objective = objective.near({"0.weight": params["0.weight"] + 0.3}, 0.5)
        assert_agrees(
            fused,
            objective,
            params,
            work_of(shape, random_order(2, 7, seed=0)),
            SGD(0.1, momentum=momentum),
        )


PLAIN = {
    "outputs": 4,
    "kernel": (3, 3),
    "stride": (1, 1),
    "padding": (0, 0),
    "after": ["relu", "pool"],
    "side": 2,
    "bias": True,
}


def test_several_proximal_terms_are_one_term_and_a_constant():
    w, *anchors = torch.randn(4, 6, dtype=torch.float64)
    proximal = [
        Proximal({"w": anchor}, strength)
        for anchor, strength in zip(anchors, (0.5, 1.0, 0.25), strict=True)
    ]
    strengths, mean, floor = merge_proximal(proximal)
    separate = sum(strength / 2 * (w - anchor["w"]).square().sum() for anchor, strength in proximal)
    merged = strengths["w"] / 2 * (w - mean["w"]).square().sum() + floor
    torch.testing.assert_close(merged, separate, rtol=1e-6, atol=1e-6)


def test_work_that_is_all_padding_changes_nothing(fused):
    model = mlp(4, 3, CLASSES)
    params = params_of(model)
    padding = work_of((4,), torch.full((2, 3), -1))
    trained = fused(cross_entropy(model), params, padding, SGD(0.1, momentum=0.9))
    assert trees.same_bits(trained.params, params)
    assert trained.loss.total == trained.loss.weight == trained.loss.mean == 0
    assert all(trained.params[name].data_ptr() != params[name].data_ptr() for name in params)


@pytest.mark.parametrize(
    "model",
    [mlp(30, 50, 20, CLASSES), conv_net((3, 16, 16), [PLAIN, PLAIN], [10])],
    ids=["mlp", "conv"],
)
def test_the_same_bits_run_after_run_and_from_several_threads(fused, model):
    shape = (30,) if isinstance(model[0], nn.Linear) else (3, 16, 16)
    objective, params = cross_entropy(model), params_of(model)
    works = [
        work_of(shape, random_order(8, 12, seed=seed, padding=0.1), seed=seed) for seed in range(6)
    ]

    def run(work):
        return fused(objective, params, work, SGD(0.1, momentum=0.5))

    sequential = [run(work) for work in works]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(run, works * 3))
    for one, other in zip(sequential * 3, parallel, strict=True):
        assert trees.same_bits(one.params, other.params)
        assert one.loss == other.loss


@pytest.mark.parametrize(
    "model", [mlp(6, 7, CLASSES), conv_net((2, 6, 6), [PLAIN], [])], ids=["mlp", "conv"]
)
def test_a_diverged_loss_is_not_finite(fused, model):
    shape = (6,) if isinstance(model[0], nn.Linear) else (2, 6, 6)
    work = work_of(shape, random_order(6, 5, seed=0))
    huge = fused(cross_entropy(model), params_of(model), work, SGD(1e30))
    work.examples.x[:] = torch.nan
    lost = fused(cross_entropy(model), params_of(model), work, SGD(0.1))
    assert not torch.isfinite(huge.loss.mean)
    assert not torch.isfinite(lost.loss.mean)


def test_local_train_uses_the_trainer_of_the_work(fused):
    model = mlp(4, 6, CLASSES)
    work = work_of((4,), random_order(3, 5, seed=0))
    objective, params, rule = cross_entropy(model), params_of(model), SGD(0.1)
    trained = local_train(objective, params, work._replace(trainer=fused), rule)
    expected = fused(objective, params, work, rule)
    assert trees.same_bits(trained.params, expected.params)
    assert trained.loss == expected.loss


LINEAR = mlp(4, 6, CLASSES)
NORMED = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES))
FROZEN = mlp(4, 6, CLASSES)
FROZEN[0].weight.requires_grad_(False)


def declined_setup(objective=None, *, model=LINEAR, rule=None, tree=None, **examples):
    work = work_of((4,), random_order(2, 3, seed=0))
    order = examples.pop("order", work.order)
    params = params_of(model) if tree is None else tree(params_of(model))
    work = work._replace(examples=work.examples._replace(**examples), order=order)
    return objective or cross_entropy(model), params, work, rule or SGD(0.1)


X, Y = work_of((4,), [[0]]).examples[:2]
DECLINED = {
    "the optimiser is Adam, not SGD": declined_setup(rule=Adam(0.1)),
    "the loss is AugmentedLoss, not a ModelLoss": declined_setup(
        with_augmentation(
            with_augmentation(cross_entropy(LINEAR), lambda x, key: x), lambda x, key: x
        )
    ),
    "the loss is not the cross entropy": declined_setup(
        Task(LINEAR, lambda outputs, y: outputs.square().sum(1)).objective
    ),
    "the model is called by a function of its own": declined_setup(
        classification(LINEAR, forward=lambda model, x: model(x)).objective
    ),
    "the targets are (2,) int64, not one class per example": declined_setup(
        y=torch.stack([Y, Y], 1)
    ),
    "the inputs or targets are not one tensor": declined_setup(x={"a": X}),
    "the objective has a linear term": declined_setup(
        cross_entropy(LINEAR).plus_linear(params_of(LINEAR))
    ),
    "layer '1' is BatchNorm1d on (6,)": declined_setup(model=NORMED),
    "some of its weights are frozen": declined_setup(model=FROZEN),
    "it ends in a softmax": declined_setup(
        model=nn.Sequential(*mlp(4, 6, CLASSES), nn.Softmax(dim=1))
    ),
    "layer '1' is Softmax on (6,)": declined_setup(
        model=nn.Sequential(nn.Linear(4, 6), nn.Softmax(1), nn.Linear(6, CLASSES))
    ),
    "not every weight of the model is trained": declined_setup(
        cross_entropy(LINEAR).only({"0.weight"})
    ),
    "'0.weight' is torch.float64 on cpu, not torch.float32 on cpu": declined_setup(tree=doubled),
    "'x' is torch.float64 on cpu, not torch.float32 on cpu": declined_setup(x=X.double()),
    "the targets are () int32, not one class per example": declined_setup(y=Y.int()),
    "the examples are not contiguous": declined_setup(x=X.t().contiguous().t()),
    "there is no batch": declined_setup(order=torch.zeros(1, 0, 3, dtype=torch.int64)),
    "a row of the order is outside the examples": declined_setup(order=torch.tensor([[[0, 30]]])),
    "a label is no class of the model": declined_setup(y=Y - 100),
    "'0.weight' requires a gradient": declined_setup(
        tree=lambda tree: {n: t.requires_grad_() for n, t in tree.items()}
    ),
    "a proximal term has a negative strength": declined_setup(
        cross_entropy(LINEAR).near(params_of(LINEAR), -1.0)
    ),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_unsupported_work_is_declined_with_a_reason(fused, reason):
    assert fused(*DECLINED[reason]) is None
    assert fused.reason == reason


def test_batched_clients_are_declined(fused):
    work, objective = work_of((4,), random_order(2, 3, seed=0)), cross_entropy(LINEAR)

    def one(params):
        assert fused(objective, params, work, SGD(0.1)) is None
        return params["0.bias"]

    torch.vmap(one)(trees.stack([params_of(LINEAR)] * 2))
    assert fused.reason == "clients are batched"


def test_the_step_is_compiled_once_for_the_same_source_and_headers(fused, monkeypatch, tmp_path):
    command = compiler._find_compiler()
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "SOURCE", tmp_path / "step.cpp")
    step = '#include "status.h"\nextern "C" int glocal_train(void *) { return STATUS; }\n'
    (tmp_path / "step.cpp").write_text(step)
    (tmp_path / "status.h").write_text("#define STATUS 0\n")
    library = compiler.compile_library(command)
    modified = library.stat().st_mtime_ns
    assert compiler.compile_library(command) == library
    assert library.stat().st_mtime_ns == modified
    (tmp_path / "status.h").write_text("#define STATUS 1\n")
    with_another_header = compiler.compile_library(command)
    (tmp_path / "step.cpp").write_text(step + "int other;\n")
    assert len({library, with_another_header, compiler.compile_library(command)}) == 3
    assert {path.suffix for path in library.parent.iterdir()} == {".so"}


def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NoFusedStepError,
        match=r"^there is no C\+\+ compiler \(looked for c\+\+, g\+\+, clang\+\+; CXX may name "
        r"another\)$",
    ):
        load_step()


def test_a_compiler_that_fails_is_quoted_in_one_line(fused, monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "SOURCE", tmp_path / "step.cpp")
    (tmp_path / "step.cpp").write_text("this is no C++\n")
    with pytest.raises(
        NoFusedStepError, match=r"could not compile the C\+\+ step \(.*error.*\)$"
    ) as caught:
        load_step()
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoFusedStepError, match="looked for no-such-compiler"):
        load_step()


def test_a_cache_that_cannot_be_written_is_named(fused, monkeypatch, tmp_path):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(NoFusedStepError, match=r"could not be compiled \(.*occupied"):
        load_step()
