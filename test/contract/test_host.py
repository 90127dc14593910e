"""The plugin against the installed SGLang: the symbol table, the hooks really applied, every refusal, the failures.

SGLang decides at import what it runs on, so each test is one fresh process with the CPU engine's environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_pp_spec.cpu_engine.environment import cpu_environment
from sglang_pp_spec.host.symbols import HostSymbol, check_host


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that could serve on this machine."""
    full = cpu_environment(2, {**os.environ, "SGLANG_PLUGINS": "pp_spec,pp_spec_cpu_engine"}) | env
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=240)


INSTALLED = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.managers.scheduler as module
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_pp_spec.cpu_engine import delays, hooks, planning
from sglang_pp_spec.core.settings import Settings
from sglang_pp_spec.host.arguments import REFUSALS, check_arguments
from sglang_pp_spec.host.symbols import SYMBOLS, check_host
from types import SimpleNamespace as Args

base = dict(
    pp_size=2,
    speculative_algorithm="EAGLE",
    disaggregation_mode="null",
    cuda_graph_backend_prefill=None,
    enable_torch_compile=False,
)
wrong = {
    "pd-disaggregation": dict(disaggregation_mode="prefill"),
    "adaptive": dict(speculative_adaptive=True),
    "attention-dp": dict(attn_dp_size=2),
    "multi-layer-eagle": dict(enable_multi_layer_eagle=True),
    "mixed-chunk": dict(enable_mixed_chunk=True),
    "rejection-sampling": dict(speculative_use_rejection_sampling=True),
    "return-hidden-states": dict(enable_return_hidden_states=True),
    "hisparse": dict(enable_hisparse=True),
    "two-batch-overlap": dict(enable_two_batch_overlap=True),
    "lora": dict(enable_lora=True),
    "int8-states": dict(enable_int8_mamba_checkpoint=True),
    "streaming-sessions": dict(enable_streaming_session=True),
    "pdmux": dict(enable_pdmux=True),
    "min-free-slots": dict(min_free_slots_delay=2),
    "eagle3-prefill-graph": dict(speculative_algorithm="eagle3", cuda_graph_backend_prefill="breakable"),
    "eagle3-torch-compile": dict(speculative_algorithm="EAGLE3", enable_torch_compile=True),
}

def message(settings=None, **changes):
    try:
        check_arguments(Args(**(base | changes)), settings)
    except ValueError as error:
        return str(error)
    return ""

print(json.dumps({
    "class": module.Scheduler.__name__,
    "patched": sorted(HookRegistry._patched),
    "problems": check_host() + hooks.mismatches((*hooks.HOOKS, *delays.HOOKS, *planning.HOOKS)),
    "symbols": len(SYMBOLS),
    "names": [refusal.name for refusal in REFUSALS],
    "reasons": {refusal.name: refusal.reason for refusal in REFUSALS},
    "messages": {name: message(**changes) for name, changes in wrong.items()},
    "algorithms": {n: message(speculative_algorithm=n) for n in ("EAGLE", "NEXTN", "EAGLE3", "NGRAM", "STANDALONE")},
    "abort with tp": message(Settings(on_mismatch="abort"), tp_size=2, disable_radix_cache=True),
    "abort with prefixes": message(Settings(on_mismatch="abort"), tp_size=1, disable_radix_cache=False),
    "abort": message(Settings(on_mismatch="abort"), tp_size=1, disable_radix_cache=True),
    "one stage": message(pp_size=1, enable_mixed_chunk=True),
}))
"""


@pytest.fixture(scope="module")
def installed() -> dict:
    """What a server process looks like after SGLang loaded its plugins with the switch on."""
    done = run_python(INSTALLED, SGLANG_ENABLE_PP_SPEC="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_host_symbol_we_rely_on_has_the_parameters_we_use(installed: dict) -> None:
    assert installed["problems"] == []
    assert installed["symbols"] > 30


def test_our_scheduler_is_the_one_that_a_scheduler_process_builds(installed: dict) -> None:
    assert installed["class"] == "PPSpecScheduler"
    assert "sglang.srt.managers.scheduler.Scheduler" in installed["patched"]
    assert "sglang.srt.arg_groups.validation_hook.check_pipeline_parallel_compat" in installed["patched"]


def test_every_refusal_row_refuses_with_its_own_reason(installed: dict) -> None:
    assert sorted(installed["messages"]) == sorted(installed["names"]), "a refusal has no test, or a test no refusal"
    for name, message in installed["messages"].items():
        assert installed["reasons"][name] in message, f"{name} was accepted"


def test_only_eagles_trees_are_relayed_and_other_algorithms_are_refused_by_name(installed: dict) -> None:
    refused = {name for name, message in installed["algorithms"].items() if message}
    assert refused == {"NGRAM", "STANDALONE"}


def test_the_abort_policy_is_refused_where_ranks_of_a_stage_would_decide_for_themselves(installed: dict) -> None:
    assert "--tp-size" in installed["abort with tp"]
    assert installed["abort"] == ""


def test_the_abort_policy_is_refused_with_a_prefix_cache_that_only_some_stages_would_add_to(installed: dict) -> None:
    """Stages whose frame was right kept the prompt; the next one with that prefix had other lengths on each stage."""
    assert "--disable-radix-cache" in installed["abort with prefixes"]


def test_one_stage_is_served_as_if_we_were_not_there(installed: dict) -> None:
    assert installed["one stage"] == ""


def test_a_host_without_a_symbol_ends_the_server_with_symbol_version_and_fix() -> None:
    """SGLang swallows what a plugin raises and would go on natively; SystemExit it does not swallow."""
    done = run_python(
        "import sglang_pp_spec.host.symbols as table\n"
        "row = table._row('managers.scheduler.Scheduler.no_such_method', 'call', 'self', 'a test')\n"
        "table.check_host.__defaults__ = ((row,),)\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('still running')\n",
        SGLANG_ENABLE_PP_SPEC="1",
    )
    assert done.returncode != 0
    assert "still running" not in done.stdout
    for word in ("no_such_method", "sglang 0.5.23", "install sglang==0.5.23"):
        assert word in done.stderr


def test_a_module_that_is_there_but_does_not_import_is_told_from_a_missing_symbol(tmp_path, monkeypatch) -> None:
    """With a library missing, thirty lines used to say that SGLang had no scheduler and to install it again."""
    (tmp_path / "broken_host.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = tuple(HostSymbol(f"broken_host.{name}", "call", (), "a test") for name in ("one", "two"))
    (problem,) = check_host(rows)
    assert "libcuda.so.1" in problem
    assert "install sglang" not in problem


def test_an_unknown_setting_of_ours_ends_the_server_by_name() -> None:
    done = run_python(
        "from sglang.srt.plugins import load_plugins\nload_plugins()\nprint('still running')\n",
        SGLANG_ENABLE_PP_SPEC="1",
        SGLANG_PP_SPEC_TIMELIN="typo",
    )
    assert done.returncode != 0
    assert "SGLANG_PP_SPEC_TIMELIN" in done.stderr
    assert "still running" not in done.stdout


def test_without_the_switch_no_hook_of_ours_is_registered_and_only_the_entry_module_is_imported() -> None:
    done = run_python(
        "import sys, json\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "ours = [m for m in sys.modules if m.startswith('sglang_pp_spec')]\n"
        "print(json.dumps([sorted(ours), sorted(HookRegistry._hooks)]))\n",
        SGLANG_PP_SPEC_CPU_ENGINE="0",
        SGLANG_ENABLE_PP_SPEC="0",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    modules, hooks = json.loads(done.stdout.splitlines()[-1])
    assert modules == ["sglang_pp_spec", "sglang_pp_spec.plugin"]
    assert hooks == []
