"""A client whose upload or loss is not finite does not count, and the round goes on without it."""

from dataclasses import replace

import pytest
import torch

import glocal
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.sampling import Availability, Plan, client_key
from glocal.core.training import WeightedSum
from glocal.federate.rounds import build_executors, masked_step, run_round
from glocal.wire import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    TrimmedMean,
)
from tests.support import world

pytestmark = pytest.mark.quick

EVERYBODY = tuple(range(world.NUM_CLIENTS))
PLAN = Plan(1, world.NUM_CLIENTS, batch_size=5)
AGGREGATIONS = [
    Mean(),
    Mean(by="clients"),
    Mean(max_weight=5),
    Median(),
    TrimmedMean(1),
    TrimmedMean(0.2),
    Krum(1),
    MultiKrum(1),
    GeometricMedian(),
    CentredClipping(0.1),
]
by_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)


def breaking(kind, keys, value, where):
    """An algorithm whose clients with these keys break, in one number of their upload or loss."""

    class Breaking(kind):
        def client_update(self, message, private, work):
            update = super().client_update(message, private, work)
            is_broken = (keys == work.key).any()
            if where == "loss":
                loss = update.metrics["loss"]
                total = torch.where(is_broken, value, loss.total)
                return update._replace(metrics={"loss": WeightedSum(total, loss.weight)})
            first, *_ = update.upload
            tensor = update.upload[first]
            is_first = torch.arange(tensor.numel()).reshape(tensor.shape) == 0
            tensor = torch.where(is_broken & is_first, value, tensor)
            return update._replace(upload={**update.upload, first: tensor})

    return Breaking


def model():
    return world.seeded(world.with_batch_norm).double()


def double_data():
    data = world.federation().train
    return replace(data, examples=data.examples.with_dtype(torch.float64))


def keys_of(clients):
    return torch.tensor([client_key(PLAN, 0, client) for client in clients])


def one_round(
    kind=glocal.LGFedAvg,
    *,
    aggregation=None,
    broken=(),
    value=torch.nan,
    where="upload",
    present=EVERYBODY,
    uplink=None,
    **settings,
):
    """The state before a round, the state after it, and its report, in float64."""
    task = glocal.classification(model())
    if broken:
        kind = breaking(kind, keys_of(broken), value, where)
    if issubclass(kind, glocal.LGFedAvg):
        settings["local"] = "0"
    algorithm = kind(
        task, optimizer=glocal.SGD(lr=0.1), aggregation=aggregation or Mean(), **settings
    )
    availability = Availability.of(present)
    replica, before = world.set_up(
        algorithm, double_data(), PLAN, uplink=uplink, availability=availability
    )
    executors = build_executors(replica.groups, "looped", num_calls=1)
    [(after, report)] = run_round([replica], [before], executors, 0)
    return before, after, report


@by_aggregation
@pytest.mark.parametrize("where", ["upload", "loss"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_others_count_as_if_it_had_not_replied(aggregation, where, value):
    before, after, report = one_round(aggregation=aggregation, broken=[2], value=value, where=where)
    present = [client for client in EVERYBODY if client != 2]
    _, without, alone = one_round(aggregation=aggregation, present=present)
    assert world.distance(after.shared, without.shared) < 1e-12
    assert report.dropped == [2]
    assert report.counted.tolist() == [client != 2 for client in EVERYBODY]
    assert alone.dropped == []
    for client in present:
        assert trees.same_bits(after.private[0].of(client), without.private[0].of(client))
    assert trees.same_bits(after.private[0].of(2), before.private[0].of(2))
    assert 2 not in after.private[0].stored


def test_several_are_dropped_and_named_and_the_mean_loss_is_that_of_the_others():
    _, _, report = one_round(broken=[0, 4], where="loss")
    _, _, alone = one_round(present=[1, 2, 3, 5])
    assert report.dropped == [0, 4]
    assert report.mean_loss(range(6)) == pytest.approx(alone.mean_loss(range(6)))
    assert report.mean_loss(range(1)) is None


@by_aggregation
def test_where_everybody_is_dropped_nothing_changes(aggregation):
    before, after, report = one_round(aggregation=aggregation, broken=EVERYBODY)
    assert world.same_bits(before, after)
    assert report.dropped == list(EVERYBODY)
    assert report.mean_loss(range(6)) is None


def test_too_few_that_are_left_for_an_aggregation_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"^aggregation: krum\(2\) needs .* and there are 4; .*"):
        one_round(aggregation=Krum(2), broken=[0, 4])


class Listening:
    """A callback that collects the records of all rounds."""

    def __init__(self):
        self.records = []

    def on_round(self, run, records):
        self.records += records


@by_aggregation
def test_a_run_names_and_counts_whom_it_dropped(aggregation):
    """The client with the number 2 breaks in the first of two rounds."""
    kind = breaking(glocal.FedAvg, keys_of([2]), torch.nan, "upload")
    task, listening = glocal.classification(world.seeded(world.plain)), Listening()
    result = glocal.fit(
        kind(task, optimizer=glocal.SGD(lr=0.1), aggregation=aggregation),
        world.federation(),
        rounds=2,
        clients_per_round=world.NUM_CLIENTS,
        batch_size=5,
        callbacks=[listening],
        progress=False,
    )
    assert [record.dropped for record in listening.records] == [("2",), ()]
    assert result.groups[0].times_dropped == [0, 0, 1, 0, 0, 0]
    assert result.groups[0].times_sampled == [2] * world.NUM_CLIENTS


class Scaled(torch.nn.Module):
    """A model with a parameter of one number, which has no axis."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.body = world.plain()

    def forward(self, x):
        return self.body(x) * self.scale


@by_aggregation
def test_a_client_is_dropped_for_a_parameter_of_one_number_too(aggregation):
    kind = breaking(glocal.FedAvg, keys_of([2]), torch.nan, "upload")
    task = glocal.classification(world.seeded(Scaled))
    algorithm = kind(task, optimizer=glocal.SGD(lr=0.1), aggregation=aggregation)
    assert algorithm.task.initial_params()["scale"].shape == ()
    [(state, report)] = world.simulate(algorithm, world.federation().train, PLAN, engine="looped")
    assert report.dropped == [2]
    assert all(bool(tensor.isfinite().all()) for tensor in state.shared.values())


def test_what_a_codec_remembers_stays_too():
    before, after, report = one_round(broken=[1], uplink=glocal.TopK(0.3))
    assert report.dropped == [1]
    assert any(name.startswith("codec/") for name in before.private[0].initial)
    assert trees.same_bits(after.private[0].of(1), before.private[0].of(1))
    assert not trees.same_bits(after.private[0].of(2), before.private[0].of(2))


def test_whoever_was_dropped_was_sent_something_and_sent_something():
    _, _, report = one_round(broken=[2])
    _, _, whole = one_round()
    assert report.traffic == whole.traffic


class Counting(glocal.FedAvg):
    """The server remembers how often each client counted."""

    def init(self, params):
        return super().init(params)._replace(profile={"times": torch.zeros(())})

    def remember(self, shared, profile, sent, upload):
        return {"times": profile["times"] + 1}


def test_the_profile_of_whoever_was_dropped_stays():
    _, after, _ = one_round(Counting, broken=[3])
    times = [after.profiles[0].of(client)["times"].item() for client in EVERYBODY]
    assert times == [float(client != 3) for client in EVERYBODY]


@pytest.mark.parametrize("name", world.NAMES)
def test_every_algorithm_goes_on_without_a_client_that_broke(name):
    kind = type(world.algorithm(name, world.seeded(world.plain)))
    before, after, report = one_round(kind, broken=[2], where="loss")
    assert report.dropped == [2]
    for tree in (after.shared, *(after.private[0].of(client) for client in EVERYBODY)):
        assert all(bool(tensor.isfinite().all()) for tensor in tree.values())
    assert trees.same_bits(after.private[0].of(2), before.private[0].of(2))


def before_the_last_round(algorithm, monkeypatch, rounds=2):
    """The state before the last of some rounds, and what the server receives in it."""
    received, kind = [], type(algorithm)
    original = kind.server_update

    def server_update(own, shared, server, uploads):
        received.append(uploads)
        return original(own, shared, server, uploads)

    monkeypatch.setattr(kind, "server_update", server_update)
    replica, state = world.set_up(algorithm, double_data(), PLAN)
    executors = build_executors(replica.groups, "looped", num_calls=1)
    for index in range(rounds):
        before = state
        [(state, _)] = run_round([replica], [before], executors, index)
    monkeypatch.undo()
    return before, received[-1]


@pytest.mark.parametrize("by", ["examples", "clients"])
@pytest.mark.parametrize("name", world.NAMES)
def test_masking_uploads_gives_the_numbers_of_filtering_them(name, by, monkeypatch):
    """A GPU, which must not be waited for, masks; a CPU filters."""
    algorithm = world.algorithm(name, model(), aggregation=Mean(by))
    state, uploads = before_the_last_round(algorithm, monkeypatch)
    losses = torch.zeros(world.NUM_CLIENTS)
    for dropped in ([2], [0, 2, 5], [0, 1, 2, 3, 5]):
        counted = torch.tensor([client not in dropped for client in EVERYBODY])
        losses[dropped] = torch.nan
        for tensor in uploads.messages.values():
            if tensor.is_floating_point():
                tensor[dropped] = torch.nan
        filtered = algorithm.server_update(state.shared, state.server, uploads.only(counted))
        shared, server, masked = masked_step(algorithm, state, uploads, losses)
        assert torch.equal(masked, counted)
        assert world.distance(shared, filtered[0]) < 1e-12
        assert world.distance(server, filtered[1]) < 1e-12


@pytest.mark.parametrize("name", world.NAMES)
def test_where_nobody_counts_masking_changes_nothing(name, monkeypatch):
    """Not even by the momentum that a server has."""
    algorithm = world.algorithm(name, model())
    state, uploads = before_the_last_round(algorithm, monkeypatch)
    nobody = torch.full((world.NUM_CLIENTS,), torch.nan)
    shared, server, counted = masked_step(algorithm, state, uploads, nobody)
    assert not counted.any()
    assert trees.same_bits(shared, state.shared)
    assert trees.same_bits(server, state.server)
