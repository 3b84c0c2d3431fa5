"""Attacks on a server's port and files by a user without a key or any right here (uid 65534).

python -m tests.support.stranger < attempts.json > results.json

It starts as root, as the interpreter may be in a folder that a stranger cannot read, and gives up
every right before the first attempt. Requests are made with the standard library alone.
"""

import encodings.idna  # noqa: F401 (sockets need it when nothing can be imported any more)
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
    lines = Path("/proc/self/status").read_text().splitlines()
    rights = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert {*rights["Uid"].split()} == {str(NOBODY)}
    assert int(rights["CapEff"], 16) == int(rights["CapPrm"], 16) == 0


def connection(port):
    """A connection to any server at this port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)


def post(port, path, body=b"", headers=None, method="POST"):
    """The status of the response, 0 if the connection was cut."""
    web = connection(port)
    kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    try:
        web.request(method, path, body, {**kind, **(headers or {})})
        return web.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        web.close()


def flood(port, path, size, headers=None):
    """The status of the response to a body of `size` bytes, sent until the server stops it."""
    web = connection(port)
    try:
        web.putrequest("POST", path)
        own = {"content-type": "application/protobuf", "content-length": str(size)}
        for name, value in {**own, **(headers or {})}.items():
            web.putheader(name, value)
        web.endheaders()
        for _ in range(size // len(CHUNK)):
            web.send(CHUNK)
        return web.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        web.close()


def readable(paths):
    """The files and socket files that a stranger can open."""
    opened = []
    for path in paths:
        try:
            if path.endswith(".sock"):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
            else:
                Path(path).read_bytes()
            opened.append(path)
        except OSError:
            continue
    return opened


def main():
    attempts = json.load(sys.stdin)
    port = attempts["port"]
    become_nobody()
    body = bytes.fromhex(attempts.get("start", ""))
    results = {
        "uid": os.getuid(),
        "statuses": {
            path: post(port, path, method=name) for name, path in attempts.get("paths", [])
        },
        "started": post(port, "/v1/control/start-run", body) if body else None,
        "floods": [flood(port, path, attempts["size"]) for path in attempts.get("floods", [])],
        "readable": readable(attempts.get("files", [])),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
