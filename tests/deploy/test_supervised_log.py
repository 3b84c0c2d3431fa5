"""The log of a supervised program: limited in size, and private."""

import os
import threading
import time

from glocal.deploy import supervision


def test_a_log_and_its_predecessor_are_limited_and_private(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "_MAX_LOG", 1000)
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as file:
        for number in range(300):
            file.write(b"line %03d of the log\n" % number)
            supervision.limit_log(log)
            assert log.stat().st_size <= 1000
    earlier = tmp_path / "server.log.1"
    assert earlier.stat().st_size == 1000
    assert earlier.stat().st_mode & 0o077 == 0
    lines = (earlier.read_bytes() + log.read_bytes()).splitlines()[1:]  # the first is a part
    assert lines == [b"line %03d of the log" % number for number in range(300 - len(lines), 300)]
    assert len(lines) > 50
    assert {path.name for path in tmp_path.iterdir()} == {"server.log", "server.log.1"}


def test_a_supervised_program_has_a_limited_log(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision, "_MAX_LOG", 20_000)
    monkeypatch.setattr(supervision, "require_project", lambda folder: None)
    (tmp_path / "chatty.py").write_text(
        "import sys, time\n"
        "for number in range(100):\n"
        "    print('x' * 1000, file=sys.stderr, flush=True)\n"
        "    time.sleep(0.01)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    log, stop = tmp_path / "logs/chatty.log", threading.Event()
    log.parent.mkdir()
    log.with_name("chatty.log.1").write_bytes(b"x" * 50_000)
    program = supervision.Program("chatty", (tmp_path,), log)
    arguments = (program, stop, lambda text: None)
    thread = threading.Thread(
        target=supervision.supervise, args=arguments, kwargs={"every": 0.02}, daemon=True
    )
    thread.start()
    time.sleep(3.0)  # it has printed 100 kB by then
    stop.set()
    thread.join(10)
    assert log.stat().st_size <= 20_000
    assert log.with_name("chatty.log.1").stat().st_size == 20_000
