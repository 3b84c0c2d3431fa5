"""The clients' process with an audit log: each file, import and program, and for which client."""

import json
import logging
import os
import sys

# The audited events, and the position of the argument to log.
WATCHED = {
    "open": 0,
    "os.listdir": 0,
    "os.scandir": 0,
    "os.mkdir": 0,
    "os.remove": 0,
    "os.rename": 0,
    "os.chmod": 0,
    "import": 0,
    "subprocess.Popen": 0,
    "os.exec": 0,
    "os.posix_spawn": 0,
    "os.system": 0,
    "os.fork": None,
    "socket.bind": 1,
}


def log_event(log, event, arguments):
    if event not in WATCHED:
        return
    position = WATCHED[event]
    subject = "" if position is None else str(arguments[position])
    module = sys.modules.get("glocal.deploy.client_process")
    current = module.CURRENT_FOLDER.get() if module else None
    line = json.dumps([str(current or ""), event, subject]) + "\n"
    os.write(log, line.encode())


if __name__ == "__main__":
    from glocal.deploy import child_process, client_process

    log = os.open(os.environ["GLOCAL_AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.addaudithook(lambda event, arguments: log_event(log, event, arguments))
    logging.getLogger().addHandler(client_process._PerClientLogs())
    child_process.run(client_process.main)
