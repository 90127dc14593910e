"""A torch.distributed backend for processes that share one GPU: point-to-point by CUDA IPC, the rest through gloo.

    register("cuda")
    dist.init_process_group(backend="cpu:gloo,cuda:pp_spec_ipc", ...)

Streams as with NCCL: ``isend`` queues on the current stream; ``wait`` makes the current stream wait. A posted receive
costs nothing until it is waited for, and receives of a pair are served in the order they were posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from .memory import CudaMemory, HostMemory, Mark, Memory
from .ring import RingReceiver, RingSender, size_class

NAME = "pp_spec_ipc"


def register(device_type: str) -> str:
    """Make the backend known to torch.distributed for tensors of ``device_type``; the string that asks for it."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=[device_type])
    return f"cpu:{NAME}" if device_type == "cpu" else f"cpu:gloo,{device_type}:{NAME}"


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> IpcBackend:
    return IpcBackend(store, rank, size, timeout)


class IpcBackend(Backend):
    """One process's end of all links of a group."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._timeout = store, rank, timeout
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._senders: dict[tuple[int, int], RingSender] = {}
        self._links: dict[tuple[int, int], _Incoming] = {}

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    def send(self, tensors: Sequence[Tensor], to_rank: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        key = to_rank, size_class(tensor.numel() * tensor.element_size())
        memory = self._memory_of(tensor)
        sender = self._senders.get(key)
        if sender is None:
            sender = self._senders[key] = RingSender(memory, key[1], timeout_s=self._timeout.total_seconds())
            self._store.set(f"{self._rank}->{to_rank}/{key[1]}", sender.handle)
        sender.send(tensor)
        return _Sent(sender.last)

    def recv(self, tensors: Sequence[Tensor], from_rank: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        key = from_rank, size_class(tensor.numel() * tensor.element_size())
        if key not in self._links:
            memory = self._memory_of(tensor)
            self._links[key] = _Incoming(lambda: self._open(*key, memory))
        return self._links[key].post(tensor)

    def _open(self, from_rank: int, buffer_bytes: int, memory: Memory) -> RingReceiver:
        handle = self._store.get(f"{from_rank}->{self._rank}/{buffer_bytes}")  # waits until the sender made it
        return RingReceiver(memory, handle)

    def _memory_of(self, tensor: Tensor) -> Memory:
        return CudaMemory(tensor.device) if tensor.is_cuda else HostMemory(self._timeout.total_seconds())

    def allreduce(self, tensors: Sequence[Tensor], options: object) -> dist.Work:
        return self._on_host(self._gloo.allreduce, tensors, options)

    def broadcast(self, tensors: Sequence[Tensor], options: object) -> dist.Work:
        return self._on_host(self._gloo.broadcast, tensors, options)

    def barrier(self, options: object) -> dist.Work:
        return self._gloo.barrier(options)

    def _on_host(self, collective: Callable, tensors: Sequence[Tensor], options: object) -> dist.Work:
        """Start-up only, so a blocking copy there and back will do."""
        host = [tensor.cpu() for tensor in tensors]
        collective(host, options).wait()
        for tensor, result in zip(tensors, host, strict=True):
            tensor.copy_(result)
        return _Sent(self._memory_of(tensors[0]).mark())


class _Incoming:
    """The receives posted for one ring, oldest first."""

    def __init__(self, open_ring: Callable[[], RingReceiver]) -> None:
        self._open_ring = open_ring
        self._ring: RingReceiver | None = None
        self._posted: deque[_Received] = deque()

    def post(self, tensor: Tensor) -> _Received:
        work = _Received(self, tensor)
        self._posted.append(work)
        return work

    def take_up_to(self, work: _Received) -> None:
        """Serve every receive posted before ``work``, and ``work``."""
        if self._ring is None:
            self._ring = self._open_ring()
        while not work.is_taken:
            oldest = self._posted[0]
            self._ring.take(oldest.tensor)
            oldest.done, oldest.is_taken = self._ring.last, True
            self._posted.popleft()


class _Sent(dist.Work):
    """A message that is queued; waiting is the current stream's business."""

    def __init__(self, done: Mark) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return True


class _Received(dist.Work):
    """A posted receive."""

    def __init__(self, link: _Incoming, tensor: Tensor) -> None:
        super().__init__()
        self._link, self.tensor = link, tensor
        self.is_taken = False
        self.done: Mark | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._link.take_up_to(self)
        assert self.done is not None
        self.done.wait()
        return True

    def is_completed(self) -> bool:
        return self.is_taken
