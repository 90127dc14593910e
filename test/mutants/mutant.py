"""A mutant: one wrong line, and the test that must notice; with it what more than one table names."""

from __future__ import annotations

from dataclasses import dataclass

CORE = "sglang_pp_spec/core/"
TOY = "test/ring/toy_engine.py"
FRAME = "test/unit/test_frame.py"
LEDGER = "test/unit/test_ledger.py"
TREES = "test/unit/test_tree_rows.py"
ENDS = "test/ring/test_end_of_requests.py"
RECOMPOSED = "test/ring/test_recomposition.py"
CHUNKS = "test/ring/test_chunks.py"


@dataclass(frozen=True)
class Mutant:
    """``old`` (exactly once in ``file``) becomes ``new``; ``tests`` are arguments of pytest."""

    group: str
    name: str
    invariant: str  # numbers of the contract
    file: str
    old: str
    new: str
    tests: str


def in_frame(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "frame.py", old, new, tests)


def in_ledger(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "ledger.py", old, new, tests)


def in_loop(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "stage_loop.py", old, new, tests)


def in_apply(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "apply.py", old, new, tests)


def in_trees(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "tree_rows.py", old, new, tests)
