"""The speculative settings of this server, as the engine-free half wants them."""

from __future__ import annotations

from sglang.srt.runtime_context import get_spec

from ..core.layout import FrameLayout, TreeShape


def tree_shape() -> TreeShape:
    """The configured tree: steps, topk and draft tokens."""
    spec = get_spec()
    return TreeShape(
        num_steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        num_draft_tokens=spec.speculative_num_draft_tokens,
    )


def frame_layout(capacity: int) -> FrameLayout:
    """``capacity``: as many rows as requests may hold KV, so that no batch is too large for a frame."""
    return FrameLayout(tree_shape(), capacity=capacity)
