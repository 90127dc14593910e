"""Where frames meet SGLang's groups and streams: sent after the forward, read back to the host once.

On the last stage a frame is local: its host copy is queued right behind the forward. On the others the copy is
queued behind the receive. Work that uses the frame waits for its arrival on the device; the host waits for one event
per frame, when it reads it. It does not wait for ever: NCCL never says that a frame, or the hidden states that it
depends on, will not come.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.channel import FrameChannel
from ..core.errors import FrameRefused
from ..core.faults import Fault, FaultyChannel
from ..core.layout import FrameLayout
from ..observe.timeline import Timeline
from .streams import host_copy_of, keep_until_read, uses_streams


@dataclass(frozen=True)
class HostFrame:
    """A frame on the CPU engine: ``frame`` is its own host copy."""

    frame: Tensor
    host: Tensor
    timeline: Timeline

    @property
    def device(self) -> Tensor:
        return self.frame

    def read(self) -> Tensor:
        with self.timeline.span("read"):
            return self.host


@dataclass(frozen=True)
class DeviceFrame:
    """A frame on a GPU and its copy under way to pinned host memory."""

    frame: Tensor
    host: Tensor  # [1 + capacity, width] int64, complete once ``copied`` is reached
    arrived: Any  # event: the frame is there
    copied: Any  # event: the host copy is there
    timeline: Timeline
    timeout_s: float

    @property
    def device(self) -> Tensor:
        """The current stream waits for the frame, the host does not."""
        self.arrived.wait()
        return self.frame

    def read(self) -> Tensor:
        """``FrameRefused`` if the device does not get as far as the frame within ``timeout_s``."""
        with self.timeline.span("read"):
            until = time.monotonic() + self.timeout_s
            while not self.copied.query():
                if time.monotonic() > until:
                    raise FrameRefused(
                        f"no frame within {self.timeout_s:.0f} s: it was not sent, or the device still waits for "
                        "hidden states; the previous stage launched another batch, or it is gone, or a stage "
                        "compiles kernels (SGLANG_PP_SPEC_FRAME_TIMEOUT_S sets the time)"
                    )
                time.sleep(0)  # as busy as a synchronizing host, and other threads may run
        return self.host


class FrameTransport:
    """The frame channel of one scheduler, with the streams it runs on."""

    def __init__(self, scheduler, layout: FrameLayout, timeline: Timeline) -> None:
        pp_group = scheduler.pp_group
        self._scheduler = scheduler
        self._timeline = timeline
        self._has_streams = uses_streams(scheduler)
        settings = scheduler.settings
        make = partial(FaultyChannel, fault=Fault.parse(settings.fault)) if settings.fault else FrameChannel
        self.channel = make(
            layout,
            timeout_s=settings.frame_timeout_s,
            group=_own_group(scheduler),
            ranks=pp_group.ranks,
            stage=pp_group.rank_in_group,
            device=torch.device(scheduler.device),
        )
        self._local: dict[int, HostFrame | DeviceFrame] = {}

    def agree_on_epoch(self) -> int:
        """One number for this run of the engine, drawn by the last stage and the same on all."""
        ranks = self._scheduler.pp_group.ranks
        return self._scheduler.pp_group.broadcast_object(random.getrandbits(31), src=len(ranks) - 1)

    def send(self, slot: int, frame: Tensor) -> None:
        """Last stage: send ``frame`` behind the work that fills it; queue its host copy right there."""
        with self._scheduler.copy_stream_ctx:
            if self._has_streams:
                self._scheduler.copy_stream.wait_stream(self._scheduler.forward_stream)
                keep_until_read(frame, self._scheduler.copy_stream)
            self.channel.send(slot, frame)
            self._local[slot] = self._arrival(frame)

    def post(self, slot: int) -> None:
        """Earlier stages: post the receive of the slot's frame."""
        with self._scheduler.copy_stream_ctx:
            self.channel.post(slot)

    def fetch(self, slot: int) -> HostFrame | DeviceFrame:
        """The slot's frame. Only on the CPU does the host wait for it here."""
        if self.channel.is_sender:
            return self._local.pop(slot)
        with self._timeline.span("wait"), self._scheduler.copy_stream_ctx:
            return self._arrival(self.channel.receive(slot))

    def _arrival(self, frame: Tensor) -> HostFrame | DeviceFrame:
        """``frame`` as the copy stream has it, with its host copy queued."""
        if not self._has_streams:
            return HostFrame(frame, frame, self._timeline)
        arrived, copied = self._scheduler.device_module.Event(), self._scheduler.device_module.Event()
        arrived.record(self._scheduler.copy_stream)
        host = host_copy_of(frame)
        copied.record(self._scheduler.copy_stream)
        return DeviceFrame(frame, host, arrived, copied, self._timeline, self._scheduler.settings.frame_timeout_s)


def _options(backend: str):
    """NCCL: one CTA, since a frame is small and its receive waits on an SM; a stream of another pool than ours."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 1
    return options


def _own_group(scheduler) -> dist.ProcessGroup:
    """A process group of this pipeline's stages for frames alone, so that no other traffic can stand before them.

    Creating a group is collective: every rank takes part for every pipeline, in the same order.
    """
    mine = scheduler.pp_group.ranks
    backend = dist.get_backend(scheduler.pp_group.device_group)
    own = None
    gathered: list[list[int] | None] = [None] * dist.get_world_size(scheduler.world_group.cpu_group)
    dist.all_gather_object(gathered, list(mine), group=scheduler.world_group.cpu_group)
    for ranks in sorted({tuple(r) for r in gathered if r}):
        group = dist.new_group(list(ranks), backend=backend, pg_options=_options(backend))
        if list(ranks) == list(mine):
            own = group
    if own is None:
        raise RuntimeError(f"no frame group for the pipeline of ranks {mine}")
    return own
