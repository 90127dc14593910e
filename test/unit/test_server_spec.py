"""What a `ServerSpec` starts, without starting it."""

import json

import pytest

from sglang_pp_spec.server import Reply, ServerSpec, has_gpu, is_given, num_gpus, uses_cpu_engine
from sglang_pp_spec.server import spec as server


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("SGLANG_PP_SPEC_CPU_ENGINE", "1")


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setenv("SGLANG_PP_SPEC_CPU_ENGINE", "0")


def flags(spec: ServerSpec) -> dict[str, str]:
    command = spec.command(4711)
    return {a: b for a, b in zip(command, [*command[1:], ""], strict=True) if a.startswith("--")}


SWITCHES = [
    # mode, SGLANG_ENABLE_PP_SPEC, plugins allowed beside the CPU engine's
    ("nospec", None, []),
    ("plain", None, []),
    ("builtin", "1", []),
    ("plugin", "1", ["pp_spec"]),
]


@pytest.mark.parametrize("mode, enabled, allowed", SWITCHES)
def test_on_a_cpu_every_mode_allows_the_cpu_engine_and_only_plugin_allows_ours(on_cpu, mode, enabled, allowed):
    env = ServerSpec("m", "d", pp=2, mode=mode).environment({})
    assert env.get("SGLANG_ENABLE_PP_SPEC") == enabled
    assert env["SGLANG_PLUGINS"].split(",") == [*allowed, "pp_spec_cpu_engine"]
    assert env["SGLANG_PP_SPEC_CPU_ENGINE"] == "1"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


@pytest.mark.parametrize("mode, enabled, allowed", SWITCHES)
def test_on_a_gpu_an_excluded_plugin_leaves_a_list_that_is_not_empty(on_gpu, mode, enabled, allowed):
    env = ServerSpec("m", "d", pp=2, mode=mode).environment({})
    assert env.get("SGLANG_ENABLE_PP_SPEC") == enabled
    assert env["SGLANG_PLUGINS"] == (",".join(allowed) or "none-such")
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_switches_of_the_surrounding_shell_do_not_reach_an_arm(on_cpu):
    env = ServerSpec("m", "d", mode="plain").environment({"SGLANG_ENABLE_PP_SPEC": "1", "SGLANG_PLUGINS": "pp_spec"})
    assert "SGLANG_ENABLE_PP_SPEC" not in env
    assert "pp_spec" not in env["SGLANG_PLUGINS"].split(",")


def test_extra_environment_wins(on_cpu):
    extra = {"SGLANG_PLUGINS": "other", "SGLANG_PP_SPEC_STAGE_DELAY_MS": "5"}
    env = ServerSpec("m", "d", mode="plugin", extra_env=extra).environment({})
    assert extra.items() <= env.items()


def test_the_server_reaches_itself_past_a_proxy(on_cpu):
    env = ServerSpec("m", "d").environment({"http_proxy": "http://proxy:1", "NO_PROXY": "example.org"})
    assert env["NO_PROXY"] == env["no_proxy"] == "example.org,127.0.0.1,localhost"


@pytest.mark.parametrize("topk, steps, tokens", [(1, 2, 3), (2, 2, 4), (1, 4, 5)])
def test_the_number_of_draft_tokens_follows_from_steps_and_topk(on_gpu, topk, steps, tokens):
    given = flags(ServerSpec("m", "d", topk=topk, steps=steps))
    assert given["--speculative-algorithm"] == "EAGLE"
    assert given["--speculative-draft-model-path"] == "d"
    assert given["--speculative-eagle-topk"] == str(topk)
    assert given["--speculative-num-steps"] == str(steps)
    assert given["--speculative-num-draft-tokens"] == str(tokens)


def test_without_speculation_no_speculative_flag_is_passed(on_cpu):
    assert not any(flag.startswith("--speculative") for flag in flags(ServerSpec("m", mode="nospec")))


def test_a_target_with_its_own_draft_layers_gets_no_draft_path(on_gpu):
    assert "--speculative-draft-model-path" not in flags(ServerSpec("m", mode="plugin", pp=2))


def test_extra_arguments_replace_defaults_instead_of_repeating_them(on_cpu):
    extra = ("--dtype", "bfloat16", "--max-total-tokens=512", "--speculative-algorithm", "EAGLE3")
    command = ServerSpec("m", "d", extra_args=extra).command(1)
    assert command.count("--dtype") == command.count("--speculative-algorithm") == 1
    assert sum(part.startswith("--max-total-tokens") for part in command) == 1


def test_cpu_flags_are_added_only_on_a_cpu(monkeypatch):
    spec = ServerSpec("m", "d", pp=2)
    monkeypatch.setenv("SGLANG_PP_SPEC_CPU_ENGINE", "1")
    assert flags(spec)["--device"] == "cpu" and flags(spec)["--dtype"] == "float32"
    monkeypatch.setenv("SGLANG_PP_SPEC_CPU_ENGINE", "0")
    assert "--device" not in flags(spec) and "--dtype" not in flags(spec)


def test_stages_and_address_are_passed(on_gpu):
    given = flags(ServerSpec("m", "d", pp=4, tp=2, mode="plugin"))
    assert (given["--pp-size"], given["--tp-size"], given["--port"]) == ("4", "2", "4711")
    assert given["--host"] == "127.0.0.1"


@pytest.mark.parametrize("wrong", [{"mode": "fast"}, {"pp": 0}, {"topk": 0}, {"steps": 0}])
def test_a_spec_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValueError):
        ServerSpec("m", "d", **wrong)


def test_specs_can_be_keys_of_a_cache_of_servers():
    one, same = (ServerSpec("m", "d", extra_env={"A": "1"}) for _ in range(2))
    assert {one: "server"}[same] == "server"
    assert one != ServerSpec("m", "d", extra_env={"A": "2"})


@pytest.mark.parametrize(
    "environ, files, expected",
    [
        ({}, [], True),
        ({}, ["/dev/nvidia0"], False),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["/dev/nvidia0"], True),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["/dev/nvidia0"], False),
        ({"SGLANG_PP_SPEC_CPU_ENGINE": "1"}, ["/dev/nvidia0"], True),
        ({"SGLANG_PP_SPEC_CPU_ENGINE": "0"}, [], False),
    ],
)
def test_the_cpu_engine_serves_where_no_gpu_is_visible_or_where_it_is_asked_for(
    monkeypatch, environ, files, expected
):
    monkeypatch.setattr(server.glob, "glob", lambda pattern: files if "nvidia" in pattern else [])
    assert uses_cpu_engine(environ) is expected
    if "SGLANG_PP_SPEC_CPU_ENGINE" not in environ:
        assert has_gpu(environ) is not expected


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, 3), ("", 0), ("-1", 0), ("2", 1), ("0,2", 2), ("0,1,2,3", 3)]
)
def test_visible_gpus_are_counted_without_a_driver(monkeypatch, chosen, expected):
    """The preflight said "ok: GPU" for two stages on one GPU."""
    files = [f"/dev/nvidia{i}" for i in range(3)]
    monkeypatch.setattr(server.glob, "glob", lambda pattern: files if "nvidia" in pattern else [])
    assert num_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == expected


def test_two_amd_gpus_are_two():
    """They share one device file, so a preflight that counted those would refuse two stages."""
    files = {"/dev/kfd": ["/dev/kfd"], "/dev/dri/renderD*": ["/dev/dri/renderD128", "/dev/dri/renderD129"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.glob, "glob", lambda pattern: files.get(pattern, []))
        assert num_gpus({}) == 2


def test_a_flag_counts_as_given_in_both_spellings():
    assert is_given("--dtype", ["--dtype", "half"]) and is_given("--dtype", ["--dtype=half"])
    assert not is_given("--dtype", ["--dtype-x", "half"])


def test_a_reply_is_read_from_sglangs_answer():
    answer = {
        "text": " 7",
        "output_ids": [5, 6],
        "meta_info": {
            "completion_tokens": 2,
            "spec_verify_ct": 1,
            "spec_accept_length": 2.0,
            "finish_reason": {"type": "stop", "matched": 2},
        },
    }
    reply = Reply.from_json(json.loads(json.dumps(answer)))
    assert (reply.text, reply.token_ids, reply.completion_tokens) == (" 7", (5, 6), 2)
    assert (reply.verify_rounds, reply.accept_length, reply.finish_reason) == (1, 2.0, "stop")


def test_a_reply_without_speculation_has_no_rounds():
    meta = {"completion_tokens": 1, "finish_reason": None}
    reply = Reply.from_json({"text": "a", "output_ids": [1], "meta_info": meta})
    assert (reply.verify_rounds, reply.accept_length, reply.finish_reason) == (0, None, "")
