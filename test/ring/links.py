"""FIFO links between toy stages: bounded or not, timed, and open to tampering.

``Waiter`` says what happens when a stage must wait: alone in its thread it hands the baton on (``baton.py``); in a
run that walks the stages one after the other nothing can still come, so waiting is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Waiter = Callable[[Callable[[], bool], str], None]
Tamper = Callable[[int, Any], Sequence[Any]]  # (number of the item, item) -> what arrives instead


class Stuck(AssertionError):
    """A stage waits for something that never comes."""


def wait_in_vain(ready: Callable[[], bool], what: str) -> None:
    if not ready():
        raise Stuck(what)


class Link:
    """Items of one sender for one receiver, in order. ``capacity`` None: a send never waits; 0: a rendezvous."""

    def __init__(self, name: str, *, capacity: int | None = None, wait: Waiter = wait_in_vain) -> None:
        self.name = name
        self.capacity = capacity
        self.wait = wait
        self.tamper: Tamper = lambda number, item: (item,)
        self.items: deque[tuple[float, Any]] = deque()
        self.num_sent = 0
        self.num_taken = 0
        self.most_waiting = 0

    def put(self, item: Any, time: float = 0.0) -> None:
        if self.capacity:
            self.wait(lambda: len(self.items) < (self.capacity or 0), f"send on {self.name}")
        for arriving in self.tamper(self.num_sent, item):
            self.items.append((time, arriving))
        self.num_sent += 1
        self.most_waiting = max(self.most_waiting, len(self.items))
        if self.capacity == 0:
            self.wait(lambda: not self.items, f"rendezvous on {self.name}")

    def take(self) -> tuple[float, Any]:
        self.wait(lambda: bool(self.items), f"receive on {self.name}")
        self.num_taken += 1
        return self.items.popleft()
