"""The ring as the hosts see it on a GPU: nothing blocks, what streams wait for is only queued."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable

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


class Streams:
    """Streams that run when they are told to, each as far as it gets."""

    def __init__(self) -> None:
        self.current = ""
        self._queues: dict[str, deque[Callable[[], bool]]] = defaultdict(deque)

    def queue(self, operation: Callable[[], bool]) -> None:
        """``operation`` says whether it is done; as long as it is not, its stream waits."""
        self._queues[self.current].append(operation)

    def run(self, name: str) -> None:
        queue = self._queues[name]
        while queue and queue[0]():
            queue.popleft()


class StreamMemory(HostMemory):
    """Host buffers whose flags and marks are the business of streams."""

    def __init__(self) -> None:
        super().__init__(timeout_s=1.0)
        self.streams = Streams()
        self.flags: list[StreamFlag] = []

    def create_flag(self):
        self.flags.append(StreamFlag(self.streams))
        return self.flags[-1], pickle.dumps(len(self.flags) - 1)

    def open_flag(self, handle: bytes) -> StreamFlag:
        return self.flags[pickle.loads(handle)]

    def mark(self) -> StreamMark:
        return StreamMark(self.streams)


class StreamFlag:
    def __init__(self, streams: Streams) -> None:
        self._streams, self.value = streams, 0

    def write(self, value: int) -> None:
        self._streams.queue(lambda: setattr(self, "value", value) is None)

    def wait(self, value: int) -> None:
        self._streams.queue(lambda: self.value >= value)


class StreamMark:
    def __init__(self, streams: Streams) -> None:
        self._streams, self._reached = streams, False
        streams.queue(lambda: setattr(self, "_reached", True) is None)

    def wait(self) -> None:
        self._streams.queue(lambda: self._reached)


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_message_overtakes_none_that_another_stream_was_given_before(end: str) -> None:
    """Prompts travel on the schedule stream, verified rounds on streams of their own.

    A stage's schedule stream stands still until the frame it adopts has come. A round that was taken meanwhile said
    that the prompt before it had been taken, too, and the sender wrote over it.
    """
    memory = StreamMemory()
    sender = RingSender(memory, BYTES)
    receiver = RingReceiver(memory, sender.handle)
    memory.streams.run("")
    sent, taken = memory.flags
    act, flag = (sender.send, sent) if end == "sender" else (receiver.take, taken)
    if end == "receiver":
        sent.value = 2
    for stream in ("prompt", "round"):
        memory.streams.current = stream
        act(torch.zeros(8))
    memory.streams.run("round")
    assert flag.value == 0, "the round's message came first"
    memory.streams.run("prompt")
    assert flag.value == 1
    memory.streams.run("round")
    assert flag.value == 2


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
