"""Messages from one process to another through a few shared device buffers, in order, on the stream.

A message takes buffer ``n % depth``::

    sender    stream: wait until message n - depth was copied out; copy in; record "produced"     host: sent = n + 1
    receiver  host: wait until sent > n                                                           stream: wait for
              "produced"; copy out; record "consumed"                                             host: taken = n + 1

The devices wait for each other through the events. The hosts exchange only the two counters: an event says nothing
before it was recorded, so the receiving host waits until the sending *host* has queued the message, never until the
device has run it; and the sender waits in the same way for a free buffer.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

import torch
from torch import Tensor

from .memory import Memory, SharedWords, words_of

DEPTH = 4
_SENT, _TAKEN, _SIZES = 0, 1, 2
_SMALLEST = 1 << 16
_SPIN_S = 300e-6  # about what a hop takes; a sleep would double it


def size_class(nbytes: int) -> int:
    """The buffer size for a message: both ends come to the same one, and a link needs few different rings."""
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())


class RingSender:
    """The sending end; makes what is shared."""

    def __init__(self, memory: Memory, buffer_bytes: int, *, depth: int = DEPTH, timeout_s: float = 300.0) -> None:
        self._memory, self._depth, self._timeout_s = memory, depth, timeout_s
        made = [memory.create_buffer(buffer_bytes) for _ in range(depth)]
        produced = [memory.create_event() for _ in range(depth)]
        consumed = [memory.create_event() for _ in range(depth)]
        self._buffers = [buffer for buffer, _ in made]
        self._produced = [event for event, _ in produced]
        self._consumed = [event for event, _ in consumed]
        self._words = SharedWords.create(_SIZES + depth)
        self._count = 0
        handles = [[handle for _, handle in pairs] for pairs in (made, produced, consumed)]
        self.handle = pickle.dumps((depth, *handles, (self._words.path, _SIZES + depth)))

    def send(self, tensor: Tensor) -> None:
        """Queue ``tensor`` on the current stream; its memory may be reused by work queued later."""
        number, slot = self._count, self._count % self._depth
        wait_until(lambda: self._words[_TAKEN] > number - self._depth, self._timeout_s, "the receiver takes nothing")
        if number >= self._depth:
            self._consumed[slot].wait()
        source = bytes_of(tensor.contiguous())
        self._buffers[slot][: source.numel()].copy_(source, non_blocking=True)
        self._memory.hold(source)
        self._produced[slot].record()
        self._words[_SIZES + slot] = source.numel()
        self._count = self._words[_SENT] = number + 1


class RingReceiver:
    """The receiving end, opened from the sender's handle. Messages are taken in the order of ``expect``."""

    def __init__(self, memory: Memory, handle: bytes, *, timeout_s: float = 300.0) -> None:
        self._depth, buffers, produced, consumed, words = pickle.loads(handle)
        self._timeout_s = timeout_s
        self._buffers = [memory.open_buffer(one) for one in buffers]
        self._produced = [memory.open_event(one) for one in produced]
        self._consumed = [memory.open_event(one) for one in consumed]
        self._words = words_of(words)
        self._count = 0

    def take(self, tensor: Tensor) -> None:
        """Copy the next message into ``tensor`` on the current stream; ValueError if it has another size."""
        number, slot = self._count, self._count % self._depth
        wait_until(lambda: self._words[_SENT] > number, self._timeout_s, "nothing was sent")
        size, target = self._words[_SIZES + slot], bytes_of(tensor)
        if size != target.numel():
            raise ValueError(f"message {number} has {size} bytes, {target.numel()} were expected")
        self._produced[slot].wait()
        target.copy_(self._buffers[slot][:size], non_blocking=True)
        self._consumed[slot].record()
        self._count = self._words[_TAKEN] = number + 1


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [nbytes], sharing its memory."""
    if not tensor.is_contiguous():
        raise ValueError("a message is received into contiguous memory")
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def wait_until(ready: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    """Poll ``ready``, at first without a pause; RuntimeError after ``timeout_s``."""
    start = time.monotonic()
    while not ready():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise RuntimeError(f"colocated: {otherwise} within {timeout_s:.0f} s")
        if waited_s > _SPIN_S:
            time.sleep(50e-6)
