"""How frames travel: from the last stage to every earlier one, in a process group that carries nothing else.

A receive is posted early, into a buffer of the slot, so a frame arrives while the stage works on other slots. A slot
has two buffers in turn: with ``Overlap.ON`` the host reads a frame after the receive of the next one was posted. A
sent frame is kept alive until the slot is used again. With NCCL ``wait`` orders streams and never blocks the host;
with gloo it blocks until the frame is there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import FrameRefused, PPSpecError
from .layout import FrameLayout


class FrameChannel:
    """One end of the frame channel of a pipeline. ``ranks`` are the global ranks of its stages, in order."""

    def __init__(
        self,
        layout: FrameLayout,
        *,
        group: dist.ProcessGroup,
        ranks: list[int],
        stage: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.layout = layout
        self._timeout = timedelta(seconds=timeout_s)
        self.stage = stage
        self._group = group
        self._ranks = ranks
        self._device = device
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # (of the latest post, of the one before)
        self._work: dict[int, list[dist.Work]] = {}
        self._sent: dict[int, Tensor] = {}

    def open(self) -> None:
        """Exchange one hello per pair of stages, in a fixed order; ``FrameRefused`` if the layouts differ.

        NCCL connects a pair at its first operation and blocks the host until both sides are there. Left to the
        first round, a stage that posts its receive before it sends hidden states on would wait for ever.
        """
        hello = torch.zeros(self.layout.size, dtype=torch.int64, device=self._device)
        hello[0, 0] = self.layout.fingerprint
        if self.is_sender:
            for rank in self._ranks[:-1]:
                self._start(dist.isend, hello, rank).wait()
            return
        received = torch.zeros_like(hello)
        self._start(dist.irecv, received, self._ranks[-1]).wait()
        if not torch.equal(received, hello):
            raise FrameRefused(f"stage {self.stage} expects frames of {self.layout}, the last stage sends others")

    @property
    def is_sender(self) -> bool:
        return self.stage == len(self._ranks) - 1

    def send(self, slot: int, frame: Tensor) -> None:
        """Start sending ``frame`` ([1 + capacity, width] int64 on the channel's device) to all earlier stages."""
        if tuple(frame.shape) != self.layout.size:
            raise ValueError(f"a frame is {self.layout.size}, not {tuple(frame.shape)}")
        self._finish(slot)
        self._sent[slot] = frame
        self._work[slot] = [self._start(dist.isend, frame, rank) for rank in self._ranks[:-1]]

    def post(self, slot: int) -> None:
        """Post the receive of the slot's next frame."""
        latest, before = self._buffers.get(slot) or (self._new_buffer(), self._new_buffer())
        self._buffers[slot] = before, latest
        self._work[slot] = [self._start(dist.irecv, before, self._ranks[-1])]

    def receive(self, slot: int) -> Tensor:
        """The frame whose receive was posted last for ``slot``; its buffer is reused by the post after the next."""
        self._finish(slot)
        return self._buffers[slot][0]

    def _new_buffer(self) -> Tensor:
        return torch.empty(self.layout.size, dtype=torch.int64, device=self._device)

    def _start(self, operation: Callable[..., dist.Work | None], tensor: Tensor, rank: int) -> dist.Work:
        work = operation(tensor, rank, group=self._group)
        if work is None:
            raise PPSpecError(f"rank {rank} is not in the frame channel's group")
        return work

    def _finish(self, slot: int) -> None:
        for work in self._work.pop(slot, ()):
            try:
                # With NCCL this orders streams and returns at once; who reads the frame on the host waits so long.
                work.wait(self._timeout) if self._device.type == "cpu" else work.wait()
            except RuntimeError as error:
                raise FrameRefused(
                    f"stage {self.stage} slot {slot}: no frame within {self._timeout.total_seconds():.0f} s, "
                    f"or the other stage is gone ({error})"
                ) from error
