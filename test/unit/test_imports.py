"""What may import what: the contract's half knows no engine, and a plugin that is off is not there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_pp_spec

PACKAGE = Path(sglang_pp_spec.__file__).parent
CORE = sorted((PACKAGE / "core").glob("*.py"))
ENGINE_SIDE = ("host", "cpu_engine")


def imported_modules(file):
    """Top-level names of absolute imports anywhere in ``file``, and the relative ones as they are written."""
    absolute, relative = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            absolute.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            relative.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.ImportFrom):
            absolute.add(node.module.split(".")[0])
    return absolute, relative


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.stem)
def test_core_imports_the_standard_library_torch_and_itself(file):
    absolute, relative = imported_modules(file)
    assert absolute <= {"torch", *sys.stdlib_module_names}
    assert all(not name.startswith("..") for name in relative)


def test_only_host_and_cpu_engine_import_sglang():
    """One exception: the entry point that registers the CPU engine asks SGLang for its hook registry."""
    importing = {
        file.relative_to(PACKAGE)
        for file in PACKAGE.rglob("*.py")
        if imported_modules(file)[0] & {"sglang", "sgl_kernel"}
    }
    outside = {str(path) for path in importing if path.parts[0] not in ENGINE_SIDE}
    assert importing and outside <= {"plugin.py"}


def modules_after(code, **environ):
    """Modules of ours and of SGLang in a fresh process that ran ``code``."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG")}
    ours = "[m for m in sys.modules if m.split('.')[0] in ('sglang_pp_spec', 'sglang', 'torch')]"
    script = f"import sys\n{code}\nprint({ours})"
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean | environ, capture_output=True, text=True, timeout=60, check=True
    )
    return set(ast.literal_eval(done.stdout))


LOAD = """
from sglang_pp_spec.plugin import load, load_colocated, load_cpu_engine
load()
load_cpu_engine()
load_colocated()
"""


@pytest.mark.parametrize("value", [None, "", "0", "false", "off"])
def test_the_plugin_does_nothing_while_its_switches_are_off(value):
    """Every process of every server imports it, with or without pipeline parallelism."""
    switches = (
        () if value is None else ("SGLANG_ENABLE_PP_SPEC", "SGLANG_PP_SPEC_CPU_ENGINE", "SGLANG_PP_SPEC_COLOCATED")
    )
    loaded = modules_after(LOAD, **dict.fromkeys(switches, value or ""))
    assert loaded == {"sglang_pp_spec", "sglang_pp_spec.plugin"}


WRONG_SETTING = """
from sglang_pp_spec.plugin import load
try:
    load()
except SystemExit as error:
    assert "ON_MISMATCH" in str(error)
"""


def test_a_setting_that_is_wrong_ends_the_process_instead_of_a_native_server():
    """SGLang swallows what a plugin raises; only ``SystemExit`` gets through."""
    loaded = modules_after(WRONG_SETTING, SGLANG_ENABLE_PP_SPEC="1", SGLANG_PP_SPEC_ON_MISMATCH="whatever")
    assert "sglang" not in loaded and "sglang_pp_spec.host" not in loaded


def test_core_can_be_imported_where_sglang_cannot():
    hide = "import sys\nsys.modules['sglang'] = None\n"
    names = ", ".join(file.stem for file in CORE if file.stem != "__init__")
    assert "sglang_pp_spec.host" not in modules_after(f"{hide}from sglang_pp_spec.core import {names}")
