"""The toy ``Transport``: receives match sends in the order they were posted, as point-to-point operations do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from links import Link, Waiter, wait_in_vain
from torch import Tensor


@dataclass(frozen=True)
class ToyFrame:
    """An arrived frame; ``reading`` is called when the host reads it."""

    device: Tensor
    host: Tensor
    reading: Callable[[], None] = lambda: None

    def read(self) -> Tensor:
        self.reading()
        return self.host


class FrameLink(Link):
    """Frames for one earlier stage. A frame leaves its sender's queue when a receive was posted for it."""

    def __init__(self, name: str, *, capacity: int | None = None, wait: Waiter = wait_in_vain) -> None:
        super().__init__(name, capacity=None, wait=wait)
        self.bound = capacity
        self.num_posted = 0
        self.arrived: list[tuple[float, Tensor]] = []

    def put(self, item: Tensor, time: float = 0.0) -> None:
        bound = self.bound
        if bound:
            self.wait(lambda: self.num_sent < self.num_posted + bound, f"send on {self.name}")
        for frame in self.tamper(self.num_sent, item):
            self.arrived.append((time, frame))
        self.num_sent += 1
        self.most_waiting = max(self.most_waiting, self.num_sent - self.num_posted)
        if bound == 0:
            self.wait(lambda: self.num_sent <= self.num_posted, f"rendezvous on {self.name}")

    def post(self) -> int:
        self.num_posted += 1
        return self.num_posted - 1

    def get(self, number: int) -> tuple[float, Tensor]:
        self.wait(lambda: len(self.arrived) > number, f"receive {number} on {self.name}")
        return self.arrived[number]


class Clock:
    """A stage's virtual time and how much of it was work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.work: list[tuple[float, float]] = []

    def spend(self, cost: float) -> None:
        self.work.append((self.now, self.now + cost))
        self.now += cost

    def until(self, time: float) -> None:
        self.now = max(self.now, time)

    def utilisation(self, start: float, end: float) -> float:
        """Share of [start, end) spent working."""
        busy = sum(max(0.0, min(b, end) - max(a, start)) for a, b in self.work)
        return busy / (end - start)


class ToyTransport:
    """One stage's end: ``outgoing`` on the last stage, one link per earlier stage; ``incoming`` on the others."""

    def __init__(
        self, clock: Clock, *, outgoing: Sequence[FrameLink] = (), incoming: FrameLink | None = None
    ) -> None:
        self.clock = clock
        self.outgoing = outgoing
        self.incoming = incoming
        self._posted: dict[int, int] = {}
        self._local: dict[int, Tensor] = {}
        self.reading: Callable[[], None] = lambda: None

    def send(self, slot: int, frame: Tensor) -> None:
        self._local[slot] = frame
        for link in self.outgoing:
            link.put(frame.clone(), self.clock.now)

    def post(self, slot: int) -> None:
        assert self.incoming is not None
        assert slot not in self._posted, f"slot {slot} has a frame under way already"
        self._posted[slot] = self.incoming.post()

    def fetch(self, slot: int) -> ToyFrame:
        if self.incoming is None:
            frame = self._local.pop(slot)
        else:
            time, frame = self.incoming.get(self._posted.pop(slot))
            self.clock.until(time)
        return ToyFrame(frame.clone(), frame, self.reading)
