"""A deployment's seconds per round, its memory, and its recovery after kill -9, as JSON.

python -m benchmarks.deployment --out docs/results/deployment.json

Digits, four clients: each in its own process, all four and twenty in one gateway, and on a plain
Flower installation (SuperLink and SuperNodes) with glocal's apps. Memory is resident and includes
shared pages.
"""

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from benchmarks.machine import command, describe
from glocal.core.files import read_rows, write_json
from glocal.deploy.preflight import free_port
from glocal.deploy.scaffold import DeploymentSpec, create_deployment
from tests.support.running import kill, pids, running
from tests.support.stock import start_request, stock

GUIDE = Path(__file__).parents[1] / "docs/deploy.md"


def main() -> None:
    """Measure all in turn, print the results and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    result = {"command": command("benchmarks.deployment", sys.argv[1:]), "machine": describe("cpu")}
    with tempfile.TemporaryDirectory() as folder:
        result["four clients, a process each"] = apart(project(folder, "apart", 4, options.rounds))
        result["four clients in a gateway"] = together(project(folder, "four", 4, options.rounds))
        result["twenty clients in a gateway"] = together(
            project(folder, "twenty", 20, options.rounds)
        )
        result["after kill -9"] = recovery(project(folder, "killed", 4, 2))
        result["plain Flower, four SuperNodes"] = plain_flower(project(folder, "plain", 4, 4))
    if options.out:
        write_json(options.out, result)
    print(result)


def project(folder: str, name: str, clients: int, rounds: int) -> Path:
    """The folder of a new deployment of digits."""
    spec = DeploymentSpec(clients=clients, port=free_port(), rounds=rounds)
    return create_deployment(Path(folder) / name, spec).folder


def apart(folder: Path) -> dict[str, object]:
    """Every client in its own process."""
    with running(folder) as deployment:
        deployment.server()
        for name in names(folder):
            deployment.client(name)
        deployment.until_connected(*names(folder))
        deployment.follow("first")
        [server] = pids(folder, "server_process")
        memory = {"server": megabytes(server)}
        for pid in pids(folder, "client_process"):
            memory[Path(arguments(pid)[-1]).name] = megabytes(pid)
    return {**seconds(folder), "MB in memory": memory}


def together(folder: Path) -> dict[str, object]:
    """All clients in one process."""
    with running(folder) as deployment:
        deployment.server()
        deployment.client(*names(folder))
        deployment.until_connected(*names(folder))
        deployment.follow("first")
        [gateway] = pids(folder, "client_process")
        [server] = pids(folder, "server_process")
        memory = {"gateway": megabytes(gateway), "server": megabytes(server)}
    return {**seconds(folder), "MB in memory": memory}


def recovery(folder: Path) -> dict[str, float]:
    """Seconds until a killed client is connected again, and all clients to a killed server."""
    with running(folder) as deployment:
        deployment.server()
        for name in names(folder):
            deployment.client(name)
        for name in names(folder):  # until each knows its node, and not the server alone
            deployment.until(lambda line=f"{name}: connected": count(deployment.notices, line))
        times = {}
        start = time.monotonic()
        kill(folder / "clients/client-0", "client_process")
        deployment.until(lambda: count(deployment.notices, "client-0: connected") == 2)
        times["seconds until the client is back"] = round(time.monotonic() - start, 1)
        start = time.monotonic()
        kill(folder, "server_process")
        for name in names(folder):
            deployment.until(
                lambda line=f"{name}: connected again": count(deployment.notices, line)
            )
        seconds_until_back = round(time.monotonic() - start, 1)
        times["seconds until all clients are back at a killed server"] = seconds_until_back
    return times


def count(notices: list[str], text: str) -> int:
    """How many notices contain a text."""
    return sum(text in notice for notice in notices)


def plain_flower(folder: Path) -> dict[str, object]:
    """The same apps, run by Flower's own programs."""
    text = GUIDE.read_text()
    app = text[text.index("# pyproject.toml") :].partition("```")[0]
    with stock(folder) as deployment:
        for name in names(folder):
            deployment.node(name)
        deployment.until_online(len(names(folder)))
        settings = {"folder": str(folder), "run": "first", "skip_training": False}
        deployment.run(start_request({"pyproject.toml": app}, settings))
    return seconds(folder)


def names(folder: Path) -> list[str]:
    """The names of the clients."""
    return sorted(path.name for path in (folder / "clients").iterdir())


def seconds(folder: Path) -> dict[str, object]:
    """Seconds of each round; the first includes the work that every process does once."""
    rounds = [row["seconds"] for row in read_rows(folder / "runs/first/rows.jsonl")]
    return {"seconds of each round": rounds, "median after the first": round(median(rounds[1:]), 2)}


def arguments(pid: int) -> list[str]:
    """A process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().strip("\0").split("\0")


def megabytes(pid: int) -> int:
    """The resident memory of a process."""
    with suppress(OSError):
        return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6)
    return 0


if __name__ == "__main__":
    main()
