"""What may cross is declared beforehand, and everything else is refused with its name."""

import pytest
import torch

import glocal
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.federate.rounds import build_executors, client_step, run_round
from glocal.wire import (
    Identity,
    Int8,
    Noise,
    TensorForm,
    TopK,
    Wire,
    WireError,
    gate,
    pack,
    require_finite,
    schema_of,
    split_private,
    unpack,
)
from tests.support import world

pytestmark = pytest.mark.quick

MESSAGE = {"w": torch.zeros(3), "steps": torch.tensor(0), "a": torch.zeros(2, 2)}
SCHEMA = schema_of(MESSAGE)


def test_a_schema_has_names_shapes_and_types_in_their_order():
    assert list(SCHEMA) == ["w", "steps", "a"]
    assert SCHEMA["steps"] == TensorForm((), torch.int64)
    assert SCHEMA["a"] == TensorForm((2, 2), torch.float32)


def test_what_was_declared_passes_as_it_is():
    assert all(gate(MESSAGE, SCHEMA)[name] is tensor for name, tensor in MESSAGE.items())


def test_a_message_in_another_order_comes_out_in_the_declared_one():
    shuffled = {name: MESSAGE[name] for name in ("a", "steps", "w")}
    assert list(gate(shuffled, SCHEMA)) == ["w", "steps", "a"]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"secret": torch.zeros(1)}, r"nothing else; missing \[\], unexpected \['secret'\]"),
        ({"w": None}, r"missing \['w'\], unexpected \[\]"),
        ({"w": torch.zeros(4)}, r"'w' is \(4,\) torch.float32, and \(3,\) torch.float32 was"),
        ({"w": torch.zeros(3, 1)}, r"'w' is \(3, 1\)"),
        ({"w": torch.zeros(3).double()}, r"'w' is \(3,\) torch.float64"),
        ({"steps": torch.tensor(0.0)}, r"'steps' is \(\) torch.float32, and \(\) torch.int64"),
        ({"steps": torch.tensor([0])}, r"'steps' is \(1,\)"),
    ],
)
def test_everything_else_is_refused_by_name(change, refusal):
    tree = {**MESSAGE, **change}
    tree = {name: tensor for name, tensor in tree.items() if tensor is not None}
    with pytest.raises(WireError, match=refusal):
        gate(tree, SCHEMA)


def test_rows_of_many_clients_pass_with_one_more_axis():
    rows = trees.stack([MESSAGE] * 4)
    assert gate(rows, SCHEMA, rows=True).keys() == SCHEMA.keys()
    with pytest.raises(WireError, match=r"'w' is \(4, 3\)"):
        gate(rows, SCHEMA)
    with pytest.raises(WireError, match=r"'w' is \(\)"):
        gate(MESSAGE, SCHEMA, rows=True)


def test_the_gate_works_inside_a_batch():
    rows = trees.stack([{"w": torch.zeros(3)}] * 4)
    schema = schema_of({"w": torch.zeros(3)})
    assert torch.vmap(lambda message: gate(message, schema))(rows)["w"].shape == (4, 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_payload_that_is_not_finite_is_refused_by_name(value):
    tree = {"steps": torch.tensor(3), "w": torch.tensor([1.0, value])}
    with pytest.raises(WireError, match="'w' holds NaN or infinity"):
        require_finite(tree)
    require_finite({**tree, "w": torch.zeros(2)})


# ---- the wire of an algorithm


def wire_of(codec, *, private=()):
    return Wire.of(MESSAGE, MESSAGE, dict(private), codec)


@pytest.mark.parametrize(
    ("download", "upload"), [({"own": torch.zeros(1)}, {}), ({}, {"own": torch.zeros(1)})]
)
def test_a_message_may_not_have_the_name_of_a_private_tensor(download, upload):
    private = {"own": torch.zeros(1), "more": torch.zeros(2)}
    with pytest.raises(InputError, match=r"\['own'\] names private tensors and parts of a message"):
        Wire.of(download, upload, private, Identity())


def test_what_a_codec_remembers_is_private_and_apart():
    own = {"head": torch.zeros(5)}
    wire = wire_of(TopK(0.5), private=own)
    memory = wire.initial_memory()
    assert {*memory} == {"codec/w", "codec/a"}
    assert {*wire.private} == {"head", "codec/w", "codec/a"}
    assert [{*part} for part in split_private({**own, **memory})] == [{*own}, {*memory}]


def test_the_payload_is_declared_and_has_the_size_that_is_counted():
    wire = wire_of(Int8())
    assert {*wire.payload} == {"steps", "w#int8", "w#scale", "a#int8", "a#scale"}
    assert wire.scalars == 3 + 1 + 4
    payload, _ = wire.encode(MESSAGE, {}, torch.tensor(3))
    assert len(pack(payload)) == 8 + 3 + 4 + 4 + 4


def test_what_a_codec_draws_is_apart_from_what_a_client_draws():
    """Both have the key of the client's round."""
    codec, key = Noise(1.0), torch.tensor(3)
    alone, _ = codec.encode(MESSAGE, {}, key)
    payload, _ = wire_of(codec).encode(MESSAGE, {}, key)
    assert not torch.equal(payload["w"], alone["w"])


def test_an_upload_that_was_not_declared_is_not_encoded():
    with pytest.raises(WireError, match=r"unexpected \['more'\]"):
        wire_of(Int8()).encode({**MESSAGE, "more": torch.zeros(1)}, {}, torch.tensor(3))


def test_a_payload_that_was_not_declared_is_not_decoded():
    wire = wire_of(Int8())
    payload, _ = wire.encode(MESSAGE, {}, torch.tensor(3))
    with pytest.raises(WireError, match=r"'w#int8' is \(3,\) torch.float32"):
        wire.decode(trees.stack([{**payload, "w#int8": torch.zeros(3)}]))


def test_a_payload_comes_back_from_its_bytes_in_the_declared_order():
    tree = {"z": torch.randn(3, 2), "a": torch.tensor(True), "m": torch.randn(4).bfloat16()}
    back = unpack(pack(tree), schema_of(tree))
    assert list(back) == ["z", "a", "m"]
    assert trees.same_bits(back, tree)


@pytest.mark.parametrize("side", ["download", "private"])
def test_a_client_checks_what_it_receives_and_what_it_keeps(side):
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    replica, state = world.set_up(algorithm, world.federation().train, glocal.Plan(1, 1))
    [group] = replica.groups
    message, private = dict(state.shared), dict(state.private[0].initial)
    changed = message if side == "download" else private
    changed["more"] = torch.zeros(1)
    step = client_step(group.algorithm, group.wire)
    with pytest.raises(WireError, match=r"unexpected \['more'\]"):
        step(message, private, world.work_of(group.train, 0))


class Shuffling(glocal.FedAvg):
    """Uploads its tensors in another order."""

    def client_update(self, message, private, work):
        update = super().client_update(message, private, work)
        return update._replace(upload=dict(reversed(update.upload.items())))


@pytest.mark.parametrize("engine", ["looped", "vmapped", "workers"])
def test_the_order_of_an_uploads_tensors_changes_no_number(engine):
    """Sums, bytes and random numbers go by the declared order and by name."""
    states = []
    for kind in (glocal.FedAvg, Shuffling):
        task = glocal.classification(world.seeded(world.plain))
        algorithm = kind(task, optimizer=glocal.SGD(lr=0.1))
        replica, state = world.set_up(
            algorithm, world.federation().train, glocal.Plan(1, 3), uplink=Int8()
        )
        executors = build_executors(replica.groups, engine, num_calls=1)
        [(after, _)] = run_round([replica], [state], executors, 0)
        executors[0].close()
        states.append(after)
    assert world.same_bits(*states)
