"""Where frames meet SGLang's groups and streams: sent after the forward, read back to the host once.

On the last stage a frame is local: its host copy is queued right behind the forward. On the others the copy is
queued behind the receive. Either way the host waits for one event per frame and for nothing else.
"""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.channel import FrameChannel
from ..core.faults import Fault, FaultyChannel
from ..core.layout import FrameLayout
from ..core.stage_loop import ArrivedFrame
from ..observe.timeline import Timeline


class FrameTransport:
    """The frame channel of one scheduler, with the streams it runs on."""

    def __init__(self, scheduler, layout: FrameLayout, timeline: Timeline) -> None:
        pp_group = scheduler.pp_group
        self._scheduler = scheduler
        self._timeline = timeline
        self._on_gpu = torch.device(scheduler.device).type != "cpu"
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
        self._local: dict[int, tuple[ArrivedFrame, object]] = {}

    def agree_on_epoch(self) -> int:
        """One number for this run of the engine, drawn by the last stage and the same on all."""
        ranks = self._scheduler.pp_group.ranks
        return self._scheduler.pp_group.broadcast_object(random.getrandbits(31), src=len(ranks) - 1)

    def send(self, slot: int, frame: Tensor) -> None:
        """Last stage: send ``frame`` behind the work that fills it; queue its host copy right there."""
        with self._scheduler.copy_stream_ctx:
            if self._on_gpu:
                self._scheduler.copy_stream.wait_stream(self._scheduler.forward_stream)
            self.channel.send(slot, frame)
            self._local[slot] = self._read_back(frame)

    def post(self, slot: int) -> None:
        """Earlier stages: post the receive of the slot's frame."""
        with self._scheduler.copy_stream_ctx:
            self.channel.post(slot)

    def fetch(self, slot: int) -> ArrivedFrame:
        """The slot's frame, readable on device and host: the one host wait of a round."""
        with self._timeline.span("wait"):
            if self.channel.is_sender:
                arrived, copied = self._local.pop(slot)
            else:
                with self._scheduler.copy_stream_ctx:
                    arrived, copied = self._read_back(self.channel.receive(slot))
            if copied is not None:
                copied.synchronize()
        return arrived

    def _read_back(self, frame: Tensor) -> tuple[ArrivedFrame, object]:
        """(frame and host copy, event after the copy); on the CPU the frame is its own host copy."""
        if not self._on_gpu:
            return ArrivedFrame(frame, frame), None
        host = torch.empty(frame.shape, dtype=frame.dtype, pin_memory=True)
        host.copy_(frame, non_blocking=True)
        copied = self._scheduler.device_module.Event()
        copied.record(self._scheduler.copy_stream)
        return ArrivedFrame(frame, host), copied


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
        group = dist.new_group(list(ranks), backend=backend)
        if list(ranks) == list(mine):
            own = group
    if own is None:
        raise RuntimeError(f"no frame group for the pipeline of ranks {mine}")
    return own
