"""What a deployment holds in memory and how long its rounds take: `glocal deploy demo`, watched from outside, as JSON.

python -m benchmarks.deployment --out docs/results/deployment.json

A program belongs to the server or to a device by the home that Flower was given; what it holds is its resident memory, shared
pages included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.machine import command, describe
from glocal.keep import read_rows, write_json

EVERY = 0.5  # seconds


def main() -> None:
    """Run, watch, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        demo = subprocess.Popen([sys.executable, "-m", "glocal", "deploy", "demo"], cwd=place, stdout=subprocess.DEVNULL)
        held: dict[str, list[int]] = defaultdict(list)
        while demo.poll() is None:
            for home, size in resident(place).items():
                held[home].append(size)
            time.sleep(EVERY)
        rows = [row for path in Path(place).rglob("rows.jsonl") for row in read_rows(path)]
        seconds = round(time.monotonic() - began, 1)
    told = {
        "command": command("benchmarks.deployment", sys.argv[1:]),
        "machine": describe("cpu"),
        "seconds": seconds,
        "seconds of each round": [row["seconds"] for row in rows],
        "MB in memory": {
            home: {"median": round(median(sizes) / 1e6), "most": round(max(sizes) / 1e6)} for home, sizes in held.items()
        },
    }
    print(json.dumps(told, indent=1))
    if given.out:
        write_json(given.out, told)


def resident(place: str) -> dict[str, int]:
    """Bytes of all programs by the home that they were given, of those under a folder."""
    found: dict[str, int] = defaultdict(int)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            pages = int((process / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
        homes = [entry[len(b"FLWR_HOME=") :].decode() for entry in environment if entry.startswith(b"FLWR_HOME=")]
        if homes and homes[0].startswith(str(Path(place).resolve())):
            parts = Path(homes[0]).parts
            found[parts[parts.index("devices") + 1] if "devices" in parts else "server"] += pages * 4096
    return found


if __name__ == "__main__":
    main()
