"""The order of the last stage's round: what the host waits for, and what the device has to do meanwhile."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.host import tail_draft
from sglang_pp_spec.host.tail_draft import TailDraftWorker

LENGTHS = torch.tensor([7, 9])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the worker did, in order; a copy of lengths to the host is waited for where it says so."""
    done: list[str] = []

    def start_host_copy(tensor: object):
        done.append("start reading")

        def wait() -> torch.Tensor:
            done.append("wait")
            return LENGTHS

        return wait

    monkeypatch.setattr(tail_draft, "start_host_copy", start_host_copy)
    monkeypatch.setattr(TailDraftWorker, "spec_v2_attn_backends", (), raising=False)
    monkeypatch.setattr(TailDraftWorker, "_drafting", lambda self, span: contextlib.nullcontext())
    return done


def run_round(steps: list[str], monkeypatch: pytest.MonkeyPatch, *, plans_on_host: bool) -> SimpleNamespace:
    """The batch, after a verified round of two requests whose lengths are on a device."""
    monkeypatch.setattr(tail_draft, "decide_needs_cpu_seq_lens", lambda backends: plans_on_host)
    result = SimpleNamespace(new_seq_lens=SimpleNamespace(is_cpu=False), next_draft_input="draft input")

    def draft(batch, with_topology):
        steps.append("draft")
        return SimpleNamespace(draft_token=torch.zeros(6)), None, None

    worker = object.__new__(TailDraftWorker)
    worker.verify = lambda *args, **options: steps.append("verify") or result
    worker._draft_worker = SimpleNamespace(
        _draft_extend_for_decode=lambda *args, **options: steps.append("draft extend"), draft=draft
    )
    forward_mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(forward_mode=forward_mode, is_extend_in_batch=False, reqs=[1, 2])
    worker.forward_batch_generation(batch)
    return batch


def test_new_lengths_are_read_behind_the_verify_and_waited_for_before_the_draft_is_planned(
    steps, monkeypatch
) -> None:
    """flashinfer's draft of a slot is planned into a buffer that only this wait keeps from the other slot's."""
    batch = run_round(steps, monkeypatch, plans_on_host=True)
    assert steps == ["verify", "start reading", "draft extend", "wait", "draft"]
    assert batch.seq_lens_cpu is LENGTHS and batch.seq_lens_sum == 16


def test_a_drafter_that_plans_on_the_device_waits_for_nothing(steps, monkeypatch) -> None:
    batch = run_round(steps, monkeypatch, plans_on_host=False)
    assert steps == ["verify", "draft extend", "draft"]
    assert batch.seq_lens_cpu is None and batch.seq_lens_sum is None
