"""Applying a frame: what a checked frame changes on a stage, in order, for sync and every later mode alike.

1. the stage's own KV: the accepted path is moved to the front (topk > 1; the last stage did it after verify);
2. the live batch: lengths advance by the accepted counts, rows are folded in by identity;
3. the host's accounting: SGLang's own result processor, on the rows that still own their request.
"""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache
from torch import Tensor

from ..core.frame import FrameKind, FrameRows
from ..core.identity import RowIdentity
from ..core.layout import FrameLayout
from ..core.stage_loop import ArrivedFrame
from ..core.tree_rows import TreeRows
from .extras import attach_extras
from .relay_input import PPSpecRelayInput
from .turn import ForwardRecord, StageTurn, record_of


def apply_frame(
    scheduler, turn: StageTurn, frame: ArrivedFrame, layout: FrameLayout, live: list[RowIdentity]
) -> None:
    """Apply a checked frame to ``turn``'s batch; ``live`` names the batch's rows now."""
    header, record = turn.launch.header, record_of(turn)
    on_device = FrameRows.of(frame.device, layout, header.num_rows)
    on_host = FrameRows.of(frame.host, layout, header.num_rows)
    if header.kind is FrameKind.VERIFY:
        if on_device.accept_index is not None and not scheduler.pp_group.is_last_rank:
            compact_accepted_path(scheduler, record, on_device, layout)
        advance_lengths(turn, on_device, on_host, live)
    if header.kind is not FrameKind.MIDDLE:
        fold_rows(turn.batch, TreeRows.of_frame(on_device, layout.shape, turn.launch.identities))
    account(scheduler, turn, on_host, layout)


def compact_accepted_path(scheduler, record: ForwardRecord, rows: FrameRows, layout: FrameLayout) -> None:
    """Move the KV of the accepted nodes to the front of each row's verify slots, before lengths advance."""
    assert rows.accept_index is not None
    snapshot = record.snapshot
    snapshot.seq_lens = record.seq_lens
    snapshot.out_cache_loc = record.result.spec_verify_out_cache_loc
    first_node = torch.arange(rows.accept_index.shape[0], device=rows.accept_index.device).unsqueeze(1)
    node = rows.accept_index + first_node * layout.shape.num_draft_tokens
    move_accept_tokens_to_target_kvcache(
        snapshot,
        torch.where(rows.accept_index < 0, -1, node).to(torch.int32),
        (rows.num_accepted - 1).to(torch.int32),
        scheduler.token_to_kv_pool_allocator,
    )


def advance_lengths(turn: StageTurn, on_device: FrameRows, on_host: FrameRows, live: list[RowIdentity]) -> None:
    """New length = forward-time length + accepted count, for the rows the live batch still has."""
    batch, record = turn.batch, record_of(turn)
    seq_lens = record.seq_lens + on_device.num_accepted
    seq_lens_cpu = None if record.seq_lens_cpu is None else record.seq_lens_cpu + on_host.num_accepted
    launched = list(turn.launch.identities)
    if live == launched:
        batch.seq_lens, batch.seq_lens_cpu = seq_lens, seq_lens_cpu
    else:
        position = {identity: i for i, identity in enumerate(launched)}
        pairs = [(i, position[identity]) for i, identity in enumerate(live) if identity in position]
        batch.seq_lens = _replaced(batch.seq_lens, seq_lens, pairs)
        if batch.seq_lens_cpu is not None and seq_lens_cpu is not None:
            batch.seq_lens_cpu = _replaced(batch.seq_lens_cpu, seq_lens_cpu, pairs)
    batch.seq_lens_sum = None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum())


def _replaced(target: Tensor, source: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """A copy of ``target`` with ``target[i] = source[j]`` for all (i, j) of ``pairs``."""
    index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(target.device, non_blocking=True)
    target = target.clone()
    target[index[:, 0]] = source[index[:, 1]]
    return target


def fold_rows(batch: ScheduleBatch, newer: TreeRows) -> None:
    """The requests of the batch carry the newer trees from now on."""
    if isinstance(batch.spec_info, PPSpecRelayInput):
        batch.spec_info.rows.fold(newer)
    else:
        batch.spec_info = PPSpecRelayInput(newer)


def account(scheduler, turn: StageTurn, rows: FrameRows, layout: FrameLayout) -> None:
    """Hand tokens and counts to SGLang's result processor, without the rows that no longer own their request."""
    record, verify = record_of(turn), turn.launch.header.kind is FrameKind.VERIFY
    target, tokens, num_accepted = record.snapshot, rows.tokens, rows.num_accepted
    keep = [row for row in range(len(record.reqs)) if record.owns_row(row)]
    if len(keep) < len(record.reqs):
        target, tokens, num_accepted = narrowed(target, keep), tokens[keep], num_accepted[keep]
    result = GenerationBatchResult(
        next_token_ids=tokens.flatten() if verify else tokens[:, 0],
        accept_lens=num_accepted if verify else None,
        speculative_num_draft_tokens=layout.shape.num_draft_tokens,
        speculative_output_stride=layout.shape.max_accepted,
        can_run_cuda_graph=record.result.can_run_cuda_graph,
        fpm_timing=record.result.fpm_timing,
    )
    attach_extras(scheduler, record, result)
    scheduler.process_batch_result(target, result)


def narrowed(snapshot: ScheduleBatch, keep: list[int]) -> ScheduleBatch:
    """A copy of a result snapshot with the rows ``keep`` only."""
    smaller = snapshot.copy()
    smaller.reqs = [snapshot.reqs[i] for i in keep]
    smaller.req_pool_indices_cpu = snapshot.req_pool_indices_cpu[keep]
    if snapshot.extend_lens is not None and not torch.is_tensor(snapshot.extend_lens):
        smaller.extend_lens = [snapshot.extend_lens[i] for i in keep]
    return smaller
