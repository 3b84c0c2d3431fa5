"""Malformed replies in secure aggregation: the client drops out and is named, the run goes on."""

import io

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from glocal.core.errors import InputError
from glocal.core.files import read_rows
from glocal.deploy.flower.server_internals import generate_key_pairs, public_key_to_bytes
from tests.support import deployed
from tests.support.deployed_runs import run_here, secured, simulated, with_availability
from tests.support.world import distance

RECORD = "secaggplus_configs"
PUBLIC_KEY = public_key_to_bytes(generate_key_pairs()[1])
FOREIGN_KEY = (
    b"-----BEGIN PUBLIC KEY-----\n"
    b"MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n"
    b"-----END PUBLIC KEY-----\n"
)


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


def set_to(**fields):
    """A change of a reply: other values of some fields, or functions of the true ones."""

    def change(content):
        record = content.config_records[RECORD]
        for name, value in fields.items():
            record[name] = value(record[name]) if callable(value) else value

    return change


def without(*names):
    def change(content):
        for name in names:
            del content.config_records[RECORD][name]

    return change


def without_record(content):
    del content.config_records[RECORD]


def empty(content):
    for name in list(content):
        del content[name]


def numpy_file(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def arrays(change):
    """A change of the masked arrays."""

    def changed(parts):
        return [numpy_file(change(np.load(io.BytesIO(part)))) for part in parts]

    return set_to(masked_params=changed)


def examples(number):
    def change(content):
        record = MetricRecord({"num_examples": number})
        content.metric_records["fitres.num_examples"] = record

    return change


def without_result(content):
    del content.metric_records["fitres.num_examples"]


def unfit_metrics(content):
    content.config_records["fitres.metrics"] = ConfigRecord({"metrics": [1, 2]})


MALFORMED = {
    "setup": {
        "empty": empty,
        "no record": without_record,
        "no key": without("pk1"),
        "a key of another type": set_to(pk1="text"),
        "no key at all": set_to(pk2=b"garbage"),
        "a key of another kind": set_to(pk1=FOREIGN_KEY),
        "a key twice": set_to(pk1=PUBLIC_KEY, pk2=PUBLIC_KEY),
    },
    "share_keys": {
        "empty": empty,
        "no receivers": without("dsts"),
        "receivers of another type": set_to(dsts=lambda dsts: [str(dst) for dst in dsts]),
        "one receiver": set_to(dsts=7),
        "unknown receivers": set_to(dsts=lambda dsts: [1 for _ in dsts]),
        "a receiver twice": set_to(dsts=lambda dsts: [dsts[0] for _ in dsts]),
        "fewer shares": set_to(ctxts=lambda shares: shares[1:]),
        "shares of another type": set_to(ctxts=lambda shares: [1 for _ in shares]),
    },
    "collect_masked_vectors": {
        "empty": empty,
        "no record": without_record,
        "no arrays": without("masked_params"),
        "arrays of another type": set_to(masked_params="text"),
        "unreadable arrays": set_to(masked_params=lambda parts: [b"garbage" for _ in parts]),
        "fewer arrays": set_to(masked_params=lambda parts: parts[1:]),
        "longer arrays": arrays(lambda array: np.concatenate([array, array])),
        "arrays of floats": arrays(lambda array: array.astype(np.float64)),
        "numbers out of range": arrays(lambda array: array + 2**40),
        "negative numbers": arrays(lambda array: -array - 1),
        "no result": without_result,
        "no examples": examples(0),
        "a fraction of an example": examples(1.5),
        "too many examples": examples(2**60),
        "metrics of another type": unfit_metrics,
    },
    "unmask": {
        "empty": empty,
        "no owners": without("nids"),
        "owners of another type": set_to(nids=lambda nids: [float(nid) for nid in nids]),
        "unknown owners": set_to(nids=lambda nids: [1 for _ in nids]),
        "an owner twice": set_to(nids=lambda nids: [nids[0] for _ in nids]),
        "fewer shares": set_to(shares=lambda shares: shares[1:]),
        "shares of another type": set_to(shares=lambda shares: ["x" for _ in shares]),
        "short shares": set_to(shares=lambda shares: [share[:20] for share in shares]),
        "no bytes": set_to(shares=lambda shares: [b"" for _ in shares]),
    },
}
STAGES_AND_KINDS = [(stage, kind) for stage, changes in MALFORMED.items() for kind in changes]


def tampering(stage, change, client=2, round_index=1):
    """Replace a client's reply in one stage of one round."""

    def tamper(number, message, reply):
        own_stage = message.content.config_records.get(RECORD, {}).get("stage")
        if (number, own_stage, message.metadata.group_id) == (client, stage, str(round_index)):
            content = RecordDict({**reply.content})
            change(content)
            return Message(content, reply_to=message)
        return reply

    return tamper


@pytest.mark.parametrize(("stage", "kind"), STAGES_AND_KINDS, ids=lambda part: part)
def test_a_malformed_masked_reply_is_a_dropout_that_is_named(stage, kind, tmp_path):
    folder = secured(deployed.project(tmp_path / "here", rounds=2))
    change = tampering(stage, MALFORMED[stage][kind])
    server = run_here(folder, deployed.InProcessGrid(folder, change))
    rows = read_rows(server.folder / "rows.jsonl")
    reason = f"its reply in stage '{stage}' cannot be used ("
    if stage == "unmask":  # its upload is in the mean already, and the other shares suffice
        state, _ = simulated(folder)
        assert [row["dropped"] for row in rows] == [{}, {}]
        assert rows[1]["notes"]["client-2"].startswith(reason)
        assert rows[0]["notes"] == {}
    else:
        state = with_availability(folder, {1: [2]})
        assert [[*row["dropped"]] for row in rows] == [[], ["client-2"]]
        assert rows[1]["dropped"]["client-2"].startswith(reason)
    assert distance(server.shared, state.shared) <= 1e-4


def test_where_too_few_masked_replies_can_be_used_the_error_says_why(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", rounds=2, clients=2))
    grid = deployed.InProcessGrid(folder, tampering("setup", empty, client=1))
    reason = "round 2 could not be unmasked .*client-1: its reply in stage 'setup' cannot be used"
    with pytest.raises(InputError, match=reason):
        run_here(folder, grid)
    grid.tamper = deployed.unchanged
    assert len(read_rows(run_here(folder, grid).folder / "rows.jsonl")) == 2


def test_key_shares_that_do_not_fit_together_end_the_run_in_one_line(tmp_path):
    """Each is as long as it must be, so that nobody can be named; the round can be repeated."""
    folder = secured(deployed.project(tmp_path / "here", rounds=2))
    wrong = set_to(shares=lambda shares: [bytes(len(share)) for share in shares])
    grid = deployed.InProcessGrid(folder, tampering("unmask", wrong))
    with pytest.raises(InputError, match="the key shares of its clients do not fit together"):
        run_here(folder, grid)
    grid.tamper = deployed.unchanged
    assert len(read_rows(run_here(folder, grid).folder / "rows.jsonl")) == 2
