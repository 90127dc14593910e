"""Plans from the host's lengths: asked for unless the user says otherwise, never written over one not yet copied."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs

from sglang_pp_spec.core.layout import TreeShape
from sglang_pp_spec.host import host_plans, streams
from sglang_pp_spec.host.host_plans import plan_behind_copy, prefer_host_plans

CHAIN, TREE = TreeShape(num_steps=2, topk=1, num_draft_tokens=3), TreeShape(2, 2, 4)
OPTIONS = (envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN, envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR)


class Wrapper:
    device = "cuda"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What host and events did, in order."""
    done: list[str] = []

    class Event:
        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    return done


def plan(wrapper: Wrapper, steps: list[str]) -> object:
    def original(given: Wrapper, lens: str, *, on_host: str) -> str:
        assert given is wrapper and (lens, on_host) == ("lens", "on host")
        steps.append("plan")
        return "planned"

    return plan_behind_copy(original, wrapper, "lens", on_host="on host")


def test_a_wrapper_s_next_plan_waits_until_the_one_before_was_copied(steps: list[str]) -> None:
    wrapper = Wrapper()
    assert plan(wrapper, steps) == "planned"
    plan(wrapper, steps)
    assert steps == ["plan", "record", "wait", "plan", "record"]


def test_wrappers_do_not_wait_for_each_other(steps: list[str]) -> None:
    one, other = Wrapper(), Wrapper()
    plan(one, steps)
    plan(other, steps)
    assert "wait" not in steps


def test_a_wrapper_is_forgotten_with_its_graph(steps: list[str]) -> None:
    before = len(host_plans._copied)
    wrapper = Wrapper()
    plan(wrapper, steps)
    del wrapper
    assert len(host_plans._copied) == before


@pytest.mark.parametrize(("given", "expected"), [(None, True), ("0", False), ("1", True)])
def test_plans_are_the_host_s_unless_the_user_says_otherwise(
    given: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option in OPTIONS:
        monkeypatch.setenv(option.name, given or "")  # brought back to what it was, whatever happens
        if given is None:
            del os.environ[option.name]
    prefer_host_plans(CHAIN)
    assert [option.get() for option in OPTIONS] == [expected] * 2


def test_trees_are_planned_as_sglang_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.name, raising=False)
    prefer_host_plans(TREE)
    assert not any(option.is_set() for option in OPTIONS)


@pytest.mark.parametrize(
    ("backends", "drafter", "expected"),
    [
        (("flashinfer", "flashinfer"), None, True),
        (("fa3", "flashinfer"), None, True),
        (("triton", "triton"), "flashinfer", True),
        (("triton", "triton"), None, False),
    ],
)
def test_flashinfer_is_found_wherever_it_may_be(backends, drafter, expected, monkeypatch) -> None:
    monkeypatch.setattr(host_plans, "attention_backends", lambda: backends)
    spec = SimpleNamespace(speculative_draft_attention_backend=drafter)
    monkeypatch.setattr(host_plans, "get_spec", lambda: spec)
    assert host_plans.uses_flashinfer() is expected


def test_lengths_are_read_when_they_are_asked_for_not_before(steps: list[str]) -> None:
    wait = streams.start_host_copy(torch.tensor([7, 9]))
    assert steps == ["record"]
    assert wait().tolist() == [7, 9] and steps == ["record", "wait"]
