"""Downloads from a real server on this machine, with scripted good and bad answers."""

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glocal.core.errors import InputError
from glocal.datasets.fetch import RemoteFile, fetch, has_checksum

BODY = np.random.default_rng(0).bytes(300_000)
HALF = len(BODY) // 2


class Server(ThreadingHTTPServer):
    """Answers the n-th request with its n-th answer, and later ones with the last answer.

    `requests` holds the path and the Range header of each.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None]] = []
        self.answers: list[Callable[[Handler], None]] = []
        self.over = threading.Event()

    def url(self, path: str = "/file") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def script(self, *answers: Callable[["Handler"], None]) -> None:
        self.requests, self.answers = [], list(answers)

    def ranges(self) -> list[str | None]:
        return [byte_range for _, byte_range in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Range"]))
        answers = self.server.answers
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def start(self) -> int:
        return (
            int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if self.headers["Range"]
            else 0
        )

    def head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def head_of_rest(self) -> bytes:
        start, total = self.start(), len(BODY)
        if start:
            self.head(
                206,
                Content_Length=total - start,
                Content_Range=f"bytes {start}-{total - 1}/{total}",
            )
        else:
            self.head(200, Content_Length=total)
        return BODY[start:]

    def log_message(self, format: str, *args: object) -> None:
        pass


def well(handler: Handler) -> None:
    handler.wfile.write(handler.head_of_rest())


def cut_after(count: int) -> Callable[[Handler], None]:
    def truncating(handler: Handler) -> None:
        handler.wfile.write(handler.head_of_rest()[:count])

    return truncating


def stalling(handler: Handler) -> None:
    handler.wfile.write(handler.head_of_rest()[:HALF])
    handler.wfile.flush()
    handler.server.over.wait(20)


def corrupting(handler: Handler) -> None:
    rest = handler.head_of_rest()
    handler.wfile.write(rest[:-1] + bytes([rest[-1] ^ 1]))


def ignoring_range(handler: Handler) -> None:
    handler.head(200, Content_Length=len(BODY))
    handler.wfile.write(BODY)


def refusing_range(handler: Handler) -> None:
    if handler.headers["Range"]:
        handler.head(416)
    else:
        well(handler)


def misplacing_range(handler: Handler) -> None:
    handler.head(
        206, Content_Length=len(BODY), Content_Range=f"bytes 0-{len(BODY) - 1}/{len(BODY)}"
    )
    handler.wfile.write(BODY)


def going_on(handler: Handler) -> None:
    handler.head(200)
    handler.wfile.write(BODY + b"more")


def log_in_page(handler: Handler) -> None:
    handler.head(200, Content_Length=11)
    handler.wfile.write(b"please pay!")


def missing(handler: Handler) -> None:
    handler.head(404)


def missing_but_on_the_mirror(handler: Handler) -> None:
    (well if handler.path == "/mirror" else missing)(handler)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.over.set()
        server.shutdown()


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("glocal.datasets.fetch._BACKOFF", 0)
    return running


def remote_on(server: Server, *paths: str) -> RemoteFile:
    return RemoteFile(
        "file",
        tuple(server.url(path) for path in paths or ("/file",)),
        hashlib.sha256(BODY).hexdigest(),
        len(BODY),
    )


def left_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_fetched_whole_and_every_byte_is_reported(server: Server, tmp_path: Path) -> None:
    server.script(well)
    reports: list[tuple[str, int, int]] = []
    path = fetch(
        remote_on(server),
        tmp_path / "new" / "folder",
        report=lambda *progress: reports.append(progress),
    )
    assert left_in(path.parent) == {"file": BODY}
    assert reports[-1] == ("file", len(BODY), len(BODY))
    assert [done for _, done, _ in reports] == sorted({done for _, done, _ in reports})


def test_a_file_that_is_right_already_is_not_requested(server: Server, tmp_path: Path) -> None:
    server.script(well)
    (tmp_path / "file").write_bytes(BODY)
    assert fetch(remote_on(server), tmp_path) == tmp_path / "file"
    assert server.requests == []


def test_a_part_is_resumed_from_its_end(server: Server, tmp_path: Path) -> None:
    server.script(well)
    (tmp_path / "file.part").write_bytes(BODY[:1234])
    fetch(remote_on(server), tmp_path)
    assert server.ranges() == ["bytes=1234-"]
    assert left_in(tmp_path) == {"file": BODY}


def test_a_complete_part_is_checked_without_a_request(server: Server, tmp_path: Path) -> None:
    server.script(missing)
    (tmp_path / "file.part").write_bytes(BODY)
    fetch(remote_on(server), tmp_path)
    assert server.requests == []
    assert left_in(tmp_path) == {"file": BODY}


@pytest.mark.parametrize(
    ("leftover", "ranges"),
    [(BODY + b"x", [None]), (bytes(len(BODY)), [None]), (bytes(10), ["bytes=10-", None])],
    ids=["too long", "wrong", "wrong and short"],
)
def test_a_useless_part_is_thrown_away(
    server: Server, tmp_path: Path, leftover: bytes, ranges: list[str | None]
) -> None:
    server.script(well)
    (tmp_path / "file.part").write_bytes(leftover)
    fetch(remote_on(server), tmp_path)
    assert server.ranges() == ranges
    assert left_in(tmp_path) == {"file": BODY}


def test_a_stalled_download_times_out_and_is_resumed(server: Server, tmp_path: Path) -> None:
    server.script(stalling, well)
    fetch(remote_on(server), tmp_path, timeout=0.3)
    assert server.ranges() == [None, f"bytes={HALF}-"]
    assert left_in(tmp_path) == {"file": BODY}


@settings(max_examples=25)
@given(present=st.integers(0, len(BODY)), cuts=st.lists(st.integers(0, len(BODY)), max_size=3))
def test_wherever_a_download_breaks_off_the_file_ends_up_whole(
    running: Server, present: int, cuts: list[int]
) -> None:
    running.script(*(cut_after(count) for count in cuts), well)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("glocal.datasets.fetch._BACKOFF", 0)
        (Path(folder) / "file.part").write_bytes(BODY[:present])
        fetch(remote_on(running), Path(folder), attempts=4)
        assert left_in(Path(folder)) == {"file": BODY}


def test_a_truncated_download_stays_as_a_part_when_attempts_run_out(
    server: Server, tmp_path: Path
) -> None:
    server.script(cut_after(1000))
    with pytest.raises(InputError, match="broke off after 3000 of 300000 bytes"):
        fetch(remote_on(server), tmp_path)
    assert left_in(tmp_path) == {"file.part": BODY[:3000]}


def test_a_corrupt_download_is_thrown_away_and_begun_again(server: Server, tmp_path: Path) -> None:
    server.script(corrupting, well)
    fetch(remote_on(server), tmp_path)
    assert server.ranges() == [None, None]
    assert left_in(tmp_path) == {"file": BODY}


def test_a_file_that_is_always_corrupt_is_one_line_with_both_checksums(
    server: Server, tmp_path: Path
) -> None:
    server.script(corrupting)
    wrong = hashlib.sha256(BODY[:-1] + bytes([BODY[-1] ^ 1])).hexdigest()
    with pytest.raises(InputError) as caught:
        fetch(remote_on(server), tmp_path)
    message = str(caught.value)
    assert message.startswith(
        f"data: could not download file (tried {server.url()} got checksum {wrong[:12]}.."
    )
    assert remote_on(server).sha256[:12] in message
    assert str(tmp_path) in message
    assert "GLOCAL_DATA" in message
    assert "\n" not in message
    assert left_in(tmp_path) == {}


@pytest.mark.parametrize("answer", [ignoring_range, refusing_range])
def test_a_server_that_cannot_resume_sends_it_all(
    server: Server, tmp_path: Path, answer: Callable[[Handler], None]
) -> None:
    server.script(answer)
    (tmp_path / "file.part").write_bytes(b"?" * 5000)
    fetch(remote_on(server), tmp_path, attempts=1)
    assert server.ranges()[0] == "bytes=5000-"
    assert left_in(tmp_path) == {"file": BODY}


def test_an_answer_to_another_range_is_not_appended(server: Server, tmp_path: Path) -> None:
    server.script(misplacing_range, well)
    (tmp_path / "file.part").write_bytes(BODY[:5000])
    fetch(remote_on(server), tmp_path)
    assert server.ranges() == ["bytes=5000-", "bytes=5000-"]
    assert left_in(tmp_path) == {"file": BODY}


def test_a_body_that_goes_on_is_thrown_away(server: Server, tmp_path: Path) -> None:
    server.script(going_on)
    written: list[int] = []
    with pytest.raises(InputError, match="sent more than the 300000 bytes expected"):
        fetch(remote_on(server), tmp_path, report=lambda name, done, total: written.append(done))
    assert max(written) <= len(BODY)
    assert left_in(tmp_path) == {}


def test_a_log_in_page_does_not_spoil_the_part(server: Server, tmp_path: Path) -> None:
    server.script(log_in_page, well)
    (tmp_path / "file.part").write_bytes(BODY[:5000])
    fetch(remote_on(server), tmp_path)
    assert server.ranges() == ["bytes=5000-", "bytes=5000-"]
    assert left_in(tmp_path) == {"file": BODY}


def test_the_second_url_is_used_when_the_first_has_nothing(server: Server, tmp_path: Path) -> None:
    server.script(missing_but_on_the_mirror)
    fetch(remote_on(server, "/file", "/mirror"), tmp_path)
    assert [path for path, _ in server.requests] == ["/file", "/mirror"]
    assert left_in(tmp_path) == {"file": BODY}


def test_every_url_gets_its_turns_and_is_named_at_the_end(server: Server, tmp_path: Path) -> None:
    server.script(missing)
    with pytest.raises(InputError) as caught:
        fetch(remote_on(server, "/one", "/two"), tmp_path, attempts=2)
    assert [path for path, _ in server.requests] == ["/one", "/two"] * 2
    assert (
        f"{server.url('/one')} answered 404 Not Found; {server.url('/two')} answered 404 Not Found"
        in str(caught.value)
    )


def test_a_server_that_is_not_there_is_one_line(server: Server, tmp_path: Path) -> None:
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        remote = RemoteFile("file", (f"http://127.0.0.1:{bound.getsockname()[1]}/file",), "00", 1)
        with pytest.raises(
            InputError, match=r"could not download file \(tried http://.* failed: .*refused"
        ):
            fetch(remote, tmp_path, attempts=1)


def test_a_wrong_file_stays_until_a_right_one_is_here(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    server.script(corrupting)
    with pytest.raises(InputError):
        fetch(remote_on(server), tmp_path)
    assert left_in(tmp_path) == {"file": b"precious"}
    server.script(well)
    fetch(remote_on(server), tmp_path)
    assert left_in(tmp_path) == {"file": BODY}


def test_two_at_once_download_it_once(server: Server, tmp_path: Path) -> None:
    server.script(well)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch(remote_on(server), tmp_path), range(4)))
    assert len(server.requests) == 1
    assert left_in(tmp_path) == {"file": BODY}


def test_a_folder_that_cannot_be_made_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file, not a folder")
    with pytest.raises(
        InputError, match=r"could not write .*occupied.* set GLOCAL_CACHE to another folder"
    ):
        fetch(remote_on(server), tmp_path / "occupied" / "folder")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_a_full_disk_is_one_line_without_another_attempt(server: Server, tmp_path: Path) -> None:
    server.script(well)
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(
        InputError, match=r"could not write .*file\.part \(No space left on device\); make room"
    ) as caught:
        fetch(remote_on(server), tmp_path)
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 1


def test_a_file_is_verified_by_its_checksum(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    published = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert has_checksum(tmp_path / "abc", published)
    assert not has_checksum(tmp_path / "abc", published.replace("b", "c"))
    assert not has_checksum(tmp_path / "not there", published)
