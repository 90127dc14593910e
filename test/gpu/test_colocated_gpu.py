"""CUDA IPC between two processes on one GPU: messages stay on the stream, whole and in order, under load."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1] / "dist"))
from processes import run_processes

from sglang_pp_spec.colocated import backend
from sglang_pp_spec.colocated.ring import DEPTH

COUNT = 400

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _process(rank: int, results, body: Callable[[int], object], path: str) -> None:
    torch.cuda.set_device(0)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        backend.register("cuda"), init_method=f"file://{path}", rank=rank, world_size=2, timeout=limit
    )
    try:
        results.put((rank, body(rank)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    time.sleep(1)


def ping_pong(rank: int) -> object:
    """Each message is computed from the one before by slow kernels; nobody synchronises a stream on the way.

    A copy that does not wait for its kernel, or a buffer that is overwritten too early, breaks the chain of sums.
    """
    side = torch.cuda.Stream()
    values = torch.full((512, 512), 1.0, device="cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    start = time.monotonic()
    for step in range(COUNT):
        if step % 2 == rank:
            for _ in range(3):
                busy = torch.tanh(busy @ busy)
            values = values + 1.0 + 0.0 * busy[:512, :512]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                dist.isend(values, 1 - rank)
            values = None  # its memory may be reused at once
            torch.empty((512, 512), device="cuda").fill_(-1e9)
        else:
            values = torch.empty((512, 512), device="cuda")
            dist.irecv(values, 1 - rank).wait()
    queued_s = time.monotonic() - start
    final = values if values is not None else torch.tensor(COUNT + 1.0, device="cuda")
    total = float(final.max()), float(final.min())
    return total, queued_s, torch.cuda.memory_allocated()


def receive_first(rank: int) -> object:
    """Rank 1 queues everything behind a message that rank 0 sends a second later; the seconds that took its host."""
    ones = torch.ones(1000, device="cuda")
    if rank == 0:
        dist.isend(ones, 1)
        torch.cuda.synchronize()
        time.sleep(1.0)
        dist.isend(7 * ones, 1)
        torch.cuda.synchronize()
        return 0.0, 7.0
    received = torch.zeros(1000, device="cuda")
    dist.irecv(received, 0).wait()  # the first message also opens the link
    doubled = 2 * received  # a kernel's first launch loads it, which waits for the device
    torch.cuda.synchronize()
    start = time.monotonic()
    dist.irecv(received, 0).wait()
    doubled = 2 * received
    queued_s = time.monotonic() - start
    return queued_s, float(doubled.max()) / 2


def two_streams(rank: int) -> object:
    """More messages than there are buffers, the first one on a stream of its own, which one of the ranks holds up."""
    first, others = torch.cuda.Stream(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    received = [torch.zeros(1000, device="cuda") for _ in range(2 * DEPTH)]
    for step in range(20):
        torch.cuda.synchronize()
        for number, one in enumerate(received):
            with torch.cuda.stream(others if number else first):
                for _ in range(40 if number == 0 and step % 2 == rank else 0):
                    busy = torch.tanh(busy @ busy)
                if rank == 0:
                    dist.isend(torch.full((1000,), 100.0 * step + number, device="cuda"), 1)
                else:
                    dist.irecv(one, 0).wait()
        torch.cuda.synchronize()
        found = [float(one.min()) for one in received]
        if rank == 1 and found != [100.0 * step + number for number in range(2 * DEPTH)]:
            return step, found
    return None


def run_two(body: Callable[[int], object], folder) -> list:
    """What ``body(rank)`` returned in each of two processes."""
    found = run_processes(2, _process, body, f"{folder}/rendezvous")
    for rank, result in enumerate(found):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    return found


def test_a_long_exchange_without_any_synchronisation_keeps_every_message(tmp_path) -> None:
    for result in run_two(ping_pong, tmp_path):
        assert result[0] == (COUNT + 1.0, COUNT + 1.0)


def test_a_message_overtakes_none_that_another_stream_was_given_before(tmp_path) -> None:
    assert run_two(two_streams, tmp_path)[1] is None


def test_a_host_queues_work_behind_a_message_that_was_not_sent_yet(tmp_path) -> None:
    """With events between the processes it had to wait for the other host, and the stages' hosts took turns."""
    queued_s, value = run_two(receive_first, tmp_path)[1]
    assert value == 7.0
    assert queued_s < 0.5
