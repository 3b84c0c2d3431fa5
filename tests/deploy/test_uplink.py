"""What encodes uploads, and what the server keeps, in a deployment: the bits of `Run`."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Error, Message

from glocal.core.errors import InputError
from glocal.core.files import read_json, read_rows, read_tensors
from glocal.core.trees import same_bits
from glocal.deploy.client import RunClient
from glocal.deploy.flower.records import from_record
from glocal.deploy.project import Project
from glocal.deploy.registry import revoke
from glocal.deploy.server import RunServer
from glocal.evaluate.privacy import epsilon
from glocal.wire import Wire, pack, unpack
from tests.support import deployed
from tests.support.deployed_runs import (
    private_of,
    run_here,
    secured,
    simulated_run,
    with_availability,
    with_privacy,
)
from tests.support.world import distance


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


def require_same_bits(server, folder, progress, clients=range(4)):
    """The server's and all clients' states are those of the simulator, and so is the traffic."""
    state, ledger = progress.states[0], progress.ledgers[0][0]
    assert same_bits(server.shared, state.shared)
    assert same_bits(server.state.training.server, state.server)
    for client in clients:
        own = private_of(folder, client).after
        assert same_bits(own, state.private[0].of(client))
        profile = server.state.training.profiles[0].of(client)
        assert same_bits(profile, state.profiles[0].of(client))
    assert (server.state.ledger.download, server.state.ledger.upload) == (
        ledger.download,
        ledger.upload,
    )


@pytest.mark.parametrize("algorithm", ["lg_fedavg", "fedavg", "apfl", "local_only"])
@pytest.mark.parametrize(
    "uplink", ['["int8"]', '["top_k(0.3)"]', '["top_k(0.5)", "int4"]', '["bf16"]']
)
def test_encoded_uploads_give_the_bits_of_run(uplink, algorithm, tmp_path):
    """With fewer sampled than there are, so that memories are of different rounds."""
    plan = f"uplink = {uplink}"
    folder = deployed.project(
        tmp_path / "here", algorithm=algorithm, clients_per_round=3, plan=plan, rounds=4
    )
    server = run_here(folder)
    require_same_bits(server, folder, simulated_run(folder))
    remembers = any(name.startswith("codec/") for name in private_of(folder, 0).after)
    assert remembers == ("top_k" in uplink and algorithm != "local_only")


def during(round_index, client):
    return lambda number, message: (
        number == client
        and message.metadata.message_type == "train"
        and message.metadata.group_id == str(round_index)
    )


def test_the_memory_of_a_codec_goes_back_with_a_reply_that_is_lost(tmp_path):
    """What was left out of an upload is sent later, but not what was left out of a lost one."""
    folder = deployed.project(tmp_path / "here", plan='uplink = ["top_k(0.3)"]', rounds=4)
    is_lost, lost = during(1, 0), Error(0, "lost on its way")

    def tamper(client, message, reply):
        return Message(lost, reply_to=message) if is_lost(client, message) else reply

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    state = with_availability(folder, {1: [0]})
    assert same_bits(server.shared, state.shared)
    for client in range(4):
        assert same_bits(private_of(folder, client).after, state.private.of(client))


def replaced(change):
    """The reply of client 2 in the second round with another payload, as a tree of its schema."""

    def tamper(client, message, reply):
        if during(1, 2)(client, message):
            record = reply.content.config_records["tree"]
            record["blob"] = change(record["blob"])
        return reply

    return tamper


def garbage(blob):
    return np.random.default_rng(0).bytes(len(blob))


def test_bytes_of_the_right_number_that_cannot_be_decoded_cost_their_client_alone(tmp_path):
    """Their places are outside of the tensor."""
    folder = deployed.project(tmp_path / "here", plan='uplink = ["top_k(0.3)"]')
    server = run_here(folder, deployed.InProcessGrid(folder, replaced(garbage)))
    rows = read_rows(server.folder / "rows.jsonl")
    assert [len(row["clients"]) for row in rows] == [4, 3, 4]
    reason = "its payload cannot be decoded (RuntimeError: "
    assert rows[1]["dropped"]["client-2"].startswith(reason)
    state = with_availability(folder, {1: [2]})
    assert same_bits(server.shared, state.shared)
    assert same_bits(private_of(folder, 2).after, state.private.of(2))


@pytest.mark.parametrize("change", [garbage, lambda blob: bytes(len(blob))])
@pytest.mark.parametrize("uplink", ["top_k(0.3)", "int8", "int4", "fp16"])
def test_no_bytes_of_the_right_number_end_a_round(uplink, change, tmp_path):
    folder = deployed.project(tmp_path / "here", plan=f'uplink = ["{uplink}"]', rounds=2)
    server = run_here(folder, deployed.InProcessGrid(folder, replaced(change)))
    rows = read_rows(server.folder / "rows.jsonl")
    assert len(rows) == 2
    assert {*rows[1]["dropped"]} <= {"client-2"}


def test_a_scale_that_is_not_a_number_is_named(tmp_path):
    folder = deployed.project(tmp_path / "here", plan='uplink = ["int8"]')
    wire = Project.from_folder(folder).setup.wire

    def change(blob):
        tree = unpack(blob, wire.payload)
        return pack({**tree, "6.bias#scale": tree["6.bias#scale"] * float("nan")})

    server = run_here(folder, deployed.InProcessGrid(folder, replaced(change)))
    rows = read_rows(server.folder / "rows.jsonl")
    assert rows[1]["dropped"] == {"client-2": "wire: '6.bias#scale' holds NaN or infinity"}


ROBUST = ["median", "trimmed_mean(1)", "krum(1)", "multi_krum(1)", "geometric_median"]
ROBUST += ["centred_clipping(0.1)", "mean(examples, 9)"]


@pytest.mark.parametrize("word", ROBUST)
def test_every_aggregation_goes_on_without_an_upload_that_is_not_finite(word, tmp_path):
    """As in the simulator without that client, to the bits."""
    folder = deployed.project(tmp_path / "here", plan=f'aggregation = "{word}"')
    nan = bytes.fromhex("0000c07f")
    change = replaced(lambda blob: nan + blob[4:])
    server = run_here(folder, deployed.InProcessGrid(folder, change))
    rows = read_rows(server.folder / "rows.jsonl")
    assert [row["dropped"] for row in rows] == [
        {},
        {"client-2": "wire: '4.bias' holds NaN or infinity"},
        {},
    ]
    assert distance(server.shared, with_availability(folder, {1: [2]}).shared) == 0


def test_a_round_with_too_few_replies_for_an_aggregation_fails_the_run_in_one_line(tmp_path):
    folder = deployed.project(tmp_path / "here", plan='aggregation = "trimmed_mean(1)"')

    def tamper(client, message, reply):
        if any(during(1, broken)(client, message) for broken in (1, 2)):
            reply.content.config_records["tree"]["blob"] = b""
        return reply

    with pytest.raises(InputError, match=r"^aggregation: trimmed_mean\(1\) .* there are 2;"):
        run_here(folder, deployed.InProcessGrid(folder, tamper))
    live = read_json(folder / "runs/first/live.json", dict)
    assert live["state"] == "failed"
    assert "at least 3 clients" in live["reason"]


def test_every_payload_is_decoded_once(tmp_path, monkeypatch):
    folder, decode, sizes = deployed.project(tmp_path / "here", rounds=3), Wire.decode, []

    def counted(self, payloads):
        sizes.append(len(next(iter(payloads.values()))))
        return decode(self, payloads)

    monkeypatch.setattr(Wire, "decode", counted)
    run_here(folder)
    assert sizes == [4, 4, 4]


def test_a_client_with_another_uplink_is_refused(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1, plan='uplink = ["int8"]')
    deployed.change(folder / "clients/client-2/study.toml", 'uplink = ["int8"]', "")
    server = run_here(folder)
    assert "is not the server's" in server.live["refused"]["client-2"]
    assert len(server.live["refused"]) == 1


def test_private_state_of_another_uplink_is_refused_by_name(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1, plan='uplink = ["top_k(0.3)"]')
    run_here(folder)
    deployed.change(folder / "study.toml", 'uplink = ["top_k(0.3)"]', 'uplink = ["int8"]')
    deployed.copy_to_clients(folder)
    file = RunClient.from_folder(folder / "clients/client-1").private("first")
    reason = (
        r"another model \(private 'codec/4.bias' .*\) than this one \(no private 'codec/4.bias'"
    )
    with pytest.raises(InputError, match=reason):
        file.load()


def test_private_state_of_another_algorithm_says_which_setting_differs(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)
    run_here(folder)
    deployed.change(folder / "clients/client-1/study.toml", "lr = 0.1", "lr = 0.2")
    file = RunClient.from_folder(folder / "clients/client-1").private("first")
    reason = r"another algorithm \(optimizer.lr 0.1\) than this one \(optimizer.lr 0.2\)"
    with pytest.raises(InputError, match=reason):
        file.load()


def test_a_client_whose_training_diverges_is_left_out_as_in_the_simulator(tmp_path):
    """It says so itself, and keeps its private state; the server is sent nothing."""
    plan = 'uplink = ["top_k(0.5)"]'
    folder = deployed.project(tmp_path / "here", algorithm="apfl", plan=plan)
    deployed.change(folder / "federation.py", "    return x, (x[:, 0]", TOO_LARGE)
    deployed.copy_to_clients(folder)
    grid, left = deployed.InProcessGrid(folder), []
    grid.tamper = lambda client, message, reply: left.append((client, message, reply)) or reply
    server, progress = run_here(folder, grid), simulated_run(folder)
    assert progress.dropped == ({1: 3},)
    state = progress.states[0].group()
    assert same_bits(server.shared, state.shared)
    for client in range(4):
        stored = private_of(folder, client)
        own = stored.before if client == 1 else stored.after
        assert same_bits(own, state.private.of(client))
    for row in read_rows(server.folder / "rows.jsonl"):
        assert [*row["dropped"]] == ["client-1"]
        reason = row["dropped"]["client-1"]
        assert "holds NaN or infinity" in reason or "loss is not finite" in reason
    for client, message, reply in left:
        if client == 1 and message.metadata.message_type == "train":
            assert "tree" not in reply.content


TOO_LARGE = """    x = x.clamp(-3, 3) * 1e38 if client == 1 else x
    return x, (x[:, 0]"""


def test_a_client_that_leaves_for_good_still_counts_in_the_mean_of_all(tmp_path):
    """MTL's shared tree is the mean over all clients: the last model of a revoked one is in it."""
    folder = deployed.project(tmp_path / "here", algorithm="mtl", rounds=2)
    run_here(folder)
    revoke(folder, "client-3")
    deployed.change(folder / "study.toml", "rounds = 2", "rounds = 4")
    server = run_here(folder)
    assert [row["clients"] for row in read_rows(server.folder / "rows.jsonl")][3] == [
        "client-0",
        "client-1",
        "client-2",
    ]
    state = with_availability(folder, {2: [3], 3: [3]})
    assert same_bits(server.shared, state.shared)


REMEMBERING = """
from glocal.algorithms.contract import State, add_change
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees

def of(prefix, tree):
    floats = {name: tensor for name, tensor in tree.items() if tensor.is_floating_point()}
    return trees.with_prefix(prefix, floats)

class Remembering(FedAvg):
    '''The server has momentum, and sends every client a part of its last change again.'''

    momentum: float = 0.5

    def init(self, params):
        zeros = trees.zeros_like(params)
        return State(params, {}, of("velocity/", zeros), of("last/", zeros))

    def num_epochs(self, local_epochs):
        return 2 * local_epochs

    def download(self, shared, profile):
        own = trees.under_prefix("last/", profile)
        return {**shared, **{n: shared[n] + 0.1 * moved for n, moved in own.items()}}

    def remember(self, shared, profile, sent, upload):
        return of("last/", {n: profile["last/" + n] / 2 + upload[n] for n in of("", upload)})

    def server_update(self, shared, server, uploads):
        moved, velocity = uploads.aggregate(), {}
        for name, tensor in trees.under_prefix("velocity/", server).items():
            velocity[name] = self.momentum * tensor + moved[name]
        return add_change(shared, {**moved, **velocity}), of("velocity/", velocity)
"""


def remembering(folder, **more):
    """A deployment of an algorithm whose server remembers, for itself and of each client."""
    made = deployed.project(folder, algorithm="federation:Remembering", **more)
    with (made / "federation.py").open("a") as module:
        module.write(REMEMBERING)
    deployed.copy_to_clients(made)
    return made


def test_an_algorithm_with_a_server_state_and_profiles_gives_the_bits_of_run(tmp_path):
    folder = remembering(tmp_path / "here", clients_per_round=3, plan='uplink = ["int8"]')
    grid, left = deployed.InProcessGrid(folder), []
    grid.tamper = lambda client, message, reply: left.append((client, message)) or reply
    server = run_here(folder, grid)
    progress = simulated_run(folder)
    require_same_bits(server, folder, progress)
    velocity = progress.states[0].server
    still = [name for name, tensor in velocity.items() if not tensor.any()]
    assert still in ([], ["velocity/0.bias"]), "batch norm takes away what a bias before it does"
    sent = {}
    for client, message in left:
        record = message.content.config_records.get("tree")
        if message.metadata.message_type == "train" and record:
            sent[client, message.metadata.group_id] = from_record(record)
    first = [blob for (_, group), blob in sent.items() if group == "0"]
    last = [blob for (_, group), blob in sent.items() if group == "2"]
    assert len({*first}) == 1, "nobody is known yet"
    assert len({*last}) == len(last) == 3, "each gets a message of its own"
    for blob in sent.values():
        for name, tensor in server.state.training.server.items():
            assert name in still or pack({"": tensor}) not in blob, name


def test_the_servers_state_and_profiles_are_in_its_checkpoint_and_a_run_goes_on_with_them(tmp_path):
    folder, whole = remembering(tmp_path / "here", rounds=2), remembering(tmp_path / "whole")
    run_here(folder)
    tensors, _ = read_tensors(folder / "runs/first/checkpoint.safetensors")
    assert {name.partition("/")[0] for name in tensors} == {"shared", "server", "profiles"}
    deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
    resumed, uninterrupted = run_here(folder), run_here(whole)
    assert same_bits(resumed.shared, uninterrupted.shared)
    require_same_bits(resumed, folder, simulated_run(whole))


def test_a_checkpoint_whose_tensors_are_not_those_of_the_algorithm_is_refused(tmp_path):
    folder = remembering(tmp_path / "here", rounds=1, clients=2)
    server = run_here(folder)
    training = server.state.training
    another = {**training.server, "velocity/6.bias": training.shared["0.weight"]}
    state = replace(server.state, training=training._replace(server=another))
    server.files.save(state, server.setup)
    with pytest.raises(InputError, match=r"checkpoint.safetensors is damaged \(wire: 'velocity/6"):
        RunServer(Project.from_folder(folder), "first")


SINGLE = """
from glocal.algorithms.contract import add_change
from glocal.algorithms.fedavg import FedAvg

class Single(FedAvg):
    '''Every upload is looked at before it is averaged.'''

    def server_update(self, shared, server, uploads):
        halved = lambda upload, sent, profile: {n: tensor / 2 for n, tensor in upload.items()}
        return add_change(shared, uploads.aggregate(halved)), server
"""
ROOTS = """
from dataclasses import dataclass
from typing import ClassVar
from glocal.algorithms.fedavg import FedAvg
from glocal.wire import Aggregation, Mean

@dataclass(frozen=True)
class Roots(Mean):
    '''By the square root of the examples.'''

    def weights(self, num_examples):
        return num_examples.double().sqrt()

class ByRoots(FedAvg):
    aggregation: Aggregation = Roots()
"""
MODULES = {"federation:Single": SINGLE, "federation:ByRoots": ROOTS}
MEAN, MEDIAN = 'aggregation = "mean(clients)"', 'aggregation = "median"'
KRUM, BOUNDED = 'aggregation = "krum(1)"', 'aggregation = "mean(examples, 100)"'
UNFIT = [
    (secured, "lg_fedavg", 'uplink = ["int8"]', r"as they are sent, and plan.uplink has Int8\(\)"),
    (secured, "lg_fedavg", 'uplink = ["top_k(0.1)"]', r"plan.uplink has TopK\(share=0.1\)"),
    (secured, "lg_fedavg", MEDIAN, r"LGFedAvg with Median\(\) needs each of them"),
    (secured, "lg_fedavg", KRUM, r"LGFedAvg with Krum\(byzantine=1\) needs each of them"),
    (secured, "lg_fedavg", BOUNDED, "equally or by their examples, and Mean.* does neither"),
    (lambda folder: folder, "lg_fedavg", 'aggregation = "krum(3)"', "at least 7 clients"),
    (with_privacy, "lg_fedavg", KRUM, r"privacy needs a mean of uploads, and LGFedAvg takes Kr"),
    (secured, "federation:Single", "", "Single with Mean.* needs each of them"),
    (secured, "federation:ByRoots", "", "equally or by their examples, and Roots.* does neither"),
    (secured, "fedavg", "", r"cannot mask \['1.num_batches_tracked'\]"),
    (secured, "local_only", "", "protects uploads, and LocalOnly sends nothing"),
    (with_privacy, "local_only", MEAN, "privacy protects uploads, and LocalOnly sends nothing"),
    (with_privacy, "lg_fedavg", MEDIAN, r"privacy needs a mean of uploads, and LGFedAvg takes Me"),
    (with_privacy, "lg_fedavg", "", r"same weight for every client; set plan\.aggregation = 'mean"),
    (with_privacy, "federation:ByRoots", "", "same weight for every client"),
    (lambda folder: folder, "lg_fedavg", 'uplink = ["noise(0.1)"]', "could draw too; leave it out"),
    (lambda folder: folder, "lg_fedavg", 'uplink = ["clip(1)", "noise(0.1)"]', "could draw too"),
]


@pytest.mark.parametrize(("make", "algorithm", "plan", "reason"), UNFIT)
def test_what_would_not_protect_or_not_work_is_refused(make, algorithm, plan, reason, tmp_path):
    folder = deployed.project(tmp_path / "here", algorithm=algorithm, plan=plan)
    with (folder / "federation.py").open("a") as module:
        module.write(MODULES.get(algorithm, ""))
    make(folder)
    with pytest.raises(InputError, match=reason):
        Project.from_folder(folder).setup  # noqa: B018


def test_an_algorithm_that_reads_single_uploads_can_be_deployed_without_masks(tmp_path):
    folder = deployed.project(tmp_path / "here", algorithm="federation:Single", rounds=2)
    with (folder / "federation.py").open("a") as module:
        module.write(SINGLE)
    deployed.copy_to_clients(folder)
    require_same_bits(run_here(folder), folder, simulated_run(folder))


@pytest.mark.parametrize("plan", [MEAN, MEDIAN])
def test_no_client_reports_its_number_of_examples_where_all_weigh_the_same(plan, tmp_path):
    folder, left = deployed.project(tmp_path / "here", rounds=2, plan=plan), []
    grid = deployed.InProcessGrid(folder)
    grid.tamper = lambda client, message, reply: left.append((message, reply)) or reply
    server = run_here(folder, grid)
    require_same_bits(server, folder, simulated_run(folder))
    trained = [reply for message, reply in left if message.metadata.message_type == "train"]
    numbers = [reply.content.config_records["config"]["num_examples"] for reply in trained]
    assert numbers == [1] * 8
    assert {*server.clients.weights.values()} == {1}


def test_clipping_and_noise_can_be_masked_and_all_clients_weigh_the_same(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", rounds=2, plan=MEAN))
    server = run_here(with_privacy(folder))
    rows = read_rows(server.folder / "rows.jsonl")
    assert [len(row["clients"]) for row in rows] == [4, 4]
    assert {*server.clients.weights.values()} == {1}
    assert server.live["privacy"]["epsilon"] == pytest.approx(epsilon(2.0, 2, 1e-5))
    state = simulated_run(folder).states[0]
    assert distance(server.shared, state.shared) > 0.5, "there is no noise"


def test_uploads_that_are_clipped_alone_can_be_masked_too(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", rounds=2, plan=MEAN))
    server = run_here(with_privacy(folder, clip_norm=0.05, noise_multiplier=0.0))
    clipped = deployed.project(tmp_path / "clipped", rounds=2, plan=MEAN + CLIP)
    assert distance(server.shared, simulated_run(clipped).states[0].shared) <= 1e-4
    assert distance(server.shared, simulated_run(folder).states[0].shared) > 1e-2


CLIP = '\nuplink = ["clip(0.05)"]'


def test_what_is_masked_is_the_change(tmp_path):
    """A shared part with numbers beyond the range of masks can be trained all the same."""
    folder = deployed.project(tmp_path / "here", rounds=2)
    deployed.change(folder / "federation.py", "    return nn.Sequential(*first,", LARGE)
    secured(folder)
    server = run_here(folder)
    assert float(server.shared["6.bias"].max()) > 8
    assert distance(server.shared, simulated_run(folder).states[0].shared) <= 1e-4


LARGE = """    last = nn.Linear(7, 3)
    nn.init.constant_(last.bias, 20.0)
    return nn.Sequential(*first, nn.Linear(8, 7), nn.ReLU(), last)
    return nn.Sequential(*first,"""
