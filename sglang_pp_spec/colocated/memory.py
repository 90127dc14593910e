"""What two processes of one machine share: device buffers with their events, and a few words of host memory.

``CudaMemory`` is the real thing. ``HostMemory`` has the same face for the CPU, where copies are done when they return
and events have nothing to say; the tests run the protocol on it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in one process's stream that the other process's stream can wait for."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


class Memory(Protocol):
    """Where buffers and events come from. Handles are bytes that the other process can open once."""

    def create_buffer(self, nbytes: int) -> tuple[Tensor, bytes]:
        """A uint8 tensor [nbytes] and its handle."""

    def open_buffer(self, handle: bytes) -> Tensor: ...

    def create_event(self) -> tuple[Event, bytes]: ...

    def open_event(self, handle: bytes) -> Event: ...

    def mark(self) -> Event:
        """An event at this point of the current stream, for this process alone."""

    def hold(self, tensor: Tensor) -> None:
        """Keep ``tensor``'s memory from being reused before the current stream is through with it."""


class CudaMemory:
    """CUDA IPC, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create_buffer(self, nbytes: int) -> tuple[Tensor, bytes]:
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401  registers how CUDA tensors are pickled

        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # else the handle carries an event the importing process waits for
        return buffer, bytes(ForkingPickler.dumps(buffer))

    def open_buffer(self, handle: bytes) -> Tensor:
        import torch.multiprocessing  # noqa: F401

        return pickle.loads(handle)

    def create_event(self) -> tuple[Event, bytes]:
        event = torch.cuda.Event(interprocess=True)
        event.record()  # an event is made by its first record, and only then has a handle
        return event, event.ipc_handle()

    def open_event(self, handle: bytes) -> Event:
        return torch.cuda.Event.from_ipc_handle(self._device, handle)

    def mark(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def hold(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


class _NoEvent:
    def record(self) -> None:
        """The copy before it is done already."""

    def wait(self) -> None:
        """See ``record``."""


class HostMemory:
    """Files mapped into both processes."""

    def create_buffer(self, nbytes: int) -> tuple[Tensor, bytes]:
        block = SharedWords.create(-(-nbytes // 8))
        return block.words.view(torch.uint8)[:nbytes], pickle.dumps((block.path, nbytes))

    def open_buffer(self, handle: bytes) -> Tensor:
        path, nbytes = pickle.loads(handle)
        return SharedWords.open(path, -(-nbytes // 8)).words.view(torch.uint8)[:nbytes]

    def create_event(self) -> tuple[Event, bytes]:
        return _NoEvent(), b""

    def open_event(self, handle: bytes) -> Event:
        return _NoEvent()

    def mark(self) -> Event:
        return _NoEvent()

    def hold(self, tensor: Tensor) -> None:
        """Nothing is pending when a copy has returned."""


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
