"""Where everything sits in a frame: computed once from the speculative settings, equal on all stages.

A frame is one contiguous int64 tensor ``[1 + capacity, width]``: row 0 is the header, row ``1 + i`` describes
the i-th request of the batch. A row is::

    rid digest | incarnation | num_accepted | num_drafts | tokens | drafts | parents | selected | accept index

The last three exist only where the configuration makes them data: ``parents`` and ``selected`` for topk > 1,
``accept index`` when an earlier stage must reorder its KV (topk > 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

HEADER_FIELDS = ("layout", "epoch", "step", "slot", "kind", "num_rows")
NUM_ACCEPTED = 2
NUM_DRAFTS = 3
_FIRST_PAYLOAD = 4


@dataclass(frozen=True)
class TreeShape:
    """The speculative settings a frame depends on; SGLang's words: num_steps, topk, num_draft_tokens."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.topk < 1:
            raise ValueError(f"num_steps and topk must be at least 1: {self}")
        if self.num_draft_tokens < 2:
            raise ValueError(f"num_draft_tokens counts the bonus token and must be at least 2: {self}")
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(f"a chain (topk 1) has num_steps + 1 tokens: {self}")

    @property
    def num_drafts(self) -> int:
        """Proposed tokens of a row, the bonus token not counted."""
        return self.num_draft_tokens - 1

    @property
    def max_accepted(self) -> int:
        """Most tokens one round can accept: a full path and the bonus token after it."""
        return self.num_steps + 1

    @property
    def num_parents(self) -> int:
        """Width of the parent list that ``build_tree_kernel_efficient`` reads."""
        return self.topk * (self.num_steps - 1) + 1 if self.num_steps > 1 else 0

    @property
    def is_chain(self) -> bool:
        return self.topk == 1


@dataclass(frozen=True)
class FrameLayout:
    """Column ranges of a frame for one ``TreeShape``; ``capacity`` is the most rows a frame can hold."""

    shape: TreeShape
    capacity: int

    @cached_property
    def tokens(self) -> slice:
        return slice(_FIRST_PAYLOAD, _FIRST_PAYLOAD + self.shape.max_accepted)

    @cached_property
    def drafts(self) -> slice:
        return slice(self.tokens.stop, self.tokens.stop + self.shape.num_drafts)

    @cached_property
    def parents(self) -> slice:
        return slice(self.drafts.stop, self.drafts.stop + (0 if self.shape.is_chain else self.shape.num_parents))

    @cached_property
    def selected(self) -> slice:
        return slice(self.parents.stop, self.parents.stop + (0 if self.shape.is_chain else self.shape.num_drafts))

    @cached_property
    def accept_index(self) -> slice:
        width = 0 if self.shape.is_chain else self.shape.max_accepted
        return slice(self.selected.stop, self.selected.stop + width)

    @cached_property
    def width(self) -> int:
        return max(len(HEADER_FIELDS), int(self.accept_index.stop))

    @property
    def size(self) -> tuple[int, int]:
        """Shape of the tensor on the wire."""
        return 1 + self.capacity, self.width

    @cached_property
    def fingerprint(self) -> int:
        """One number that differs whenever two stages disagree about the layout."""
        words = (self.shape.num_steps, self.shape.topk, self.shape.num_draft_tokens, self.capacity, self.width)
        value = 0x5F3D
        for word in words:
            value = (value * 1_000_003 + word) & 0x7FFF_FFFF_FFFF
        return value
