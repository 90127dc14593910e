"""Every override of the host says what it is, why, how, what upstream knows of it and when it can go."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sglang_pp_spec"
FIELDS = ("Target:", "Why:", "How:", "Upstream:", "Remove when:")


def ledger_entries() -> list[tuple[str, str]]:
    """(where, docstring) of everything that names a host target."""
    found = []
    for path in sorted(path for part in ("host", "cpu_engine", "colocated") for path in PACKAGE.glob(f"{part}/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node) or ""
                if "Target:" in text:
                    found.append((f"{path.name}:{node.name}", text))
    return found


@pytest.mark.parametrize(("where", "text"), ledger_entries(), ids=[where for where, _ in ledger_entries()])
def test_an_override_fills_every_field_of_the_ledger_in_order(where: str, text: str) -> None:
    positions = [text.find(field) for field in FIELDS]
    assert -1 not in positions, f"{where} lacks {FIELDS[positions.index(-1)]}"
    assert positions == sorted(positions)


def test_the_scheduler_the_worker_and_the_argument_check_are_in_the_ledger() -> None:
    names = {where.split(":")[1] for where, _ in ledger_entries()}
    assert {"PPSpecScheduler", "TailDraftWorker", "check_before_host"} <= names
