"""What two processes of one machine share: device buffers, flags that streams wait for, words of host memory.

``CudaMemory`` is the real thing. ``HostMemory`` has the same face for the CPU, where copies are done when they return
and a flag is waited for by the host; the tests run the protocol on it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_SPIN_S = 300e-6  # about what a hop takes; a sleep would double it


class Flag(Protocol):
    """A number that only grows, written in the order of one process's stream, waited for by the other's."""

    def write(self, value: int) -> None:
        """Becomes ``value`` when what the current stream holds so far is done."""

    def wait(self, value: int) -> None:
        """What is queued on the current stream from now on runs once the flag is ``value`` or more."""


class Mark(Protocol):
    """A point of a stream that other streams of the same process can wait for."""

    def wait(self) -> None: ...


class Memory(Protocol):
    """Where buffers and flags come from. Handles are bytes that the other process can open once."""

    def create_buffer(self, nbytes: int) -> tuple[Tensor, bytes]:
        """A uint8 tensor [nbytes] and its handle."""

    def open_buffer(self, handle: bytes) -> Tensor: ...

    def create_flag(self) -> tuple[Flag, bytes]:
        """A flag of value 0 and its handle."""

    def open_flag(self, handle: bytes) -> Flag: ...

    def mark(self) -> Mark:
        """This point of the current stream."""

    def hold(self, tensor: Tensor) -> None:
        """Keep ``tensor``'s memory from being reused before the current stream is through with it."""


class CudaMemory:
    """CUDA IPC, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create_buffer(self, nbytes: int) -> tuple[Tensor, bytes]:
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401  registers how CUDA tensors are pickled

        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # else the handle carries an event the importing process waits for
        return buffer, bytes(ForkingPickler.dumps(buffer))

    def open_buffer(self, handle: bytes) -> Tensor:
        import torch.multiprocessing  # noqa: F401

        return pickle.loads(handle)

    def create_flag(self) -> tuple[Flag, bytes]:
        word, handle = self.create_buffer(8)
        return _CudaFlag(word), handle

    def open_flag(self, handle: bytes) -> Flag:
        return _CudaFlag(self.open_buffer(handle))

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event

    def hold(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


class _CudaFlag:
    """A 32-bit word of device memory.

    An interprocess event would not do: it says nothing before it was recorded, so the host of the waiting process
    would have to wait until the other host has queued its work, and the hosts of the stages would take turns.
    """

    def __init__(self, word: Tensor) -> None:
        from cuda.bindings import driver

        self._word, self._driver = word, driver  # the tensor keeps its memory mapped

    def write(self, value: int) -> None:
        self._queue(self._driver.cuStreamWriteValue32, value)

    def wait(self, value: int) -> None:
        self._queue(self._driver.cuStreamWaitValue32, value)  # flags 0: at least ``value``

    def _queue(self, operation: Callable[[int, int, int, int], tuple[Any, ...]], value: int) -> None:
        stream = torch.cuda.current_stream(self._word.device).cuda_stream
        (status,) = operation(stream, self._word.data_ptr(), value, 0)
        if int(status) != 0:
            raise RuntimeError(f"colocated: {operation.__name__} of the CUDA driver failed: {status}")


class HostMemory:
    """Files mapped into both processes."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def create_buffer(self, nbytes: int) -> tuple[Tensor, bytes]:
        block = SharedWords.create(-(-nbytes // 8))
        return block.words.view(torch.uint8)[:nbytes], pickle.dumps((block.path, nbytes))

    def open_buffer(self, handle: bytes) -> Tensor:
        path, nbytes = pickle.loads(handle)
        return SharedWords.open(path, -(-nbytes // 8)).words.view(torch.uint8)[:nbytes]

    def create_flag(self) -> tuple[Flag, bytes]:
        block = SharedWords.create(1)
        return _HostFlag(block, self._timeout_s), block.path.encode()

    def open_flag(self, handle: bytes) -> Flag:
        return _HostFlag(SharedWords.open(handle.decode(), 1), self._timeout_s)

    def mark(self) -> Mark:
        return _Now()

    def hold(self, tensor: Tensor) -> None:
        """Nothing is pending when a copy has returned."""


class _Now:
    def wait(self) -> None:
        """On the host everything before is done."""


class _HostFlag:
    """A word of shared host memory."""

    def __init__(self, words: SharedWords, timeout_s: float) -> None:
        self._words, self._timeout_s = words, timeout_s

    def write(self, value: int) -> None:
        self._words[0] = value

    def wait(self, value: int) -> None:
        wait_until(lambda: self._words[0] >= value, self._timeout_s, "the other process does nothing")


class SharedWords:
    """int64 words in memory that two processes of this machine share; zero at first.

    The file behind them lasts until the second process has opened it.
    """

    def __init__(self, path: str, file: int, num_words: int) -> None:
        self.path = path
        self._map = mmap.mmap(file, 8 * num_words)
        os.close(file)
        self.words = torch.frombuffer(self._map, dtype=torch.int64)

    @classmethod
    def create(cls, num_words: int) -> SharedWords:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        file, path = tempfile.mkstemp(prefix="pp_spec_colocated_", dir=folder)
        os.ftruncate(file, 8 * num_words)
        return cls(path, file, num_words)

    @classmethod
    def open(cls, path: str, num_words: int) -> SharedWords:
        opened = cls(path, os.open(path, os.O_RDWR), num_words)
        os.unlink(path)
        return opened

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self.words[index] = value


def words_of(handle: Any) -> SharedWords:
    """Open a block by what ``SharedWords.create`` was given: (path, number of words)."""
    return SharedWords.open(*handle)


def wait_until(ready: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    """Poll ``ready``, at first without a pause; RuntimeError after ``timeout_s``."""
    start = time.monotonic()
    while not ready():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise RuntimeError(f"colocated: {otherwise} within {timeout_s:.0f} s")
        if waited_s > _SPIN_S:
            time.sleep(50e-6)
