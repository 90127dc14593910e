"""The speculative settings of this server, as the engine-free half wants them."""

from __future__ import annotations

from sglang.srt.runtime_context import get_parallel, get_spec

from ..core.layout import FrameLayout, TreeShape


def tree_shape() -> TreeShape:
    """The configured tree: steps, topk and draft tokens."""
    spec = get_spec()
    return TreeShape(
        num_steps=spec.speculative_num_steps,
        topk=spec.speculative_eagle_topk,
        num_draft_tokens=spec.speculative_num_draft_tokens,
    )


def frame_layout() -> FrameLayout:
    """Frames hold a full microbatch, and one row more for a chunk that continues beside new requests."""
    return FrameLayout(tree_shape(), capacity=get_parallel().pp_max_micro_batch_size + 1)
