"""What the toy model says: every token encodes whose it is and where it stands, so that a mix-up can be read off.

A request is ``(rid, life)``; ``life`` counts how often the id was used. Retraction resumes without resampling: a
position has one right token, whatever happened before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_pp_spec.core.identity import rid_digest

WRONG = 1 << 40  # a draft the target disagrees with
ILLEGAL = 1 << 41  # what the unmasked target would say where the grammar forbids it
POISON = -77_777  # freed or rejected KV, padding, unused columns: must never surface
ZERO_RID = "zero"  # all its tokens are 0, the value an empty draft column happens to hold


def token(rid: str, life: int, position: int) -> int:
    """The right token of a request at a position."""
    if rid == ZERO_RID:
        return 0
    return ((rid_digest(rid) & 0xFFF) << 24) | (life << 16) | (position << 1) | 1


def mixed(value: int, *words: int) -> int:
    """A hash chain's next link."""
    for word in words:
        value = (value * 1_000_003 + word + 1) & 0x7FFF_FFFF_FFFF
    return value


def pattern(step: int, rid: str, most: int) -> int:
    """How many of the drafts made at ``step`` are right: arbitrary, the same in every run."""
    return mixed(step, rid_digest(rid) & 0xFFFF) // 7 % (most + 1)


@dataclass
class Oracle:
    """Decides tokens and how good the drafts are."""

    num_drafts: int
    accept: Callable[[int, str], int] | None = None  # (step, rid) -> right drafts; None: ``pattern``
    lost: Callable[[int, str], bool] = lambda step, rid: False  # (step, rid): no drafts for this row
    suspect: set[tuple[str, int]] = field(default_factory=set)  # (rid, life): ended by a refused frame
    drafted: dict[tuple[str, int, int], int] = field(default_factory=dict)  # (rid, life, position): right drafts

    def right_drafts(self, step: int, rid: str) -> int:
        if self.lost(step, rid):
            return 0
        return self.accept(step, rid) if self.accept else pattern(step, rid, self.num_drafts)

    @staticmethod
    def illegal_at(position: int, grammar: bool) -> bool:
        """Where the unmasked target leaves the grammar."""
        return grammar and position % 3 == 0

    def unmasked(self, rid: str, life: int, position: int, grammar: bool) -> int:
        right = token(rid, life, position)
        return right | ILLEGAL if self.illegal_at(position, grammar) else right
