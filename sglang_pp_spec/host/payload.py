"""From the last stage's result to the payload of a frame."""

from __future__ import annotations

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from torch import Tensor

from ..core.frame import FrameKind, FramePayload
from ..core.layout import TreeShape
from ..core.upload import index_tensor
from .rows import drafted_rows
from .turn import StageTurn


def frame_payload(turn: StageTurn, result: GenerationBatchResult, shape: TreeShape) -> tuple[FramePayload, list[int]]:
    """The payload (device tensors) and the number of drafts per row (0 or ``shape.num_drafts``)."""
    num_rows = turn.launch.header.num_rows
    verify = turn.launch.header.kind is FrameKind.VERIFY
    rows = list(range(num_rows)) if verify else drafted_rows(turn.batch)
    tree = bool(rows) and not shape.is_chain
    tokens = result.next_token_ids.view(num_rows, -1)
    payload = FramePayload(
        tokens=tokens[:, : shape.max_accepted],
        num_accepted=result.accept_lens if verify else None,
        drafts=result.next_verify_chain[:, 1:] if rows else None,
        parents=result.next_verify_parent_list if tree else None,
        selected=result.next_verify_top_scores_index if tree else None,
        accept_index=_own_nodes(result.accept_index, shape) if verify and tree else None,
        draft_rows=None if len(rows) == num_rows else index_tensor(rows, tokens.device),
    )
    drafted = set(rows)
    return payload, [shape.num_drafts if row in drafted else 0 for row in range(num_rows)]


def _own_nodes(accept_index: Tensor, shape: TreeShape) -> Tensor:
    """[rows, max_accepted]: SGLang numbers the nodes of all rows through; a frame numbers them per row, -1 = none."""
    rows = torch.arange(accept_index.shape[0], device=accept_index.device, dtype=accept_index.dtype)
    return torch.where(accept_index < 0, accept_index, accept_index - rows.unsqueeze(1) * shape.num_draft_tokens)
