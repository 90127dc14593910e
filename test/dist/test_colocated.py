"""The backend of colocated stages, in real processes, over its CPU twin: same protocol, host memory for device memory."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from processes import run_processes

from sglang_pp_spec.colocated import backend
from sglang_pp_spec.colocated.ring import DEPTH, size_class
from sglang_pp_spec.core.channel import FrameChannel
from sglang_pp_spec.core.layout import FrameLayout, TreeShape

LAYOUT = FrameLayout(TreeShape(num_steps=2, topk=2, num_draft_tokens=4), capacity=4)


def run_ranks(size: int, body: Callable[[dist.ProcessGroup, int], object], folder, timeout_s: float = 30.0) -> list:
    """What ``body(group, rank)`` returned on every rank, or the text of what it raised."""
    return run_processes(size, _rank_process, size, body, f"{folder}/rendezvous", timeout_s)


def _rank_process(rank: int, results, size: int, body, path: str, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=limit)
    group = dist.new_group(list(range(size)), backend=backend.register("cpu"), timeout=limit)
    try:
        results.put((rank, body(group, rank)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    time.sleep(0.5)


def message(number: int, length: int = 1000) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int64) * (number + 1)


def many(group: dist.ProcessGroup, rank: int) -> object:
    """Five times as many messages as there are buffers, of two sizes in turn."""
    count = 5 * DEPTH
    lengths = [1000 if number % 3 else 20_000 for number in range(count)]
    if rank == 0:
        for number, length in enumerate(lengths):
            dist.isend(message(number, length), 1, group=group).wait()
        return count
    right = 0
    for number, length in enumerate(lengths):
        received = torch.zeros(length, dtype=torch.int64)
        dist.irecv(received, 0, group=group).wait()
        right += torch.equal(received, message(number, length))
    return right


def posted_early(group: dist.ProcessGroup, rank: int) -> object:
    """Receives posted before anything is sent, waited for out of order."""
    if rank == 0:
        time.sleep(0.5)
        for number in range(3):
            dist.isend(message(number), 1, group=group)
        return True
    start = time.monotonic()
    received = [torch.zeros(1000, dtype=torch.int64) for _ in range(3)]
    works = [dist.irecv(tensor, 0, group=group) for tensor in received]
    posted_in = time.monotonic() - start
    works[2].wait()
    works[0].wait()
    works[1].wait()
    return posted_in < 0.3 and all(torch.equal(t, message(n)) for n, t in enumerate(received))


def nobody_takes(group: dist.ProcessGroup, rank: int) -> object:
    """One message more than there are buffers."""
    if rank == 0:
        for number in range(DEPTH + 1):
            dist.isend(message(number), 1, group=group)
        return "all sent"
    dist.irecv(torch.zeros(1000, dtype=torch.int64), 0, group=group)  # posted, never waited for
    time.sleep(3)
    return "took nothing"


def other_size(group: dist.ProcessGroup, rank: int) -> object:
    if rank == 0:
        dist.isend(message(0, 1000), 1, group=group)
        time.sleep(1)
        return None
    dist.irecv(torch.zeros(999, dtype=torch.int64), 0, group=group).wait()
    return "accepted"


def overwritten(group: dist.ProcessGroup, rank: int) -> object:
    """The sender reuses its tensor at once."""
    if rank == 0:
        tensor = message(0)
        dist.isend(tensor, 1, group=group)
        tensor.fill_(-1)
        time.sleep(1)
        return True
    time.sleep(0.3)
    received = torch.zeros(1000, dtype=torch.int64)
    dist.irecv(received, 0, group=group).wait()
    return torch.equal(received, message(0))


def frames(group: dist.ProcessGroup, rank: int) -> object:
    """The frame channel over this backend: twelve steps over three slots, receives posted a round early."""
    size = dist.get_world_size(group)
    channel = FrameChannel(
        LAYOUT, group=group, ranks=list(range(size)), stage=rank, device=torch.device("cpu"), timeout_s=20
    )
    channel.open()
    if channel.is_sender:
        for step in range(12):
            channel.send(step % 3, torch.full(LAYOUT.size, step, dtype=torch.int64))
        return 12
    for slot in range(3):
        channel.post(slot)
    right = 0
    for step in range(12):
        right += int(channel.receive(step % 3)[0, 0]) == step
        channel.post(step % 3) if step < 9 else None
    return right


def collectives(group: dist.ProcessGroup, rank: int) -> object:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=group)
    dist.barrier(group=group)
    return float(total)


def test_messages_of_any_number_and_size_arrive_whole_and_in_order(tmp_path) -> None:
    assert run_ranks(2, many, tmp_path) == [5 * DEPTH, 5 * DEPTH]


def test_a_posted_receive_blocks_nobody_and_receives_are_served_in_the_order_they_were_posted(tmp_path) -> None:
    assert run_ranks(2, posted_early, tmp_path) == [True, True]


def test_a_sender_waits_for_a_free_buffer_and_says_so_when_none_comes(tmp_path) -> None:
    """Without the wait the oldest message would be overwritten before it was read."""
    results = run_ranks(2, nobody_takes, tmp_path, timeout_s=2.0)
    assert "the other process does nothing within 2 s" in results[0]


def test_a_message_of_another_size_is_refused(tmp_path) -> None:
    assert size_class(8 * 1000) == size_class(8 * 999), "the hazard: both sizes use the same buffers"
    assert run_ranks(2, other_size, tmp_path)[1] == "ValueError: message 0 has 8000 bytes, 7992 were expected"


def test_a_tensor_may_be_reused_as_soon_as_its_send_is_queued(tmp_path) -> None:
    assert run_ranks(2, overwritten, tmp_path) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_the_frame_channel_runs_over_it(size: int, tmp_path) -> None:
    assert run_ranks(size, frames, tmp_path) == [12] * size


def test_what_is_no_message_goes_through_gloo(tmp_path) -> None:
    assert run_ranks(3, collectives, tmp_path) == [6.0] * 3


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 65536), (1, 65536), (65536, 65536), (65537, 131072)])
def test_buffers_come_in_powers_of_two(nbytes: int, expected: int) -> None:
    assert size_class(nbytes) == expected
