"""How long a deployment's rounds take, what its processes hold in memory, and how soon they are back after kill -9, as JSON.

python -m benchmarks.deployment --out docs/results/deployment.json

Digits, four devices: each in a process of its own, all four and twenty in one gateway, and on a plain
Flower installation (SuperLink and SuperNodes) with glocal's apps. Memory is resident, shared pages
included.
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
    """Measure one after the other, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    told = {"command": command("benchmarks.deployment", sys.argv[1:]), "machine": describe("cpu")}
    with tempfile.TemporaryDirectory() as place:
        told["four devices, a process each"] = apart(project(place, "apart", 4, given.rounds))
        told["four devices in a gateway"] = together(project(place, "four", 4, given.rounds))
        told["twenty devices in a gateway"] = together(project(place, "twenty", 20, given.rounds))
        told["after kill -9"] = kills(project(place, "killed", 4, 2))
        told["plain Flower, four SuperNodes"] = plain(project(place, "plain", 4, 4))
    if given.out:
        write_json(given.out, told)
    print(told)


def project(place: str, name: str, clients: int, rounds: int) -> Path:
    """The folder of a new deployment of digits."""
    wanted = DeploymentSpec(clients=clients, port=free_port(), rounds=rounds)
    return create_deployment(Path(place) / name, wanted).folder


def apart(folder: Path) -> dict[str, object]:
    """Every device in a process of its own."""
    with running(folder) as these:
        these.server()
        for name in names(folder):
            these.device(name)
        these.until_connected(*names(folder))
        these.follow("first")
        [server] = pids(folder, "server_process")
        held = {"server": megabytes(server)}
        held |= {
            Path(words(pid)[-1]).name: megabytes(pid) for pid in pids(folder, "client_process")
        }
    return {**seconds(folder), "MB in memory": held}


def together(folder: Path) -> dict[str, object]:
    """All devices in one process."""
    with running(folder) as these:
        these.server()
        these.device(*names(folder), who="gateway")
        these.until_connected(*names(folder))
        these.follow("first")
        [gateway] = pids(folder, "client_process")
        [server] = pids(folder, "server_process")
        held = {"gateway": megabytes(gateway), "server": megabytes(server)}
    return {**seconds(folder), "MB in memory": held}


def kills(folder: Path) -> dict[str, float]:
    """Seconds until a killed device is connected again, and until all are to a server that was killed."""
    with running(folder) as these:
        these.server()
        for name in names(folder):
            these.device(name)
        these.until_connected(*names(folder))
        times = {}
        began = time.monotonic()
        kill(folder / "devices/device-0", "client_process")
        these.until(lambda: sum("device-0: connected" in said for said in these.said) == 2)
        times["seconds until the device is back"] = round(time.monotonic() - began, 1)
        began = time.monotonic()
        kill(folder, "server_process")
        again = [f"{name}: connected again" for name in names(folder)]
        these.until(lambda: all(any(line in said for said in these.said) for line in again))
        times["seconds until all devices are back at a killed server"] = round(
            time.monotonic() - began, 1
        )
    return times


def plain(folder: Path) -> dict[str, object]:
    """The same apps, run by Flower's own programs."""
    text = GUIDE.read_text()
    app = text[text.index("# pyproject.toml") :].partition("```")[0]
    with stock(folder) as these:
        for name in names(folder):
            these.node(name)
        these.until_online(len(names(folder)))
        settings = {"folder": str(folder), "run": "first", "skip_training": False}
        these.run(start_request({"pyproject.toml": app}, settings))
    return seconds(folder)


def names(folder: Path) -> list[str]:
    """The devices."""
    return sorted(path.name for path in (folder / "devices").iterdir())


def seconds(folder: Path) -> dict[str, object]:
    """How long each round took; the first one has what every process does once."""
    taken = [row["seconds"] for row in read_rows(folder / "runs/first/rows.jsonl")]
    return {"seconds of each round": taken, "median after the first": round(median(taken[1:]), 2)}


def words(pid: int) -> list[str]:
    """A process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().strip("\0").split("\0")


def megabytes(pid: int) -> int:
    """What a process holds in memory."""
    with suppress(OSError):
        return round(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6)
    return 0


if __name__ == "__main__":
    main()
