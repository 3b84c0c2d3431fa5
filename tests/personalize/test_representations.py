"""Auxiliary models: private like everything local; each side trains on its own loss only."""

import json
import tomllib
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.func import grad

import glocal
from glocal.core import random, trees
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.files import read_rows, read_tensors
from glocal.core.modules import (
    GaussianNoise,
    feature_extractor,
    forward_with_features,
    params_of,
    training_forward,
)
from glocal.core.optimizers import SGD, Adam, PartitionedOptimizer
from glocal.core.task import classification
from glocal.core.training import Batch
from glocal.datasets import SOURCES, load_dataset
from glocal.datasets.fetch import no_progress
from glocal.personalize.representations import (
    Adversary,
    AuxiliaryOnly,
    Classifier,
    Decoder,
    Jigsaw,
    shuffle_tiles,
)
from glocal.personalize.representations.adversary import balanced_cross_entropy, scale_grad
from glocal.personalize.representations.jigsaw import nth_permutation
from glocal.report import write_report
from glocal.studies import run_study
from glocal.studies.build import build_components
from glocal.studies.run import StudyRun, initial_experiment
from glocal.studies.settings import from_dict
from tests.studies.saved import run_until, run_whole, saved_files
from tests.support import world
from tests.support.real_data import needs_data

WIDTH, ATTRIBUTES = 5, 2
PLAN = glocal.Plan(rounds=3, clients_per_round=3, batch_size=4)


def network():
    """An encoder whose output is the representation, and a head."""
    model = nn.Sequential()
    model.add_module(
        "encoder",
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.Tanh()),
    )
    model.add_module("noise_std", GaussianNoise(0.1))
    model.add_module("head", nn.Linear(WIDTH, world.CLASSES))
    return model


def critic():
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, ATTRIBUTES))


def against(weight):
    """An adversary of this weight."""
    return Adversary(world.seeded(critic), "encoder", weight)


def beside(kind, outputs):
    """An auxiliary model of one layer, with half of the weight."""
    return kind(world.seeded(lambda: nn.Linear(WIDTH, outputs)), "encoder", 0.5)


KINDS = {
    "decoder": lambda: beside(Decoder, 16),
    "jigsaw": lambda: beside(Jigsaw, 24),
    "adversary": lambda: against(2.0),
    "classifier": lambda: beside(Classifier, world.CLASSES),
}


def task_with(pretext=None):
    """Classification, with a pretext task beside it."""
    return replace(classification(world.seeded(network)), pretext=pretext)


def client_data():
    """Images 4 x 4 with two protected attributes."""
    generator = torch.Generator().manual_seed(3)
    fed = world.federation()
    rows = fed.train.examples.num_rows
    group = torch.randint(2, (rows, ATTRIBUTES), generator=generator)
    store = Examples(torch.randn(rows, 1, 4, 4, generator=generator), fed.train.examples.y, group)
    return replace(fed.train, examples=store)


def trained(kind, engine, optimizer=None):
    pretext = KINDS[kind]()
    optimizer = optimizer or SGD(0.1, momentum=0.5)
    algorithm = glocal.LGFedAvg(task_with(pretext), optimizer=optimizer, local="encoder")
    state, _ = world.last(world.simulate(algorithm, client_data(), PLAN, engine=engine))
    return state, pretext.params()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_an_auxiliary_model_is_ever_shared(kind):
    state, extra = trained(kind, "looped")
    assert {name for name in state.shared if name.startswith("head")} == {*state.shared}
    for row in state.private[0].stored.values():
        assert {*extra} <= {*row}
        assert world.distance(trees.pick(row, extra), extra) > 0, "it is trained"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1), PartitionedOptimizer(Adam(0.01), Adam(0.02), "adversary/", 2)],
    ids=["sgd", "partitioned"],
)
def test_all_engines_train_an_auxiliary_model_alike(kind, optimizer):
    one, other = (trained(kind, engine, optimizer)[0] for engine in ("looped", "vmapped"))
    assert world.gap(one, other) < 1e-5


def a_batch(rows=12):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 1, 4, 4, generator=generator), torch.arange(rows) % world.CLASSES
    group = torch.randint(2, (rows, ATTRIBUTES), generator=generator)
    mask = torch.arange(rows) < rows - 2
    return Batch(x, y, group, mask, torch.tensor(7))


def grads_of(loss, params, batch):
    return grad(lambda tree: loss(tree, batch)[0])(params)


@pytest.mark.parametrize("strength", [0.0, 2.0, 30.0])
def test_each_side_has_the_grads_of_its_own_loss(strength):
    """The encoder's loss is (classifier - strength * adversary) / (1 + strength)."""
    task, batch = task_with(against(strength)), a_batch()
    params = task.initial_params()
    grads = grads_of(task.objective.loss, params, batch)
    classifier = grads_of(task_with().objective.loss, params_of(task.model), batch)
    encode, attack = forward_with_features(task.model, "encoder"), training_forward(critic())

    def adversary_loss(tree):
        _, h, _ = encode(tree, batch.x, batch.mask, batch.key)
        logits, _ = attack(trees.under_prefix("adversary/", tree), h, batch.mask, batch.key)
        return balanced_cross_entropy(logits, batch.group, batch.mask)

    of_adversary = grad(adversary_loss)(params)
    for name, own_grad in grads.items():
        if name.startswith("head"):
            expected = classifier[name]
        elif name.startswith("adversary/"):
            expected = of_adversary[name]
        else:
            expected = (classifier[name] - strength * of_adversary[name]) / (1 + strength)
        assert torch.allclose(own_grad, expected, atol=1e-6), name


def test_the_adversarys_own_loss_has_no_grads_for_the_model():
    task, batch = task_with(against(3.0)), a_batch()
    grads = grads_of(task.pretext.loss(task.model), task.initial_params(), batch)
    largest = {name: float(tensor.abs().max()) for name, tensor in grads.items()}
    of_adversary = [size for name, size in largest.items() if name.startswith("adversary/")]
    of_model = [size for name, size in largest.items() if not name.startswith("adversary/")]
    assert max(of_model) == 0
    assert max(of_adversary) > 0


def test_a_strength_of_0_is_plain_classification():
    task, batch = task_with(against(0.0)), a_batch()
    whole = grads_of(task.objective.loss, task.initial_params(), batch)
    plain = grads_of(task_with().objective.loss, params_of(task.model), batch)
    assert world.distance(trees.pick(whole, plain), plain) < 1e-7


def test_either_value_of_an_attribute_has_half_of_the_weight():
    logits, rare = torch.zeros(10, 1), torch.tensor([1] + [0] * 9)[:, None]
    mask = torch.ones(10, dtype=torch.bool)
    assert balanced_cross_entropy(logits, rare, mask).item() == pytest.approx(0.6931, abs=1e-4)
    sure = torch.full((10, 1), -9.0)
    loss = balanced_cross_entropy(sure, rare, mask)
    assert loss > 4, "nine right zeros do not make up for the one that is missed"
    without_it = balanced_cross_entropy(sure, rare, mask & (rare[:, 0] == 0))
    assert without_it < 0.01, "a masked row has no weight"


def test_padded_rows_change_no_loss():
    batch, padded = a_batch(), a_batch()
    padded.x[~padded.mask] = 99.0
    for kind, make in KINDS.items():
        task = task_with(make())
        params = task.initial_params()
        loss, padded_loss = (task.objective.loss(params, each)[0] for each in (batch, padded))
        assert torch.equal(loss, padded_loss), kind


def test_pre_training_needs_no_labels_and_does_not_train_the_head():
    task, batch = task_with(AuxiliaryOnly(beside(Decoder, 16))), a_batch()
    algorithm = glocal.LGFedAvg(task, optimizer=SGD(0.1), local="encoder")
    state = algorithm.init(task.initial_params())
    objective = task.objective.only(state.private)
    assert objective.trainable == {*algorithm.split.local, *task.pretext.params()}
    params = task.initial_params()
    other = batch._replace(y=(batch.y + 1) % world.CLASSES)
    assert torch.equal(objective.loss(params, batch)[0], objective.loss(params, other)[0])


def test_tiles_are_shuffled_by_their_order_and_back():
    images = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    orders = torch.tensor([[1, 0, 3, 2], [3, 1, 2, 0]])
    mixed = shuffle_tiles(images, orders, 2)
    assert torch.equal(mixed[0, :, :2, :3], images[0, :, :2, 3:])
    assert torch.equal(mixed[1, :, :2, :3], images[1, :, 2:, 3:])
    again = shuffle_tiles(mixed, orders, 2)
    assert torch.equal(again, images), "both orders are their own inverses"
    with pytest.raises(InputError, match=r"images that 2 x 2 tiles fill"):
        shuffle_tiles(torch.zeros(2, 5, 5), orders, 2)


def test_orders_of_tiles_are_all_permutations_in_lexicographic_order():
    expected = [list(order) for order in permutations(range(4))]
    assert nth_permutation(torch.arange(24), 4).tolist() == expected


def test_the_representation_is_the_output_of_the_named_module():
    model = world.seeded(network).eval()
    x, mask = a_batch().x, torch.ones(12, dtype=torch.bool)
    features = feature_extractor(model, "encoder")(params_of(model), x, mask)
    assert torch.equal(features, model.encoder(x))
    with pytest.raises(InputError, match="did you mean 'encoder'"):
        feature_extractor(model, "encodr")


def test_noise_is_added_in_training_only_and_is_the_same_for_the_same_key():
    model, batch = world.seeded(network), a_batch()
    forward, params = training_forward(model), params_of(model)
    one, again, other = (
        forward(params, batch.x, batch.mask, key)[0]
        for key in (batch.key, batch.key, batch.key + 1)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    noise = random.normal(torch.tensor(3), (100, 100))
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03
    with pytest.raises(InputError, match="noise std is -1"):
        GaussianNoise(-1)


def test_scaling_the_grad_does_not_change_the_values():
    x = torch.tensor([1.0, -2.0])
    assert torch.equal(scale_grad(x, -3.0), x)
    assert torch.equal(grad(lambda t: scale_grad(t, -3.0).sum())(x), torch.tensor([-3.0, -3.0]))


def test_two_optimizers_take_turns():
    optimizer = PartitionedOptimizer(SGD(1.0), SGD(0.1), "a/", 2)
    params = {"w": torch.zeros(1), "a/w": torch.zeros(1)}
    grads = {"w": torch.ones(1), "a/w": torch.ones(1)}
    opt_state, steps = optimizer.init(params), []
    for _ in range(4):
        params, opt_state = optimizer.step(params, grads, opt_state, torch.tensor(0))
        steps.append((round(params["w"].item(), 3), round(params["a/w"].item(), 3)))
    assert steps == [(0, -0.1), (0, -0.2), (-1, -0.2), (-1, -0.3)]
    together = PartitionedOptimizer(SGD(1.0), SGD(0.1), "a/")
    params, _ = together.step(params, grads, together.init(params), torch.tensor(0))
    assert (params["w"].item(), round(params["a/w"].item(), 3)) == (-2, -0.4)


def test_an_optimizer_may_be_for_a_set_of_names():
    params = {name: torch.zeros(1) for name in ("w", "w2")}
    grads = {name: torch.ones(1) for name in params}
    optimizer = PartitionedOptimizer(SGD(1.0, momentum=0.5), SGD(0.1), frozenset({"w"}))
    params, opt_state = optimizer.step(params, grads, optimizer.init(params), torch.tensor(0))
    assert (round(params["w"].item(), 3), params["w2"].item()) == (-0.1, -1)
    assert opt_state.keys() == {"main/w2", "turn"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda: Adversary(critic(), layer="encoder", weight=-1),
            "adversary: the weight is -1",
        ),
        (
            lambda: Decoder(nn.Linear(5, 16), layer="encoder", weight=-1),
            "decoder: the weight is -1",
        ),
        (lambda: PartitionedOptimizer(SGD(1.0), SGD(1.0), "a/", -1), "other_steps is -1"),
    ],
)
def test_an_invalid_setting_is_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        wrong()


def test_an_adversary_needs_attributes():
    task = task_with(against(1.0))
    with pytest.raises(InputError, match="no protected attributes"):
        task.objective.loss(task.initial_params(), a_batch()._replace(group=None))


def test_an_adversary_is_not_trained_on_augmented_data():
    task = replace(task_with(against(1.0)), augment=lambda x, key: x)
    with pytest.raises(InputError, match="without augmentation; leave the augmentation out"):
        assert task.objective


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_not_resumed_with_another_pretext_task(kind):
    """Its network, its layer and its weight are part of the algorithm's spec."""
    pretext = KINDS[kind]()
    specs = []
    for other in (
        pretext,
        KINDS[kind](),
        replace(pretext, weight=7.0),
        replace(pretext, layer="head"),
        replace(pretext, network=nn.Sequential(pretext.network, nn.ReLU())),
    ):
        algorithm = glocal.FedAvg(task_with(other), optimizer=SGD(0.1))
        specs.append(json.dumps(algorithm.spec, sort_keys=True))
    assert specs[0] == specs[1]
    assert len({*specs}) == 4


@needs_data("adult")
def test_adult_has_the_papers_93_columns_without_race_and_sex():
    train, test, classes, _ = load_dataset("adult")
    assert (tuple(train.x.shape), tuple(test.x.shape), classes) == ((15_470, 93), (15_470, 93), 2)
    assert [round(float(part.y.float().mean()), 4) for part in (train, test)] == [0.2425, 0.2425]
    assert [*SOURCES["adult"].attributes] == ["race", "sex"]
    assert train.group.float().mean(0).tolist() == pytest.approx([0.898, 0.675], abs=2e-3)
    assert train.x.mean(0).abs().max() < 1e-4
    constant = train.x.std(0) == 0  # a country that no row of this half has
    assert torch.allclose(train.x.std(0)[~constant], torch.ones(int((~constant).sum())), atol=1e-3)


# in a study


def census():
    """People on six clients: one input has the label, one has an attribute, three have nothing."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(6):
        x = torch.randn(60, 5, generator=generator)
        group = torch.randint(2, (60, 2), generator=generator)
        x[:, 1] += 3 * group[:, 0]
        clients.append((x, (x[:, 0] > 0).long(), group))
    return clients


STUDY = """
[data]
source = "{source}"
clients = 6
validation = 0.1
[model]
name = "bottleneck_mlp"
hidden = [16]
bottleneck = 4
noise_std = 0.05
[split]
local = ["encoder"]
[plan]
rounds = 4
clients_per_round = 3
seeds = 2
batch_size = 50
[run]
engine = "looped"
validate_every = 2
[experiments.Plain]
algorithm = "lg_fedavg"
[experiments.Pretext]
algorithm = "lg_fedavg"
pretext = {{kind = "{kind}", layer = "encoder", weight = 2, hidden = [8]{more}}}
[experiments.After]
algorithm = "lg_fedavg"
start_from = "Plain"
pretext = {{kind = "{kind}", layer = "encoder", weight = 2, hidden = [8]}}
[experiments.Shared]
algorithm = "fedavg"
pretext = {{kind = "{kind}", layer = "encoder", weight = 2, hidden = [8]}}
"""
SOURCES_OF = {
    "decoder": "digits",
    "jigsaw": "digits",
    "classifier": "digits",
    "adversary": "tests.personalize.test_representations:census",
}


def run_settings(folder, kind, more="", **run):
    text = STUDY.format(source=SOURCES_OF[kind], kind=kind, more=more)
    settings = from_dict(tomllib.loads(text))
    for _ in run_study(replace(settings, run=replace(settings.run, **run)), folder):
        pass
    return settings


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_has_auxiliary_models_that_stay_private(kind, tmp_path):
    more = ", lr = 0.02, steps_per_update = 1" if kind == "adversary" else ""
    run_settings(tmp_path, kind, more)
    folders = {name: tmp_path / "experiments" / name for name in ("pretext", "after", "shared")}
    for experiment in ("pretext", "after"):
        shared, _ = read_tensors(folders[experiment] / "checkpoint.safetensors")
        assert not [name for name in shared if f"{kind}/" in name]
        private, _ = read_tensors(folders[experiment] / "checkpoint" / "000000.safetensors")
        assert [name for name in private if name.startswith(f"private 0:{kind}/")]
    tensors, _ = read_tensors(folders["shared"] / "checkpoint.safetensors")
    of_kind = [name for name in tensors if f":shared:{kind}/" in name]
    assert of_kind, "FedAvg shares everything, the paper's global adversary too"
    saved, _ = read_tensors(next((folders["pretext"] / "models" / "seed-0").iterdir()))
    of_kind = [name for name in saved if name.startswith(kind)]
    assert not of_kind, "a client's own model is the model alone"


def test_an_auxiliary_model_is_never_counted_as_sent(tmp_path):
    run_settings(tmp_path, "decoder")
    ledgers = [
        json.loads((tmp_path / "experiments" / experiment / "result.json").read_text())[0]["ledger"]
        for experiment in ("plain", "pretext")
    ]
    assert ledgers[0] == ledgers[1]


def test_a_pretext_task_changes_the_loss_and_its_weights_differ_between_seeds(tmp_path):
    settings = run_settings(tmp_path, "decoder")
    rows = [
        read_rows(tmp_path / "experiments" / experiment / "rows.jsonl")
        for experiment in ("plain", "pretext")
    ]
    assert rows[0][0]["loss"] < rows[1][0]["loss"], "a reconstruction has an error"
    study = StudyRun(settings, build_components(settings, no_progress), tmp_path)
    group = initial_experiment(study, "Pretext").groups[0]
    starts = [group.initial_params(place)["decoder/layer1.weight"] for place in (0, 1)]
    assert not torch.equal(*starts)


def test_a_study_with_auxiliary_models_resumes_to_the_same_bits(tmp_path):
    settings = run_settings(tmp_path / "whole", "jigsaw")
    run_until(settings, tmp_path / "parts", "Pretext", 2)
    run_whole(settings, tmp_path / "parts")
    assert saved_files(tmp_path / "parts") == saved_files(tmp_path / "whole")


WRONG_PRETEXTS = {
    "kind": ("decoder", {"kind": "decodr"}, "did you mean 'decoder'"),
    "place": ("decoder", {"layer": "encodr"}, "there is no module 'encodr'"),
    "weight": ("decoder", {"weight": -1.0}, "weight is -1"),
    "no groups": ("decoder", {"kind": "adversary"}, "these data have none"),
    "steps_per_update": ("adversary", {"steps_per_update": -1}, "steps_per_update is -1"),
    "tiles": ("adversary", {"kind": "jigsaw"}, "images that 2 x 2 tiles fill"),
}


@pytest.mark.parametrize(("kind", "change", "words"), WRONG_PRETEXTS.values(), ids=WRONG_PRETEXTS)
def test_an_invalid_pretext_task_is_refused_before_anything_is_written(
    kind, change, words, tmp_path
):
    settings = from_dict(tomllib.loads(STUDY.format(source=SOURCES_OF[kind], kind=kind, more="")))
    experiment = settings.experiments["Pretext"]

    def begin():
        odd = replace(experiment, pretext=replace(experiment.pretext, **change))
        wrong = replace(
            settings, experiments={"Plain": settings.experiments["Plain"], "Pretext": odd}
        )
        list(run_study(wrong, tmp_path / "run"))

    with pytest.raises(InputError, match=words):
        begin()
    assert not (tmp_path / "run").exists()


def test_an_experiment_with_a_pretext_task_has_no_other_lr_for_its_local_part(tmp_path):
    settings = from_dict(
        tomllib.loads(STUDY.format(source=SOURCES_OF["decoder"], kind="decoder", more=""))
    )
    experiment = replace(settings.experiments["Pretext"], local_lr=0.1)
    with pytest.raises(InputError, match="`local_lr` and `pretext`; use one of the two"):
        list(run_study(replace(settings, experiments={"Pretext": experiment}), tmp_path / "run"))


def test_a_study_is_audited_when_its_experiments_are_done(tmp_path):
    text = (
        STUDY.format(source=SOURCES_OF["adversary"], kind="adversary", more="")
        + '[audit]\nlayer = "encoder"\nencoders = 1\n'
    )
    settings = from_dict(tomllib.loads(text), ["plan.seeds=1", "plan.rounds=2"])
    settings = replace(
        settings,
        experiments={name: settings.experiments[name] for name in ("Plain", "Pretext", "Shared")},
    )
    for _ in run_study(settings, tmp_path):
        pass
    for experiment, joint in (("plain", False), ("pretext", True), ("shared", True)):
        for result in json.loads(
            (tmp_path / "experiments" / experiment / "result.json").read_text()
        ):
            audit = result["audit"]
            assert all(0 <= of["auc"] <= 1 for of in (audit, audit["validation"]))
            assert 0.3 < audit["validation"]["leak"] <= 1
            assert len(audit["attributes"]) == ATTRIBUTES
            for attribute in audit["attributes"]:
                assert {*attribute} == {"own", "pooled", "strong", "joint", "validation"}
                assert (attribute["joint"] is not None) == joint
                assert 0.3 < attribute["pooled"] <= 1
    page = write_report(tmp_path).read_text()
    assert "What representations reveal" in page
    assert "attribute 1" in page


def test_an_untrained_encoder_leaks_what_its_inputs_do(tmp_path):
    """The second input has the first attribute; no input has the second attribute."""
    text = (
        STUDY.format(source=SOURCES_OF["adversary"], kind="adversary", more="")
        + '[audit]\nlayer = "encoder"\n'
    )
    settings = from_dict(tomllib.loads(text))
    settings = replace(
        settings,
        plan=replace(settings.plan, rounds=1, seeds=1),
        experiments={"Plain": settings.experiments["Plain"]},
    )
    for _ in run_study(settings, tmp_path):
        pass
    [result] = json.loads((tmp_path / "experiments" / "plain" / "result.json").read_text())
    visible, hidden = (each["pooled"] for each in result["audit"]["attributes"])
    assert visible > 0.75
    assert hidden < 0.7


def test_an_audit_needs_attributes_and_a_representation(tmp_path):
    text = STUDY.format(source="digits", kind="decoder", more="") + '[audit]\nlayer = "encoder"\n'
    with pytest.raises(InputError, match="these data have no protected attributes"):
        list(run_study(from_dict(tomllib.loads(text)), tmp_path / "run"))
    text = (
        STUDY.format(source=SOURCES_OF["adversary"], kind="adversary", more="")
        + '[audit]\nlayer = "coder"\n'
    )
    with pytest.raises(InputError, match="there is no module 'coder'"):
        list(run_study(from_dict(tomllib.loads(text)), tmp_path / "run"))
    assert not (tmp_path / "run").exists()
