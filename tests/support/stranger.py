"""Somebody without a key or any right on this machine (uid 65534): what a server's port and files give away.

python -m tests.support.stranger < what-to-try.json > what-came-of-it.json

It starts as root, for the interpreter may lie where a stranger cannot read, and gives up every right
before it tries anything. Requests are made with the standard library alone.
"""

import encodings.idna  # noqa: F401 (sockets ask for it when nothing can be imported any more)
import http.client
import json
import os
import socket
import ssl
import sys
from pathlib import Path

NOBODY = 65534
CHUNK = b"x" * 2**16


def become_nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    rights = dict(
        line.split(":\t", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":\t" in line
    )
    assert {*rights["Uid"].split()} == {str(NOBODY)}
    assert int(rights["CapEff"], 16) == int(rights["CapPrm"], 16) == 0


def connection(port):
    """A line to the server, whoever it may be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)


def post(port, path, body=b"", headers=None, method="POST"):
    """The status of the answer, 0 if the line was cut."""
    line = connection(port)
    kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    try:
        line.request(method, path, body, {**kind, **(headers or {})})
        return line.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        line.close()


def flood(port, path, size, headers=None):
    """The status of the answer to a body of so many bytes, sent for as long as it is taken."""
    line = connection(port)
    try:
        line.putrequest("POST", path)
        given = {"content-type": "application/protobuf", "content-length": str(size)}
        for name, value in {**given, **(headers or {})}.items():
            line.putheader(name, value)
        line.endheaders()
        for _ in range(size // len(CHUNK)):
            line.send(CHUNK)
        return line.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        line.close()


def readable(paths):
    """Which files, and doors that are files, are open to a stranger."""
    found = []
    for path in paths:
        try:
            if path.endswith(".sock"):
                with socket.socket(socket.AF_UNIX) as door:
                    door.connect(path)
            else:
                Path(path).read_bytes()
            found.append(path)
        except OSError:
            continue
    return found


def main():
    wanted = json.load(sys.stdin)
    port = wanted["port"]
    become_nobody()
    body = bytes.fromhex(wanted.get("start", ""))
    told = {
        "uid": os.getuid(),
        "statuses": {path: post(port, path, method=how) for how, path in wanted.get("paths", [])},
        "started": post(port, "/v1/control/start-run", body) if body else None,
        "floods": [flood(port, path, wanted["size"]) for path in wanted.get("floods", [])],
        "readable": readable(wanted.get("files", [])),
    }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
