"""The public port under strangers who open connections and say nothing, or little at a time."""

import asyncio
import errno
import logging
import re
import resource
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import uvicorn

from glocal.deploy import public_server
from glocal.deploy.certificates import SERVER, SERVER_KEY, make_authority, make_server_certificate
from glocal.deploy.flower.gate import FleetGate
from glocal.deploy.preflight import free_port
from glocal.deploy.public_server import PublicServer, RareErrors, max_connections
from glocal.deploy.registry import revoke
from glocal.deploy.server_process import _COMMON
from tests.support import deployed
from tests.support.running import pids, running
from tests.support.stranger import post

TIMEOUT = 1.0  # seconds for a header in these tests, instead of 10
GET = b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "test")
    make_server_certificate(folder, ["127.0.0.1"])
    return folder


async def open_application(scope, receive, send):
    """An application that lets connections stay open, as Flower does for registered clients."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(certificates, limit=100, application=open_application):
    """A public server in a thread; the limit of connections is the caller's."""
    files = {"ssl_certfile": certificates / SERVER, "ssl_keyfile": certificates / SERVER_KEY}
    place = {"host": "127.0.0.1", "port": free_port(), "lifespan": "off"}
    server = PublicServer(uvicorn.Config(application, **place, **files, **_COMMON), lambda: limit)

    async def serve():
        server.loop = asyncio.get_running_loop()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server does not end"


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def plain(port):
    return socket.create_connection(("127.0.0.1", port), 20)


def encrypted(port, text=b""):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    line = context.wrap_socket(plain(port))
    line.sendall(text)
    return line


def is_accepted(port):
    try:
        encrypted(port).close()
    except OSError:
        return False
    return True


def answered(port):
    """A connection that has had a response, as those of clients have."""
    line = encrypted(port, GET)
    assert line.recv(1000).startswith(b"HTTP/1.1 204")
    return line


def seconds_open(line, drip=b""):
    """How long the server lets a connection be, while it gets a byte of `drip` now and then."""
    start = time.monotonic()
    line.settimeout(0.1)
    while time.monotonic() - start < 20:
        try:
            line.sendall(drip)
            if not line.recv(1000):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - start


SILENT = {
    "nothing, without TLS": lambda port: (plain(port), b""),
    "nothing, with TLS": lambda port: (encrypted(port), b""),
    "half a header": lambda port: (encrypted(port, GET[:20]), b""),
    "a header byte by byte": lambda port: (encrypted(port, b"GET /health HTTP/1.1\r\nx: "), b"x"),
    "a second header byte by byte": lambda port: (answered(port), b"x"),
}


@pytest.mark.parametrize("kind", SILENT)
def test_a_connection_without_a_whole_header_is_cut_in_time(kind, certificates, monkeypatch):
    monkeypatch.setattr(public_server, "HEADER_TIMEOUT", TIMEOUT)
    with served(certificates) as server:
        line, drip = SILENT[kind](server.config.port)
        with closing(line):
            assert 0.5 * TIMEOUT < seconds_open(line, drip) < 3 * TIMEOUT
        until(lambda: not server._open)


def test_a_connection_may_be_idle_between_two_requests(certificates, monkeypatch):
    monkeypatch.setattr(public_server, "HEADER_TIMEOUT", 0.3)
    with served(certificates) as server, closing(encrypted(server.config.port)) as line:
        for _ in range(3):
            line.sendall(GET)
            assert line.recv(1000).startswith(b"HTTP/1.1 204")
            time.sleep(0.6)


def test_strangers_push_each_other_out_and_no_client(certificates):
    """A client that has sent a request keeps its connection, and another client gets one."""
    with served(certificates, limit=5) as server:
        port, strangers = server.config.port, []
        with closing(answered(port)) as client:
            for _ in range(4):
                strangers += [plain(port), encrypted(port), encrypted(port, GET[:20])]
                assert len(server._open) <= 5
            client.sendall(GET)
            assert client.recv(1000).startswith(b"HTTP/1.1 204")
            assert post(port, "/health", method="GET") == 204
            assert len(server._open) <= 5
        for stranger in strangers:
            stranger.close()


def test_more_connections_than_the_limit_are_closed_where_all_have_requests(certificates):
    with served(certificates, limit=2) as server:
        port = server.config.port
        with closing(answered(port)), closing(answered(port)):
            assert not is_accepted(port)
            assert len(server._open) == 2
        until(lambda: not server._open)
        assert post(port, "/health", method="GET") == 204


def test_a_refused_request_leaves_no_connection(certificates, monkeypatch):
    """The gate closes it, also if the other side leaves it open: it does not count as a client."""
    monkeypatch.setattr(public_server, "_CLOSE_TIMEOUT", 0.5)
    gate = FleetGate(open_application, dict, None, 1000)
    with served(certificates, limit=3, application=gate) as server:
        lines = [encrypted(server.config.port, GET.replace(b"/health", b"/x")) for _ in range(5)]
        for line in lines[-3:]:
            assert line.recv(1000).startswith(b"HTTP/1.1 404")
        assert post(server.config.port, "/health", method="GET") == 200
        until(lambda: not server._open, seconds=3)
        for line in lines:
            line.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_dropped_connection_is_closed_before_another_takes_its_place(begun, certificates):
    """Otherwise the server could run out of files; also if it is dropped before it has begun."""
    ours, theirs = socket.socketpair()

    async def begin_and_drop(server):
        server._begin(ours)
        if begun:
            await asyncio.sleep(0.1)
        assert await server._make_room()
        return ours.fileno()

    with served(certificates) as server, closing(theirs):
        task = asyncio.run_coroutine_threadsafe(begin_and_drop(server), server.loop)
        assert task.result(10) == -1


def test_silent_strangers_do_not_delay_the_end_of_the_server(certificates):
    with served(certificates) as server:
        lines = [encrypted(server.config.port), encrypted(server.config.port, GET[:20])]
        until(lambda: len(server._open) == 2)
        server.should_exit, start = True, time.monotonic()
        until(lambda: server.loop.is_closed())
        assert time.monotonic() - start < 1.5
        for line in lines:
            line.close()


def test_errors_in_accepting_are_reported_once_and_the_server_goes_on(
    certificates, monkeypatch, caplog
):
    monkeypatch.setattr(public_server, "_ACCEPT_RETRY", 0.1)
    end, accept = time.monotonic() + 0.35, asyncio.SelectorEventLoop.sock_accept
    failures = []

    async def failing(loop, listener):
        if time.monotonic() < end:
            failures.append(time.monotonic())
            raise OSError(errno.EMFILE, "too many open files")
        return await accept(loop, listener)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", failing)
    with served(certificates) as server:
        assert post(server.config.port, "/health", method="GET") == 204
    assert 2 <= len(failures) <= 4, "it tries without a pause"
    logged = [record.message for record in caplog.records if record.name == "asyncio"]
    assert logged == ["a connection was not accepted"]


def test_one_error_a_minute_is_logged(caplog):
    loop, now = asyncio.new_event_loop(), [1000.0]
    loop.time = lambda: now[0]
    loop.set_exception_handler(RareErrors())
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        for seconds in range(0, 121, 10):
            now[0] = 1000.0 + seconds
            loop.call_exception_handler({"message": f"after {seconds} s"})
    loop.close()
    assert [record.message for record in caplog.records] == [
        "after 0 s",
        "after 60 s",
        "after 120 s",
    ]


def test_invalid_requests_of_strangers_are_not_logged(certificates, caplog):
    with served(certificates) as server:
        with closing(encrypted(server.config.port, b"\x00\x01\r\n\r\n")) as line:
            assert line.recv(1000).startswith(b"HTTP/1.1 400")
        upgrade = GET.replace(b"host: here", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c")
        with closing(encrypted(server.config.port, upgrade)) as line:
            assert line.recv(1000).startswith(b"HTTP/1.1 ")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_the_limit_grows_with_the_registry_and_leaves_files_for_the_rest(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10000, 10000))
    assert [max_connections(clients) for clients in (0, 4, 1000)] == [256, 272, 4256]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert max_connections(4) == 192
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert max_connections(4) == 272


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        public_server.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


IDLE = 400


def memory(pid):
    """The most bytes that a process has held so far."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1000


@pytest.mark.slow
def test_strangers_without_a_key_fill_neither_disk_nor_memory_nor_keep_clients_out(tmp_path):
    """More connections than the server may open files, of which most hold half a header."""
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=2, rounds=1, port=port)
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(folder) as deployment, ExitStack() as strangers:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before, 1024), most))  # a usual soft limit
        deployment.server()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
        [server] = [pid for pid in pids(folder) if pid not in pids(folder / "clients")]
        soft, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
        assert soft == hard
        idle = memory(server)
        resource.prlimit(server, resource.RLIMIT_NOFILE, (256, 256))
        for _ in range(IDLE):
            strangers.enter_context(plain(port))
            strangers.enter_context(encrypted(port, b"POST / HTTP/1.1\r\nx: " + b"a" * 8000))
        deployment.client("client-0")
        deployment.until_connected("client-0")
        revoke(folder, "client-1")
        deployment.until(lambda: any("client-1 may not connect" in x for x in deployment.notices))
        assert deployment.connected_or_none() == {"client-0"}
        time.sleep(public_server.HEADER_TIMEOUT)
        assert deployment.connected_or_none() == {"client-0"}
        files = len([*Path(f"/proc/{server}/fd").iterdir()])
        grown, logged = memory(server) - idle, (folder / "logs/server.log").read_text()
        print(f"{files} files, {grown / 1e6:.1f} MB more, {len(logged)} bytes of log")
        assert server in pids(folder), "the server was restarted"
    assert files < 64, "connections of strangers are still open"
    assert grown < 100e6
    assert not logged
    assert not any("restarting" in line for line in deployment.notices)
