"""Preflight and launcher as a user runs them: one `ok:` line per check, or one `FAILED: reason; fix` and status 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pp_spec import check, launch
from sglang_pp_spec.core.checkpoint import PreflightFailure

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "CUDA_VISIBLE"))}
ON_CPU = {"SGLANG_PP_SPEC_CPU_ENGINE": "1"}


def run(module: str, *arguments: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"sglang_pp_spec.{module}", *arguments]
    return subprocess.run(command, env=CLEAN | env, cwd=cwd, capture_output=True, text=True, timeout=300)


def the_failure(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1, result.stdout + result.stderr
    *before, last = result.stdout.splitlines()
    assert all(line.startswith("ok: ") for line in before)
    assert last.startswith("FAILED: ") and "; " in last
    return last


@pytest.mark.parametrize("module", ["check", "launch"])
def test_a_plugin_that_is_switched_on_but_excluded_fails(module):
    """SGLang would start its built-in without a word, and every number would be somebody else's."""
    last = the_failure(run(module, env=ON_CPU | {"SGLANG_ENABLE_PP_SPEC": "1", "SGLANG_PLUGINS": "other"}))
    assert "leaves out pp_spec" in last and "unset SGLANG_PLUGINS" in last


def test_a_cpu_engine_that_is_excluded_fails_even_with_the_plugin_allowed():
    env = ON_CPU | {"SGLANG_ENABLE_PP_SPEC": "1", "SGLANG_PLUGINS": "pp_spec"}
    assert "leaves out pp_spec_cpu_engine" in the_failure(run("check", env=env))


def test_an_unknown_setting_fails_by_name():
    assert "SGLANG_PP_SPEC_SPEED" in the_failure(run("check", env=ON_CPU | {"SGLANG_PP_SPEC_SPEED": "11"}))


def test_a_folder_called_sglang_in_the_current_folder_fails(tmp_path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    last = the_failure(run("check", env=ON_CPU, cwd=tmp_path))
    assert str(tmp_path / "sglang") in last


def test_launching_with_the_switch_off_fails_instead_of_overriding_it():
    assert "says off" in the_failure(run("launch", env=ON_CPU | {"SGLANG_ENABLE_PP_SPEC": "0"}))


def test_launching_with_more_stages_than_layers_fails_before_anything_loads(tmp_path):
    config = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").touch()
    last = the_failure(run("launch", "--model-path", str(tmp_path), "--pp-size=3", env=ON_CPU))
    assert "3 pipeline stages" in last and "--pp 2" in last


def test_a_model_folder_that_is_not_there_fails():
    assert "no folder /no/such/model" in the_failure(run("check", "--model", "/no/such/model", env=ON_CPU))


def test_a_sound_installation_gives_only_ok_lines_with_the_plugin_on():
    result = run("check", env=ON_CPU | {"SGLANG_ENABLE_PP_SPEC": "1"})
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(lines) == 7 and all(line.startswith("ok: ") for line in lines)
    for word in ("sglang 0.5.23", "entry points pp_spec", "switched on and allowed", "tiny model", "host symbol"):
        assert any(word in line for line in lines), word


def test_a_host_that_changed_is_named_with_what_changed(monkeypatch):
    monkeypatch.setattr(check, "probe", lambda *_: ["Scheduler.run_batch lost pp_proxy_tensors"])
    with pytest.raises(PreflightFailure, match=r"lost pp_proxy_tensors; pip install sglang==0\.5\.23"):
        check.check_host_table({})


def test_a_probe_that_fails_passes_on_the_last_line_of_its_error():
    with pytest.raises(PreflightFailure, match="no such thing"):
        check.probe("raise RuntimeError('no such thing')", CLEAN | ON_CPU)


def test_fewer_gpus_than_stages_fail_unless_all_stages_share_one(monkeypatch):
    """The preflight said "ok: GPU", and the server failed a minute later, over NCCL."""
    monkeypatch.setattr(check, "num_gpus", lambda environ: 1)
    on_gpu = {"SGLANG_PP_SPEC_CPU_ENGINE": "0"}
    with pytest.raises(PreflightFailure, match=r"1 GPU\(s\) for 2 stages; take fewer stages"):
        check.check_device(on_gpu | {"SGLANG_PP_SPEC_COLOCATED": "0"}, num_stages=2)
    assert check.check_device(on_gpu | {"SGLANG_PP_SPEC_COLOCATED": "1"}, num_stages=2)
    assert check.check_device(on_gpu, num_stages=1)


def test_a_missing_entry_point_is_named(monkeypatch):
    monkeypatch.setattr(check.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(PreflightFailure, match=r"pp_spec .*not installed; run scripts/setup\.sh"):
        check.check_entry_points()


def test_a_hub_name_is_left_to_sglang_and_a_path_is_not():
    assert "left to SGLang" in check.check_models("owner/model", None, 2)[0]
    assert check.looks_like_folder("/data/model") and not check.looks_like_folder("owner/model")


def test_the_launcher_adds_what_the_cpu_engine_needs_and_keeps_what_is_given():
    given = ["--model-path", "m", "--pp-size", "4", "--max-total-tokens", "99"]
    command, env = launch.prepare(given, ON_CPU)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert command[3 : 3 + len(given)] == given
    assert command.count("--max-total-tokens") == 1 and "intel_amx" in command
    assert env["SGLANG_ENABLE_PP_SPEC"] == env["SGLANG_PP_SPEC_CPU_ENGINE"] == "1"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 3


def test_on_a_gpu_the_launcher_only_switches_the_plugin_on():
    command, env = launch.prepare(["--model-path", "m"], {"SGLANG_PP_SPEC_CPU_ENGINE": "0"})
    assert command[3:] == ["--model-path", "m"]
    assert env == {"SGLANG_PP_SPEC_CPU_ENGINE": "0", "SGLANG_ENABLE_PP_SPEC": "1"}
