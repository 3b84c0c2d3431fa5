"""Mutants: faults that are put into the library one at a time, each of which one test must find.

    python -m tests.mutants            # all of tests/mutants.toml
    python -m tests.mutants robust     # those of the files with this in their path

Each mutant is a copy of the package with one text replaced. Its test runs with the copy before the
package itself, and must fail; without a mutant, all tests must pass.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/glocal"
PASSED, FAILED = 0, 1  # what pytest returns; other numbers say that it could not run the tests


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in a `file` of the package; `test` must fail."""

    file: str
    old: str
    new: str
    test: str

    def change(self, package: Path) -> None:
        """Put the fault into a copy of the package."""
        path = package / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def read_mutants() -> list[Mutant]:
    """All mutants of tests/mutants.toml."""
    tables = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
    return [Mutant(**table) for table in tables["mutants"]]


def run_tests(tests: list[str], mutant: Mutant | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests with a copy of the package, with a mutant or as it is."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "glocal"
        shutil.copytree(PACKAGE, copy)
        if mutant is not None:
            mutant.change(copy)
        paths = [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )


def survives(mutant: Mutant) -> bool:
    """Whether its test does not find a mutant; one line says so."""
    ended = run_tests([mutant.test], mutant)
    if ended.returncode == FAILED:
        print(f"killed    {mutant.file}: {mutant.new.strip()!r}", flush=True)
        return False
    outcome = "SURVIVED" if ended.returncode == PASSED else f"pytest ended with {ended.returncode}"
    print(f"{outcome}  {mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}", flush=True)
    print(f"          {mutant.test}\n{ended.stdout[-2000:]}", flush=True)
    return True


def main() -> int:
    """The number of mutants that survive."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [mutant for mutant in read_mutants() if wanted in mutant.file]
    tests = sorted({mutant.test for mutant in mutants})
    unchanged = run_tests(tests)
    if unchanged.returncode != PASSED:
        print(unchanged.stdout[-4000:])
        print("the tests fail without any mutant; correct them first")
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        survivors = sum(pool.map(survives, mutants))
    print(f"{len(mutants)} mutants, {survivors} survive")
    return min(survivors, 100)


if __name__ == "__main__":
    sys.exit(main())
