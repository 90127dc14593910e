"""Does every wrong line die? Applies the mutants of the contract, one at a time, to a copy of the tree.

    scripts/mutants.sh              all of them
    scripts/mutants.sh -k fence     those whose group or name contains the words

A mutant is killed if its test fails, hangs past the limit or cannot run to its end; it survives if the test passes.
The run fails if a mutant survives, if its old text is not found exactly once, or if a test fails without a mutant.

Mutants of the contract that are not here, because only the real server has the line:

- accounting: skip finishing rows; reserve KV for one round too few
- chunk / retract: reset the chunk counter while a chunk is in flight
- drafter: the drafter branches on the target's stage

Those in ``test/ring/toy_*.py`` are wrong lines of the toy engine: they show that the simulator would
notice, not that the server's own line is right. "Send first on every stage" is not wrong here: frames do not travel
around a ring; its place is taken by "post first" and "order by parity".
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401  # with torch and pytest: loaded before the forks
import pytest
import torch
from mutant import Mutant
from table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("core", "host", "observe", "cpu_engine", "__init__.py", "plugin.py")
COPIED = (*(f"sglang_pp_spec/{part}" for part in PACKAGE), "test/unit", "test/ring", "test/contract")
TEST_SECONDS = 60  # of one mutant's test
ALL_TESTS_SECONDS = 300


@dataclass(frozen=True)
class Outcome:
    killed: bool
    how: str


def copy_tree(target: Path) -> None:
    """What the fast tests need, without caches."""
    for name in (*COPIED, "pyproject.toml"):
        source, place = ROOT / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, place)


def run_tests(tree: Path, arguments: list[str], seconds: int = TEST_SECONDS) -> Outcome:
    """Run pytest on the copy in a forked process: torch is loaded once, ``sglang_pp_spec`` anew every time."""
    output = tree / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(tree, arguments, output))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Outcome(True, f"hangs past {seconds} s")
    said = output.read_text()
    if process.exitcode == 0:
        return Outcome(False, "every test passed")
    if process.exitcode == 1:
        failed = next((line for line in said.splitlines() if line.startswith("FAILED")), "FAILED ?")
        return Outcome(True, failed.split("::")[-1].split(" - ")[0])
    return Outcome(False, f"pytest could not run (exit {process.exitcode}): {said[-500:]}")


def _pytest(tree: Path, arguments: list[str], output: Path) -> None:
    """In the child: the copy comes before an installed ``sglang_pp_spec``, and must be what is imported."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with output.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        import sglang_pp_spec.core.errors as ours

        if not str(ours.__file__).startswith(str(tree)):
            print(f"imports {ours.__file__} instead of the copy")
            os._exit(99)
        status = pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments])
        sys.stdout.flush()
        os._exit(int(status))


def try_mutant(tree: Path, mutant: Mutant) -> Outcome:
    """Put the wrong line in, run its test, take it out again."""
    file = tree / mutant.file
    right = file.read_text()
    found = right.count(mutant.old)
    if found != 1:
        return Outcome(False, f"its old text is in {mutant.file} {found} times, not once")
    file.write_text(right.replace(mutant.old, mutant.new))
    try:
        return run_tests(tree, arguments_of(mutant))
    finally:
        file.write_text(right)


def arguments_of(mutant: Mutant) -> list[str]:
    file, _, expression = mutant.tests.partition(" -k ")
    return [file, "-k", expression] if expression else [file]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", default="", help="only mutants whose group or name contains this")
    words = parser.parse_args().k
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    mutants = [mutant for mutant in MUTANTS if words in f"{mutant.group} {mutant.name}"]
    if not mutants:
        print(f"no mutant's group or name contains {words!r}")
        return 1
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        clean = run_tests(tree, sorted({arguments_of(mutant)[0] for mutant in mutants}), ALL_TESTS_SECONDS)
        if clean.how != "every test passed":
            print(f"without any mutant: {clean.how}")
            return 1
        killed = sum(report(mutant, try_mutant(tree, mutant)) for mutant in mutants)
    print(f"{time.monotonic() - start:.0f} s")
    print(f"killed {killed} of {len(mutants)}")
    return 0 if killed == len(mutants) else 1


def report(mutant: Mutant, outcome: Outcome) -> bool:
    word = "killed  " if outcome.killed else "SURVIVED"
    print(f"{word} {mutant.group}: {mutant.name} ({mutant.invariant}) <- {outcome.how}", flush=True)
    return outcome.killed


if __name__ == "__main__":
    sys.exit(main())
