"""The clients of a run, as the server sees them: registered, connected, identified, refused."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.deploy.flower.protocol import Reply
from glocal.deploy.project import Project
from glocal.deploy.registry import RegistryEntry, active_entries, read_registry


@dataclass
class RunClients:
    """Who takes part in a run.

    `registered` are all clients, as the registry had them when the round began. `connected` maps
    the nodes that are connected to client numbers, by their keys; `identified` those that have sent
    a valid handshake, `weights` as it says, and `refused` the others to the reason.
    `waiting_since` is None while enough clients are connected.
    """

    project: Project
    registered: dict[int, RegistryEntry] = field(init=False)
    connected: dict[int, int] = field(default_factory=dict)
    identified: dict[int, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    waiting_since: float | None = field(default_factory=time.monotonic)
    has_started: bool = False

    def __post_init__(self) -> None:
        self.registered = read_registry(self.project.folder)

    def active(self) -> dict[int, RegistryEntry]:
        """The clients that may connect."""
        return active_entries(self.registered)

    def update(self, nodes: Mapping[int, str]) -> dict[int, int]:
        """Take note of the connected nodes, given with their keys; those that owe a handshake.

        The registry is read here, once a round, as clients may be added or revoked during a run.
        """
        self.registered = read_registry(self.project.folder)
        numbers = {entry.ssh_key: number for number, entry in self.active().items()}
        self.connected = {}
        for node, key in sorted(nodes.items()):
            if key in numbers:
                self.connected[node] = numbers[key]
        pending = {}
        for node, client in self.connected.items():
            if node not in self.identified and node not in self.refused:
                pending[node] = client
        return pending

    def accept(self, replies: Mapping[int, Reply]) -> None:
        """Accept clients with the same algorithm and model; refuse the others for this run.

        A client that was lost during its handshake may send another when it is back.
        """
        for node, reply in replies.items():
            client = self.connected.get(node)
            if reply.lost or client is None:
                continue
            fault = reply.fault or _mismatch(reply.metrics, client, self.project.setup.fingerprint)
            if fault:
                self.refused[node] = fault
            else:
                self.identified[node] = client
                self.weights[node] = max(int(reply.metrics["weight"]), 1)

    def present(self) -> dict[int, int]:
        """The clients, by node, that are connected and identified."""
        return {node: client for node, client in self.identified.items() if node in self.connected}

    def offline(self) -> list[str]:
        """The names of those that may connect and are not present."""
        present = {*self.present().values()}
        return [entry.name for number, entry in self.active().items() if number not in present]

    def are_awaited(self) -> bool:
        """Whether to wait: for all clients before the first round, later for enough of them.

        The waits have limits: `start_timeout` for all, `connect_timeout` for enough.
        """
        limits, clients = self.project.deployment.limits, self.present()
        if self.waiting_since is None:
            self.waiting_since = time.monotonic()
        waited = time.monotonic() - self.waiting_since
        refused = [f"{name}: {reason}" for name, reason in self.refusals().items()]
        all_connected = len(clients) >= len(self.active()) - len(refused)
        may_start = all_connected or self.has_started or waited > limits.start_timeout
        if len(clients) >= limits.min_clients and may_start:
            self.has_started, self.waiting_since = True, None
            return False
        none_can_follow = all_connected and bool(refused)
        if waited > limits.connect_timeout or none_can_follow:
            details = f" (refused: {'; '.join(refused)})" if refused else ""
            raise InputError(
                f"run: {len(clients)} clients are connected after {waited:.0f} s, and "
                f"{limits.min_clients} are needed{details}; start more clients"
            )
        return True

    def refusals(self) -> dict[str, str]:
        """The reason of each refused client that is connected, by name."""
        reasons = {}
        for node, reason in self.refused.items():
            if node in self.connected:
                reasons[self.name_of(self.connected[node])] = reason
        return reasons

    def name_of(self, client: int) -> str:
        """A client's name; one that was removed from the registry goes by its number."""
        entry = self.registered.get(client)
        return entry.name if entry else f"client {client}"

    def names_of(self, clients: Iterable[int]) -> list[str]:
        """The names of clients, in the order of their numbers."""
        return [self.name_of(client) for client in sorted(clients)]


def _mismatch(identity: Json, number: int, fingerprint: str) -> str:
    """Why a client's handshake does not fit its key or the server's settings."""
    if identity.get("client") != number:
        return (
            f"it says that it is client {identity.get('client')}, "
            f"but its key is that of client {number}"
        )
    if identity.get("fingerprint") != fingerprint:
        return (
            "its study.toml, deploy.toml or model is not the server's; "
            "copy the server's files to it"
        )
    if not isinstance(identity.get("weight"), int):
        return f"its weight is {identity.get('weight')}; a whole number was expected"
    return ""
