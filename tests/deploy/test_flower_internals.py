"""Flower's undocumented names: one file per side uses them, and an upgrade that breaks is named."""

import ast
import importlib
import inspect
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

import glocal
from glocal.core.errors import InputError
from glocal.deploy.flower import client_internals, server_internals

DOCUMENTED = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
SOURCE = Path(glocal.__file__).parent
INSIDE = [Path(client_internals.__file__), Path(server_internals.__file__)]


def imports(text):
    """Every name that a file imports from Flower, with its module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "flwr":
                    yield alias.name, ""


def missing(text):
    """The imported names that Flower does not have."""
    lacks = []
    for module, name in imports(text):
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            lacks.append(f"{module} ({error})")
            continue
        if name and not hasattr(imported, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                lacks.append(f"{module}.{name}")
    return lacks


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.stem)
def test_flower_has_every_name_that_is_imported(path):
    lacks = missing(path.read_text())
    assert not lacks, f"flwr {version('flwr')} lacks what {path.name} imports: {', '.join(lacks)}"


def test_a_name_that_an_upgrade_removed_is_named():
    text = "from flwr.superlink.main import create_app, gone\nfrom flwr.nowhere import x\n"
    assert [line.split(" ")[0] for line in missing(text)] == [
        "flwr.superlink.main.gone",
        "flwr.nowhere",
    ]


def test_no_other_file_uses_undocumented_names():
    elsewhere = {
        (str(path.relative_to(SOURCE)), module)
        for path in SOURCE.rglob("*.py")
        if path not in INSIDE
        for module, _ in imports(path.read_text())
        if module not in DOCUMENTED
    }
    assert not elsewhere


USED = {
    InMemoryLinkState: {
        "create_node": ["owner_aid", "owner_name", "public_key", "heartbeat_interval", "name"],
        "delete_node": ["owner_aid", "node_id"],
        "activate_node": ["node_id", "heartbeat_interval"],
        "deactivate_node": ["node_id"],
        "get_node_info": ["node_ids", "statuses"],
        "get_run_info": ["run_ids"],
        "get_object": ["run_id", "object_id"],
        "store_object": ["run_id", "session_id", "object_id", "object_content"],
        "delete_messages": ["message_ins_ids"],
        "delete_sessions_in_run": ["run_id"],
        "acknowledge_task_heartbeat": ["task_id"],
    },
    InMemoryObjectStore: {"get_object_tree": ["object_id"], "delete_objects_in_run": ["run_id"]},
    server_internals: {"create_app": ["config", "superlink_lifespan_class"]},
    server_internals.runtime: {
        "acquire_task": ["request", "state"],
        "pull_task_input": ["request", "state", "task"],
        "push_task_output": ["request", "state", "task"],
        "get_nodes": ["request", "state", "task"],
        "push_messages": ["request", "state", "task"],
        "pull_messages": ["request", "state", "task"],
        "confirm_message_received": ["request", "state", "task"],
    },
    client_internals.FleetHttpClient: {
        name: ["request"]
        for name in (
            "ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages", "PushMessages",
            "PullObject", "PushObject", "ConfirmMessageReceived",
        )
    },
    server_internals.ControlHttpClient: {
        name: ["request"] for name in ("StartRun", "ListRuns", "ListNodes")
    },
}  # fmt: skip


@pytest.mark.parametrize("owner", USED, ids=lambda owner: owner.__name__.rpartition(".")[2])
def test_every_called_function_has_the_expected_parameters(owner):
    for name, expected in USED[owner].items():
        parameters = inspect.signature(getattr(owner, name)).parameters
        lacks = [parameter for parameter in expected if parameter not in parameters]
        assert not lacks, f"flwr {version('flwr')}: {name} takes no {lacks}, but {[*parameters]}"


def test_the_state_has_every_attribute_that_is_read():
    state = server_internals.SuperLink("secret").state
    assert isinstance(state, InMemoryLinkState), "uploads would end on disk"
    names = ("nodes", "message_ins_store", "message_ins_id_to_message_res_id", "object_store")
    assert [name for name in names if not hasattr(state, name)] == []


def test_flowers_server_is_configured_in_full():
    configured = {field.name for field in fields(server_internals._config("secret"))}
    expected = {*inspect.signature(server_internals.SuperLinkLifespanConfig).parameters}
    assert configured == expected
    assert len(expected) == 22, (
        f"flwr {version('flwr')} has other settings; check what the new ones open"
    )


def test_flowers_own_authentication_is_on_behind_the_gates_too():
    """If a gate fails, Flower still asks for keys and for the secret, and starts no program."""
    config = server_internals._config("secret")
    assert config.enable_supernode_auth
    assert config.isolation == "process"
    plugin = config.authn_plugin
    for token, is_valid in (("secret", True), ("secre", False), (b"secret", True), ("", False)):
        metadata = [(server_internals.ACCESS_TOKEN_KEY, token)] if token else []
        valid, account = plugin.validate_tokens_in_metadata(metadata)
        assert (valid, account is not None) == (is_valid, is_valid)
    assert plugin.get_login_details() is plugin.get_auth_tokens("code") is None


def test_another_version_of_flower_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("glocal.deploy.preflight.version", lambda _: "1.57.0")
    from glocal.deploy.preflight import require_flower

    with pytest.raises(
        InputError,
        match=r"Flower 1\.57\.0 is installed, 1\.41 or 1\.42 is needed; run: pip install",
    ):
        require_flower()
