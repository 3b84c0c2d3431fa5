"""Codecs: what a client does to its upload, and how the server undoes it."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import glocal
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.wire import (
    Chain,
    Clip,
    Codec,
    Half,
    Identity,
    Int4,
    Int8,
    Noise,
    TopK,
    Wire,
    chain,
    parse_codec,
    schema_of,
)
from glocal.wire.codec import floating
from tests.support import world

pytestmark = pytest.mark.quick

KEY = torch.tensor(7)
CODECS = {
    "identity": Identity(),
    "clip": Clip(0.5),
    "noise": Noise(0.1),
    "fp16": Half(),
    "bf16": Half("bf16"),
    "int8": Int8(),
    "int4": Int4(),
    "top-k": TopK(0.3),
    "private": chain(Clip(0.5), Noise(0.1)),
    "small": chain(TopK(0.5), Int4()),
    "twice": chain(TopK(0.5), Half(), TopK(0.5)),
    "all": chain(Clip(0.5), Noise(0.01), TopK(0.6), Half("bf16"), Int8(), Int4()),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
by_level = pytest.mark.parametrize(("codec", "levels"), [(Int8(), 127), (Int4(), 7)])


def message(seed=0, dtype=torch.float32):
    """Tensors of every kind: a matrix, a vector, a scalar, an empty one, a counter, a switch."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "matrix": draw(7, 5),
        "vector": draw(3),
        "scalar": draw(),
        "empty": draw(0, 4),
        "counter": torch.tensor(11 + seed),
        "switch": torch.tensor([True, False, bool(seed % 2)]),
    }


def sent_and_received(codec, update, *, key=KEY, memory=None):
    payload, _ = codec.encode(update, codec.init(update) if memory is None else memory, key)
    return payload, codec.decode(payload, trees.zeros_like(update))


def keys(count):
    return [torch.tensor(key) for key in range(count)]


# ---- every codec


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_received_has_the_form_of_what_was_sent(codec, dtype):
    update = message(dtype=dtype)
    _, received = sent_and_received(codec, update)
    assert schema_of(received) == schema_of(update)
    assert list(received) == list(update)


forms = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3), st.sampled_from(["float32", "float64", "int64"])
    ),
    min_size=1,
    max_size=4,
)


@given(forms, st.sampled_from(sorted(CODECS)), st.integers(0, 1000))
def test_every_payload_is_the_one_that_was_declared(shapes, name, seed):
    """The form of a payload does not depend on its numbers, and it can be decoded."""
    generator, codec = torch.Generator().manual_seed(seed), CODECS[name]
    update = {
        name: torch.randn(shape, generator=generator).mul(9).to(getattr(torch, dtype))
        for name, (shape, dtype) in shapes.items()
    }
    wire = Wire.of(update, update, {}, codec)
    private = wire.initial_memory()
    for key in keys(3):
        payload, private = wire.encode(update, private, key)
        received = wire.decode(trees.stack([payload]))
        assert schema_of(trees.row(received, 0)) == schema_of(update)
        assert schema_of(private) == wire.private


@every_codec
def test_batched_over_clients_it_sends_the_same_bits_as_one_by_one(codec):
    messages = [message(seed) for seed in range(5)]
    memories = [
        {name: tensor + 0.1 * seed for name, tensor in codec.init(update).items()}
        for seed, update in enumerate(messages)
    ]
    alone = [
        codec.encode(update, memory, key)
        for update, memory, key in zip(messages, memories, keys(5), strict=True)
    ]
    sent, memories = torch.vmap(codec.encode)(
        trees.stack(messages), trees.stack(memories), torch.stack(keys(5))
    )
    for client, (payload, memory) in enumerate(alone):
        assert trees.same_bits(trees.row(sent, client), payload)
        assert trees.same_bits(trees.row(memories, client), memory)
    decode = torch.vmap(codec.decode, in_dims=(0, None))
    received = decode(sent, trees.zeros_like(messages[0]))
    for client, (payload, _) in enumerate(alone):
        assert trees.same_bits(
            trees.row(received, client), codec.decode(payload, trees.zeros_like(messages[0]))
        )


@every_codec
def test_the_same_key_sends_the_same_bits(codec):
    update = message()
    one, again = (sent_and_received(codec, update)[0] for _ in range(2))
    assert trees.same_bits(one, again)


@pytest.mark.parametrize(
    "name", [name for name in CODECS if name not in ("noise", "private", "all")]
)
def test_whole_numbers_are_sent_as_they_are(name):
    update = message()
    payload, received = sent_and_received(CODECS[name], update)
    for counter in ("counter", "switch"):
        assert torch.equal(payload[counter], update[counter])
        assert torch.equal(received[counter], update[counter])


@every_codec
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_never_becomes_a_finite_one(codec, value):
    """Then the server leaves the client out."""
    update = message()
    update["matrix"][2, 3] = value
    _, received = sent_and_received(codec, update)
    assert not all(tensor.isfinite().all() for tensor in received.values())


@every_codec
def test_a_message_is_not_changed_in_place(codec):
    update, before = message(), message()
    memory = codec.init(update)
    copies = {name: tensor.clone() for name, tensor in memory.items()}
    codec.encode(update, memory, KEY)
    assert trees.same_bits(update, before)
    assert trees.same_bits(memory, copies)


@every_codec
def test_zeros_are_received_as_zeros_unless_noise_is_added(codec):
    zeros = trees.zeros_like(message())
    _, received = sent_and_received(codec, zeros)
    has_noise = "Noise" in repr(codec)
    assert trees.same_bits(received, zeros) != has_noise


@pytest.mark.parametrize("name", CODECS)
def test_who_keeps_the_form_says_so(name):
    update, codec = message(), CODECS[name]
    payload, _ = sent_and_received(codec, update)
    assert codec.keeps_form == (schema_of(payload) == schema_of(update))
    assert codec.keeps_form == (name in ("identity", "clip", "noise", "private"))


# ---- clip


def length(tree):
    squares = [
        tensor.double().square().sum() for tensor in tree.values() if tensor.is_floating_point()
    ]
    return float(torch.stack(squares).sum().sqrt())


@given(st.floats(0.01, 100), st.integers(0, 100))
def test_no_message_is_longer_than_the_norm(norm, seed):
    sent, _ = Clip(norm).encode(message(seed), {}, KEY)
    assert length(sent) <= norm * (1 + 1e-6)


def test_a_long_message_keeps_its_direction_over_all_tensors_together():
    update = message(dtype=torch.float64)
    sent, _ = Clip(0.5).encode(update, {}, KEY)
    assert length(sent) == pytest.approx(0.5)
    scale = 0.5 / length(update)
    for name in ("matrix", "vector", "scalar"):
        torch.testing.assert_close(sent[name], scale * update[name])


def test_a_short_message_is_sent_as_it_is():
    update = message()
    sent, _ = Clip(100.0).encode(update, {}, KEY)
    assert trees.same_bits(sent, update)


# ---- noise


def noise_of(codec, shape=(40, 50), *, names=("a", "b"), keys=(KEY,)):
    """The noise of every name and key."""
    zeros = {name: torch.zeros(shape) for name in names}
    sent = [codec.encode(zeros, {}, key)[0] for key in keys]
    return [payload[name].flatten() for payload in sent for name in names]


def largest_correlation(noises):
    stacked = torch.stack(list(noises))
    return float(torch.corrcoef(stacked).fill_diagonal_(0).abs().max())


@pytest.mark.parametrize("entropy", [False, True])
def test_no_two_tensors_and_no_two_keys_have_the_same_noise(entropy):
    """Every client and round has a key of its own."""
    noises = noise_of(Noise(1.0, entropy=entropy), names=("a", "b", "c"), keys=keys(4))
    assert largest_correlation(noises) < 0.1  # of 2000 numbers: 4.5 standard errors
    assert not any(torch.equal(one, other) for one, other in combinations(noises, 2))


def test_noise_is_normal_with_the_standard_deviation_that_was_asked_for():
    from scipy.stats import kstest

    drawn = torch.cat(noise_of(Noise(0.3), keys=keys(10))).double()
    assert float(drawn.std()) == pytest.approx(0.3, rel=0.02)
    assert kstest(drawn.numpy() / 0.3, "norm").pvalue > 0.01


def test_noise_by_address_repeats_and_noise_of_entropy_does_not():
    by_address, by_entropy = Noise(1.0), Noise(1.0, entropy=True)
    for one, again in zip(noise_of(by_address), noise_of(by_address), strict=True):
        assert torch.equal(one, again)
    for one, again in zip(noise_of(by_entropy), noise_of(by_entropy), strict=True):
        assert abs(float(torch.corrcoef(torch.stack([one, again]))[0, 1])) < 0.1


def test_noise_of_entropy_leaves_torchs_own_generator_alone():
    before = torch.get_rng_state()
    noise_of(Noise(1.0, entropy=True))
    assert torch.equal(before, torch.get_rng_state())


def test_the_change_of_whole_numbers_is_not_sent_beside_noise():
    _, received = sent_and_received(Noise(0.1), message())
    assert received["counter"] == 0
    assert not received["switch"].any()


def test_two_noises_in_a_chain_are_not_the_same():
    one = torch.cat(noise_of(Noise(1.0)))
    both = torch.cat(noise_of(chain(Noise(1.0), Noise(1.0))))
    assert float(both.std()) == pytest.approx(2**0.5, rel=0.05)
    assert float(torch.cat(noise_of(Noise(1.0), keys=keys(1))).std()) == pytest.approx(1, rel=0.05)
    assert not torch.equal(both, 2 * one)


# ---- few bits


@pytest.mark.parametrize(("name", "error"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_sixteen_bits_round_to_the_nearest(name, error):
    update = {"w": torch.linspace(0.01, 9, 1000)}
    payload, received = sent_and_received(Half(name), update)
    assert trees.nbytes(payload) == 2000
    gap = (received["w"] - update["w"]).abs() / update["w"].abs()
    assert 0 < float(gap.max()) <= error * (1 + 1e-6)


@pytest.mark.parametrize(
    ("codec", "count"), [(Int8(), 35 + 4), (Int4(), 18 + 4), (Half(), 70), (TopK(0.2), 7 * 4 + 4)]
)
def test_every_codec_sends_exactly_so_many_bytes(codec, count):
    """Of 35 numbers; the indices of 7 of them take 7 * 2 low bits and at most 16 high ones."""
    payload, _ = sent_and_received(codec, {"w": torch.randn(7, 5)})
    assert trees.nbytes(payload) == count


@by_level
def test_a_number_is_at_most_one_level_from_what_was_sent(codec, levels):
    update = {"w": torch.randn(1000)}
    level = float(update["w"].abs().max()) / levels
    _, received = sent_and_received(codec, update)
    assert float((received["w"] - update["w"]).abs().max()) <= level * (1 + 1e-5)
    assert len(received["w"].unique()) <= 2 * levels + 1


@by_level
def test_the_mean_of_many_encodings_is_the_number_itself(codec, levels):
    """Rounding to the nearest would have an error of up to half a level that stays."""
    update = {"w": torch.linspace(-1, 1, 101, dtype=torch.float64) ** 3}
    repeats = 4000
    encode = torch.vmap(lambda key: codec.decode(codec.encode(update, {}, key)[0], update))
    mean = encode(torch.arange(repeats))["w"].mean(0)
    standard_error = (1 / levels) / 2 / repeats**0.5
    assert float((mean - update["w"]).abs().max()) < 5 * standard_error


@by_level
def test_the_largest_numbers_are_exact(codec, levels):
    update = {"w": torch.tensor([-3.0, 0.0, 3.0, 0.1])}
    for key in keys(20):
        _, received = sent_and_received(codec, update, key=key)
        torch.testing.assert_close(received["w"][:3], update["w"][:3])


def test_the_levels_of_zeros_are_zeros():
    """And not what a machine makes of 0 / 0."""
    zeros = {"w": torch.zeros(4)}
    assert sent_and_received(Int8(), zeros)[0]["w#int8"].tolist() == [0, 0, 0, 0]
    assert sent_and_received(Int4(), zeros)[0]["w#int4"].tolist() == [0x88, 0x88]


def test_no_number_is_rounded_above_the_largest_level():
    """By an error of the division and the sum, about one in a million would be."""
    update = {"w": torch.full((4_000_000,), 0.7)}
    _, received = sent_and_received(Int8(), update)
    assert float((received["w"] - update["w"]).abs().max()) < 1e-6


@by_level
def test_the_rounding_of_two_tensors_and_two_keys_differs(codec, levels):
    half = torch.full((400,), 0.5 / levels)
    half[0] = 1.0
    ups = []
    for key in keys(3):
        _, received = sent_and_received(codec, {"a": half, "b": half}, key=key)
        ups += [received[name][1:] > 0.5 / levels for name in ("a", "b")]
    for one, other in combinations(ups, 2):
        assert 0.35 < float((one == other).double().mean()) < 0.65


# ---- top-k


def test_the_largest_numbers_of_every_tensor_are_sent():
    update = {"w": torch.tensor([[0.1, -5.0], [3.0, -0.2]]), "v": torch.tensor([0.0, 0.3, -0.4])}
    _, received = sent_and_received(TopK(0.5), update)
    assert received["w"].tolist() == [[0, -5.0], [3.0, 0]]
    assert torch.equal(received["v"], torch.tensor([0, 0, -0.4]))


@given(st.floats(0.001, 1), st.integers(0, 300))
def test_so_many_numbers_are_sent_and_never_none(share, size):
    codec = TopK(share)
    payload, _ = sent_and_received(codec, {"w": torch.randn(size)})
    expected = min(size, max(1, int(share * size)))
    assert codec.count(size) == len(payload["w#values"]) == expected


@pytest.mark.parametrize("codec", [TopK(0.2), chain(Clip(100.0), TopK(0.2)), TopK(1.0)])
def test_what_was_sent_and_what_is_remembered_is_all_there_was(codec):
    """Error feedback: over many rounds nothing is lost."""
    like = message(dtype=torch.float64)
    memory, sent, update = codec.init(like), None, None
    for seed, key in enumerate(keys(12)):
        own = message(seed, torch.float64)
        payload, memory = codec.encode(own, memory, key)
        received = codec.decode(payload, trees.zeros_like(own))
        own, received = floating(own), floating(received)
        sent = received if sent is None else trees.add(sent, received)
        update = own if update is None else trees.add(update, own)
    left = {name.rpartition("/")[2]: tensor for name, tensor in memory.items()}
    for name, tensor in update.items():
        torch.testing.assert_close(sent[name] + left[name], tensor, rtol=0, atol=1e-12)


def test_a_number_that_is_left_out_is_sent_later():
    codec, update = TopK(0.5), {"w": torch.tensor([1.0, 0.4])}
    memory, sent = codec.init(update), []
    for key in keys(4):
        payload, memory = codec.encode(update, memory, key)
        sent.append(codec.decode(payload, update)["w"].tolist())
    assert np.allclose(sent, [[1, 0], [1, 0], [0, 1.2], [2, 0]])


def test_an_index_takes_about_one_byte_where_one_per_cent_is_sent():
    payload, _ = sent_and_received(TopK(0.01), {"w": torch.randn(1000, 200)})
    count = len(payload["w#values"])
    assert count == 2000
    index_bytes = trees.nbytes(payload) - 4 * count
    assert 0.95 < index_bytes / count < 1.1


# ---- chains


def test_a_chain_encodes_in_order_and_decodes_in_reverse():
    """Of the clipped message [0.6, 0.8], the larger number is sent."""
    update = {"w": torch.tensor([3.0, 4.0])}
    payload, received = sent_and_received(chain(Clip(1.0), TopK(0.5), Half()), update)
    assert payload["w#values"].dtype == torch.float16
    assert received["w"].dtype == torch.float32
    torch.testing.assert_close(received["w"], torch.tensor([0, 0.8]), atol=1e-3, rtol=0)
    _, other = sent_and_received(chain(TopK(0.5), Clip(1.0)), update)
    assert torch.equal(other["w"], torch.tensor([0, 1.0]))


def test_each_codec_of_a_chain_remembers_under_its_place():
    update = {"w": torch.tensor([3.0, 4.0, 5.0, 6.0])}
    codec = chain(TopK(0.5), Clip(1e6), TopK(0.5))
    payload, memory = codec.encode(update, codec.init(update), KEY)
    assert {*memory} == {"0/w", "2/w#values"}
    assert memory["0/w"].tolist() == [3, 4, 0, 0]
    assert memory["2/w#values"].tolist() == [5, 0]
    assert codec.decode(payload, update)["w"].tolist() == [0, 0, 0, 6]


def test_a_chain_of_one_is_that_one_and_of_none_the_identity():
    assert chain(Int8()) == Int8()
    assert chain() == Identity()
    assert chain(Int8(), Half()) == Chain((Int8(), Half()))


@pytest.mark.parametrize("wrong", ["int8", 3, Int8, None])
def test_what_is_no_codec_is_refused(wrong):
    with pytest.raises(InputError, match=r"^codec: .* was given; one of glocal's was expected"):
        chain(Int8(), wrong)


@pytest.mark.parametrize("wrong", ["int8", Int8])
def test_fit_refuses_an_uplink_that_is_no_codec(wrong):
    algorithm = world.algorithm("fedavg", world.seeded(world.plain))
    plan = {"rounds": 1, "clients_per_round": 1, "progress": False}
    with pytest.raises(InputError, match=r"^codec: '?[iI]nt8'? was given"):
        glocal.fit(algorithm, world.federation(), **plan, uplink=wrong)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (Clip, 0),
        (Clip, -1.0),
        (Clip, float("inf")),
        (Clip, float("nan")),
        (Clip, True),
        (Clip, "1"),
        (Noise, 0),
        (Noise, float("nan")),
        (TopK, 0),
        (TopK, 1.5),
        (TopK, float("nan")),
        (Half, "fp8"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_line(make, value):
    with pytest.raises(InputError, match=r"^codec: .*(was expected|known: bf16, fp16)$"):
        make(value)


def test_codecs_are_values():
    assert Clip(1.0) == Clip(1.0) != Clip(2.0)
    assert all(isinstance(codec, Codec) for codec in CODECS.values())
    assert len({*CODECS.values()}) == len(CODECS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Identity()),
        (["int8"], Int8()),
        (["clip(1.0)", "noise( 0.5 )"], chain(Clip(1.0), Noise(0.5))),
        (["top_k(0.01)", "bf16"], chain(TopK(0.01), Half("bf16"))),
        (["fp16", "int4"], chain(Half(), Int4())),
    ],
)
def test_codecs_have_words(words, expected):
    assert parse_codec(words, "plan.uplink") == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("int9", "plan.uplink is 'int9'; did you mean 'int"),
        ("top_k", "plan.uplink is 'top_k'; 'top_k' does not take 0"),
        ("int8(3)", "'int8' does not take 1"),
        ("clip(0)", "the norm of Clip is 0"),
        ("clip(1", "plan.uplink is 'clip"),
    ],
)
def test_a_word_that_names_no_codec_is_refused(word, message):
    with pytest.raises(InputError, match=r"^settings: ") as refused:
        parse_codec([word], "plan.uplink")
    assert message in str(refused.value)
