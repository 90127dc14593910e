"""Frames between real processes over gloo: from the last stage to all others, in order, refused if layouts differ."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

from sglang_pp_spec.core.channel import FrameChannel
from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import FrameHeader, FrameKind, begin_frame, check_frame
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import FrameLayout, TreeShape

LAYOUT = FrameLayout(TreeShape(num_steps=2, topk=1, num_draft_tokens=3), capacity=4)


def run_stages(
    num_stages: int, body: Callable[[FrameChannel], object], folder: str, **changes: object
) -> list[object]:
    """What ``body`` returned on every stage, in order; a stage that hangs or dies fails the test."""
    return run_processes(num_stages, stage_process, num_stages, body, f"{folder}/rendezvous", changes)


def stage_process(stage: int, results, num_stages: int, body, path: str, changes: dict) -> None:
    """One stage: a group, a channel, the body."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=stage, world_size=num_stages, timeout=limit)
    layout = changes.get("layout_of_stage", {}).get(stage, LAYOUT)
    channel = FrameChannel(
        layout,
        group=dist.new_group(list(range(num_stages)), backend="gloo"),
        ranks=list(range(num_stages)),
        stage=stage,
        device=torch.device("cpu"),
        timeout_s=float(changes.get("timeout_s", 60.0)),
    )
    try:
        results.put((stage, body(channel)))
    except FrameRefused as refused:
        results.put((stage, f"refused: {refused}"))
    dist.barrier() if changes.get("timeout_s") is None and "layout_of_stage" not in changes else time.sleep(3)


def frame(step: int, slot: int) -> tuple[torch.Tensor, FrameHeader, list[RowIdentity]]:
    """A frame of two rows that names its step."""
    header = FrameHeader(epoch=7, step=step, slot=slot, kind=FrameKind.PREFILL, num_rows=2)
    rows = [RowIdentity(f"r{step}", 1), RowIdentity("other", step)]
    return begin_frame(header, rows, LAYOUT, num_accepted=[1, 1], num_drafts=[2, 0]), header, rows


def exchange(channel: FrameChannel) -> int:
    """Twenty steps over three slots, receives posted a full round early; the number of frames that were right."""
    channel.open()
    slots, right = 3, 0
    if channel.is_sender:
        for step in range(20):
            channel.send(step % slots, frame(step, step % slots)[0])
            time.sleep(0.002)
        return 20
    for step in range(slots):
        channel.post(step % slots)
    for step in range(20):
        _, header, rows = frame(step, step % slots)
        check_frame(channel.receive(step % slots), header, rows, LAYOUT)
        right += 1
        if step + slots < 20:
            channel.post(step % slots)
    return right


def hello(channel: FrameChannel) -> str:
    channel.open()
    return "opened"


def wait_for_nothing(channel: FrameChannel) -> str:
    channel.open()
    if not channel.is_sender:
        channel.post(0)
        channel.receive(0)
    return "sent nothing"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_every_earlier_stage_gets_every_frame_in_the_order_of_its_steps(num_stages: int, tmp_path) -> None:
    assert run_stages(num_stages, exchange, str(tmp_path)) == [20] * num_stages


def test_stages_with_different_layouts_are_refused_at_the_hello(tmp_path) -> None:
    """Mismatched layouts used to be found by misread columns, or not at all."""
    chain = FrameLayout(TreeShape(num_steps=5, topk=1, num_draft_tokens=6), capacity=4)
    tree = FrameLayout(TreeShape(num_steps=2, topk=2, num_draft_tokens=2), capacity=4)
    assert chain.size == tree.size, "the hazard: frames of the same size that mean different things"
    results = run_stages(2, hello, str(tmp_path), layout_of_stage={0: tree, 1: chain})
    assert str(results[0]).startswith("refused")


def test_a_frame_that_never_comes_is_named_instead_of_hanging(tmp_path) -> None:
    results = run_stages(2, wait_for_nothing, str(tmp_path), timeout_s=2.0)
    assert "no frame within 2 s" in str(results[0])
