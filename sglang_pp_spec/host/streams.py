"""Streams and what crosses them, where forwards run beside the host.

On the CPU engine they run on the host, and there is nothing to order. SGLANG_PP_SPEC_STREAMS=1 takes the GPU's way
there all the same, with torch.cpu's streams and events, which are always done: so that tests walk through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.managers.utils import allocate_distinct_stream
from torch import Tensor


def uses_streams(scheduler) -> bool:
    """Whether this scheduler's forwards run beside its host, or tests want to see as much."""
    return torch.device(scheduler.device).type != "cpu" or scheduler.settings.streams


def new_stream(scheduler, used: Iterable[Any]) -> Any:
    """A stream that is none of ``used``: CUDA's come from a pool, and one may be given out twice."""
    if torch.device(scheduler.device).type == "cpu":
        return scheduler.device_module.Stream()
    return allocate_distinct_stream(scheduler.device_module, used)


def keep_until_read(tensor: Tensor, stream: Any) -> None:
    """``tensor``'s memory is not used again before what is queued on ``stream`` now is done."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a stream reads tensors, not {type(tensor).__name__}")
    if not tensor.is_cpu:
        tensor.record_stream(stream)


def host_copy_of(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` on the host, under way on the current stream; pinned, so that the host need not wait."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
    return host.copy_(tensor, non_blocking=True)


def start_host_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Start ``host_copy_of`` a device tensor; the result waits until it is there and returns it."""
    host, copied = host_copy_of(tensor), torch.get_device_module(tensor.device).Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait
