"""The ring as the hosts see it on a GPU: nothing blocks, what streams wait for is only queued."""

from __future__ import annotations

import pickle

import pytest
import torch

from sglang_pp_spec.colocated.memory import HostMemory
from sglang_pp_spec.colocated.ring import DEPTH, WINDOW, RingReceiver, RingSender

BYTES = 1 << 16


class QueuedFlag:
    """Notes what a stream would be told to do."""

    def __init__(self, queue: list[tuple[str, int]]) -> None:
        self._queue = queue

    def write(self, value: int) -> None:
        self._queue.append(("write", value))

    def wait(self, value: int) -> None:
        self._queue.append(("wait", value))


class QueuedMemory(HostMemory):
    """Host buffers with flags that never block, one list of operations per flag in order of creation."""

    def __init__(self) -> None:
        super().__init__(timeout_s=1.0)
        self.flags: list[list[tuple[str, int]]] = []

    def create_flag(self):
        self.flags.append([])
        return QueuedFlag(self.flags[-1]), pickle.dumps(len(self.flags) - 1)

    def open_flag(self, handle: bytes) -> QueuedFlag:
        return QueuedFlag(self.flags[pickle.loads(handle)])


@pytest.fixture
def ring() -> tuple[QueuedMemory, RingSender, RingReceiver]:
    memory = QueuedMemory()
    sender = RingSender(memory, BYTES, timeout_s=0.2)
    return memory, sender, RingReceiver(memory, sender.handle)


def test_a_receive_is_queued_although_the_other_host_has_queued_no_send(ring) -> None:
    """The hosts used to wait for each other here, so that the stages' host work never overlapped."""
    memory, sender, receiver = ring
    receiver.take(torch.zeros(8))
    sent, taken = memory.flags
    assert sent == [("wait", 1)]
    assert taken == [("write", 1)]


def test_a_buffer_is_written_again_only_behind_the_copy_out_of_the_message_before(ring) -> None:
    memory, sender, _ = ring
    for _ in range(DEPTH + 2):
        sender.send(torch.zeros(8))
    sent, taken = memory.flags
    assert sent == [("write", n + 1) for n in range(DEPTH + 2)]
    assert taken == [("wait", 1), ("wait", 2)]


def test_a_size_that_was_not_known_when_a_message_was_taken_is_compared_later(ring) -> None:
    _, sender, receiver = ring
    receiver.take(torch.zeros(8))
    sender.send(torch.zeros(9))
    with pytest.raises(ValueError, match="message 0 has 36 bytes, 32 were expected"):
        receiver.take(torch.zeros(8))


def test_a_sender_stays_within_the_window_of_sizes_and_goes_on_when_they_were_compared(ring) -> None:
    _, sender, receiver = ring
    for number in range(WINDOW):
        sender.send(torch.full((8,), float(number)))
    with pytest.raises(RuntimeError, match="the receiver takes nothing within 0 s"):
        sender.send(torch.zeros(8))
    for _ in range(WINDOW):
        receiver.take(torch.zeros(8))
    sender.send(torch.zeros(8))
