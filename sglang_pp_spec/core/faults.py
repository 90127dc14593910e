"""Faults on the frame channel, asked for by name: how tests see that a wrong frame is refused on a real server.

A fault is ``kind@N``: at the N-th frame, or the first one after it that the fault can happen to, the last stage
misbehaves once. Its own local frame stays right, as it would if the link were at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .channel import FrameChannel
from .layout import HEADER_FIELDS, NUM_ACCEPTED

_NUM_ROWS = HEADER_FIELDS.index("num_rows")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and from which frame on."""

    kind: str
    frame: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """``kind@N``; ValueError for an unknown kind."""
        kind, _, frame = text.partition("@")
        if kind not in KINDS or not frame.isdigit():
            raise ValueError(f"{text!r} is no fault; write one of {', '.join(KINDS)} as kind@N")
        return cls(kind, int(frame))


class FaultyChannel(FrameChannel):
    """A frame channel that does one thing wrong, on the last stage."""

    def __init__(self, *args: Any, fault: Fault, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fault: Fault | None = fault
        self._num_sent = 0
        self._previous: Tensor | None = None
        self._held: tuple[int, Tensor] | None = None

    def send(self, slot: int, frame: Tensor) -> None:
        """Send, unless the fault says otherwise."""
        fault, previous, self._previous = self._fault, self._previous, frame
        self._num_sent += 1
        if self._held is not None:
            (late_slot, late), self._held = self._held, None
            super().send(slot, frame)
            super().send(late_slot, late)
        elif fault is None or self._num_sent < fault.frame or not KINDS[fault.kind][0](frame, previous):
            super().send(slot, frame)
        else:
            self._fault = None
            self._misbehave(fault, slot, frame, previous)

    def _misbehave(self, fault: Fault, slot: int, frame: Tensor, previous: Tensor | None) -> None:
        if fault.kind == "delay":
            self._held = (slot, frame)
        elif fault.kind != "drop":
            super().send(slot, KINDS[fault.kind][1](frame, previous))


def _never(frame: Tensor, previous: Tensor | None) -> bool:
    return False


def _always(frame: Tensor, previous: Tensor | None) -> bool:
    return True


def _has_previous(frame: Tensor, previous: Tensor | None) -> bool:
    return previous is not None


def _has_two_rows(frame: Tensor, previous: Tensor | None) -> bool:
    return int(frame[0, _NUM_ROWS]) >= 2


def _nothing(frame: Tensor, previous: Tensor | None) -> Tensor:
    return frame


def _corrupt(frame: Tensor, previous: Tensor | None) -> Tensor:
    wrong = frame.clone()
    wrong[1, 0] ^= 1
    return wrong


def _miscount(frame: Tensor, previous: Tensor | None) -> Tensor:
    wrong = frame.clone()
    wrong[1, NUM_ACCEPTED] = 99
    return wrong


def _permute(frame: Tensor, previous: Tensor | None) -> Tensor:
    wrong = frame.clone()
    wrong[1], wrong[2] = frame[2], frame[1]
    return wrong


def _duplicate(frame: Tensor, previous: Tensor | None) -> Tensor:
    assert previous is not None
    return previous


#: kind -> (can it happen to this frame, the frame sent in its place)
KINDS: dict[str, tuple[Callable[[Tensor, Tensor | None], bool], Callable[[Tensor, Tensor | None], Tensor]]] = {
    "corrupt": (_always, _corrupt),
    "miscount": (_always, _miscount),
    "permute": (_has_two_rows, _permute),
    "duplicate": (_has_previous, _duplicate),
    "delay": (_always, _nothing),
    "drop": (_always, _nothing),
    "diverge": (_never, _nothing),  # no fault of the channel: stage 0 schedules another batch than the others
}
