"""Stages of a measured server get cores of their own."""

import os
import subprocess
import sys
import time

import pytest

from benchmark import pin


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        (range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (range(9), 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (range(4), 4, []),
        (range(4), 0, []),
    ],
)
def test_blocks_are_equal_and_apart_and_none_is_a_single_core(cores, count, expected):
    assert pin.blocks(list(cores), count) == expected


def test_the_stages_of_a_server_are_placed_with_all_their_threads_and_nobody_else(monkeypatch):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(pin, "blocks", lambda _, count: [[cores[0]]] * count)
    body = (
        "import threading, time; threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); time.sleep(30)"
    )
    stage = subprocess.Popen(["sglang::scheduler_PP0", "-c", body], executable=sys.executable)
    other = subprocess.Popen(["detokenizer", "-c", body], executable=sys.executable)
    try:
        deadline = time.monotonic() + 10
        while len(os.listdir(f"/proc/{stage.pid}/task")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert pin.pin_stages(os.getpid()) == {stage.pid: [cores[0]]}
        threads = [int(name) for name in os.listdir(f"/proc/{stage.pid}/task")]
        assert len(threads) == 2 and all(os.sched_getaffinity(thread) == {cores[0]} for thread in threads)
        assert sorted(os.sched_getaffinity(other.pid)) == cores
    finally:
        for process in (stage, other):
            process.kill()
            process.wait(timeout=10)
