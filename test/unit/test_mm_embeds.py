"""Embeddings of images reach the drafter, whichever stage made them, and no other forward's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from torch import Tensor

from sglang_pp_spec.host import engine, mm_embeds
from sglang_pp_spec.host.mm_embeds import KEY, embeds_in, give_to_drafter, send_with_hidden_states

EMBEDS = torch.arange(6.0).reshape(3, 2)


@pytest.fixture(autouse=True)
def is_pp_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_embeds, "is_pp_spec", lambda: True)


def proxy(**more: Tensor) -> PPProxyTensors:
    return PPProxyTensors({"hidden_states": torch.ones(3, 2), **more})


def forward(embeds: Tensor | None) -> SimpleNamespace:
    return SimpleNamespace(mm_input_embeds=embeds)


def test_the_first_stage_sends_them_and_leaves_its_output_as_it_was() -> None:
    """The output of a CUDA graph is the same object at the next replay, which may have no images."""
    output = proxy()
    sent = send_with_hidden_states(output, None, forward(EMBEDS))
    assert sent is not None and sent.tensors[KEY] is EMBEDS
    assert sent.tensors["hidden_states"] is output.tensors["hidden_states"]
    assert list(output.tensors) == ["hidden_states"]


def test_a_forward_without_images_and_a_last_stage_s_output_stay_as_they_are() -> None:
    assert send_with_hidden_states(proxy(), None, forward(None)) is None
    assert send_with_hidden_states(torch.ones(3, 2), None, forward(EMBEDS)) is None


def test_a_server_without_pp_spec_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_embeds, "is_pp_spec", lambda: False)
    assert send_with_hidden_states(proxy(), None, forward(EMBEDS)) is None


@pytest.mark.parametrize(("is_last", "names"), [(False, [KEY]), (True, [])])
def test_a_stage_between_passes_them_on(is_last: bool, names: list[str]) -> None:
    """Or the drafter behind three stages asserts that it has them, and the server ends."""
    stage = SimpleNamespace(scheduler=SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=is_last)))
    assert list(engine.SchedulerEngine._passes_on(stage, proxy(**{KEY: EMBEDS}))) == names


def test_the_last_stage_s_drafter_finds_them_on_the_target_s_result() -> None:
    output = SimpleNamespace(mm_input_embeds=None)
    give_to_drafter(SimpleNamespace(logits_output=output), None, None, None, proxy(**{KEY: EMBEDS}))
    assert output.mm_input_embeds is EMBEDS


def test_a_round_and_a_stage_without_logits_are_left_alone() -> None:
    output = SimpleNamespace(mm_input_embeds="its own")
    give_to_drafter(SimpleNamespace(logits_output=output), None, None, None, proxy())
    assert output.mm_input_embeds == "its own"
    give_to_drafter(SimpleNamespace(logits_output=None), None, None, None, proxy(**{KEY: EMBEDS}))
    assert embeds_in(None) == {}
