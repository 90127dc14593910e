"""Running a function in several real processes, with a limit: a process that hangs or dies fails the test."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable

import pytest

LIMIT_S = float(os.environ.get("PP_SPEC_TEST_LIMIT_S", "90"))  # compute-sanitizer needs more


def run_processes(count: int, target: Callable[..., None], *arguments: object) -> list:
    """What ``target(number, results, *arguments)`` put on ``results`` as (number, value), in order of the numbers."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=target, args=(number, results, *arguments)) for number in range(count)]
    for worker in workers:
        worker.start()
    found: dict[int, object] = {}
    deadline = time.monotonic() + LIMIT_S
    try:
        while len(found) < count:
            number, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            found[number] = value
    except queue.Empty:
        pytest.fail(f"only processes {sorted(found)} of {count} finished within {LIMIT_S:.0f} s")
    finally:
        for worker in workers:
            worker.join(timeout=5)
            worker.kill()
    return [found[number] for number in range(count)]
