"""Messages from one process to another through a few shared device buffers, in order, on the stream.

A message takes buffer ``n % DEPTH``; all of it happens on the streams::

    sender    wait until taken >= n + 1 - DEPTH (the message before it in this buffer was copied out)
              copy in; write sent = n + 1
    receiver  wait until sent >= n + 1
              copy out; write taken = n + 1

Messages may be queued on different streams. Each end takes its own in the order of the calls, whatever the streams: a
flag that a later message raised would speak for an earlier one whose copy has not run.

Neither host waits for the other, as with NCCL: a receive may be waited for on the stream long before the other
process has queued the send. Only what the devices cannot compare goes from host to host, the sizes: the receiver
checks them once the sender's host has named them, and the sender's host stays less than ``WINDOW`` messages ahead.
"""

from __future__ import annotations

import pickle
from collections import deque

import torch
from torch import Tensor

from .memory import Mark, Memory, SharedWords, wait_until, words_of

DEPTH = 4
WINDOW = 64  # sizes kept until they were compared
_NAMED, _COMPARED, _SIZES = 0, 1, 2  # host words: messages whose size was written, was read; then the sizes
_NUM_WORDS = _SIZES + WINDOW
_SMALLEST = 1 << 16


def size_class(nbytes: int) -> int:
    """The buffer size for a message: both ends come to the same one, and a link needs few different rings."""
    return max(_SMALLEST, 1 << (nbytes - 1).bit_length())


class RingSender:
    """The sending end; makes what is shared."""

    def __init__(self, memory: Memory, buffer_bytes: int, *, timeout_s: float = 300.0) -> None:
        self._memory, self._timeout_s = memory, timeout_s
        made = [memory.create_buffer(buffer_bytes) for _ in range(DEPTH)]
        self._buffers = [buffer for buffer, _ in made]
        self._sent, sent_handle = memory.create_flag()
        self._taken, taken_handle = memory.create_flag()
        self._words = SharedWords.create(_NUM_WORDS)
        self._count = 0
        self.last: Mark = memory.mark()  # behind the newest message
        handles = [handle for _, handle in made]
        self.handle = pickle.dumps((handles, sent_handle, taken_handle, (self._words.path, _NUM_WORDS)))

    def send(self, tensor: Tensor) -> None:
        """Queue ``tensor`` on the current stream; its memory may be reused by work queued later."""
        number, source = self._count, bytes_of(tensor.contiguous())
        self._name_size(number, source.numel())
        self.last.wait()
        if number >= DEPTH:
            self._taken.wait(number + 1 - DEPTH)
        self._buffers[number % DEPTH][: source.numel()].copy_(source, non_blocking=True)
        self._memory.hold(source)
        self._sent.write(number + 1)
        self.last, self._count = self._memory.mark(), number + 1

    def _name_size(self, number: int, nbytes: int) -> None:
        words = self._words
        wait_until(lambda: words[_COMPARED] > number - WINDOW, self._timeout_s, "the receiver takes nothing")
        words[_SIZES + number % WINDOW] = nbytes
        words[_NAMED] = number + 1


class RingReceiver:
    """The receiving end, opened from the sender's handle."""

    def __init__(self, memory: Memory, handle: bytes) -> None:
        buffers, sent, taken, words = pickle.loads(handle)
        self._buffers = [memory.open_buffer(one) for one in buffers]
        self._sent, self._taken = memory.open_flag(sent), memory.open_flag(taken)
        self._words = words_of(words)
        self._expected: deque[int] = deque()  # sizes of taken messages that are not compared yet
        self._count = 0
        self._memory = memory
        self.last: Mark = memory.mark()  # behind the newest message

    def take(self, tensor: Tensor) -> None:
        """Copy the next message into ``tensor`` on the current stream.

        ValueError if it, or one taken before it, turns out to have had another size.
        """
        number, target = self._count, bytes_of(tensor)
        self._expected.append(target.numel())
        self.last.wait()
        self._sent.wait(number + 1)
        self._compare_sizes()
        target.copy_(self._buffers[number % DEPTH][: target.numel()], non_blocking=True)
        self._taken.write(number + 1)
        self.last, self._count = self._memory.mark(), number + 1

    def _compare_sizes(self) -> None:
        words, named = self._words, self._words[_NAMED]
        while self._expected and words[_COMPARED] < named:
            number, expected = words[_COMPARED], self._expected.popleft()
            size = words[_SIZES + number % WINDOW]
            if size != expected:
                raise ValueError(f"message {number} has {size} bytes, {expected} were expected")
            words[_COMPARED] = number + 1


def bytes_of(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 [nbytes], sharing its memory."""
    if not tensor.is_contiguous():
        raise ValueError("a message is received into contiguous memory")
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
