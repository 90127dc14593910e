"""The mutants, over the files that hold them."""

from __future__ import annotations

import frames
import lifetimes
import loop
import rows
import states

MUTANTS = [
    *rows.IDENTITY,
    *rows.FENCE,
    *lifetimes.CHUNK,
    *lifetimes.ACCOUNTING,
    *lifetimes.STATE,
    *frames.PAYLOAD,
    *frames.GRAMMAR_AND_DRAFTER,
    *loop.RING,
    *loop.REFUSAL,
    *loop.OVERLAP,
    *states.RECURRENT,
]
