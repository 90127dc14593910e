"""What a stage did when: one JSON line per span, for pictures of stage occupancy. Off unless a folder is given."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


class Timeline:
    """Spans of one stage; times are ``time.monotonic`` seconds, which all processes of a machine share."""

    def __init__(self, stage: int, sink: TextIO | None) -> None:
        self.stage = stage
        self.slot = -1  # the slot whose turn it is
        self._sink = sink

    @classmethod
    def open(cls, folder: str, stage: int) -> Timeline:
        """A timeline writing ``folder/stage<N>.jsonl``; one that does nothing for an empty ``folder``."""
        if not folder:
            return cls(stage, None)
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        return cls(stage, (path / f"stage{stage}.jsonl").open("w", buffering=1))

    @contextlib.contextmanager
    def span(self, name: str, step: int | None = None) -> Iterator[None]:
        """Record how long the block took. On a GPU this is host time, not device time."""
        if self._sink is None:
            yield
            return
        start = time.monotonic()
        try:
            yield
        finally:
            record = {"stage": self.stage, "name": name, "slot": self.slot, "step": step}
            self._sink.write(json.dumps(record | {"start": start, "end": time.monotonic()}) + "\n")
