"""What applying a frame means for SGLang's scheduler: the steps of ``core.apply`` in the host's own terms."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, move_accept_tokens_to_target_kvcache
from torch import Tensor

from ..core.apply import advanced_lengths, chain_nodes, nodes_of_batch, owns_row
from ..core.frame import FrameKind, FrameRows
from ..core.identity import RowIdentity
from ..core.layout import FrameLayout
from ..core.tree_rows import TreeRows
from ..core.upload import index_tensor
from .extras import attach_extras, wants_extras
from .relay_input import PPSpecRelayInput
from .turn import StageTurn, record_of


class SchedulerState:
    """A stage's batches and caches, as ``core.apply`` sees them."""

    def __init__(self, scheduler, layout: FrameLayout) -> None:
        self.scheduler = scheduler
        self.layout = layout

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether requests have recurrent states besides KV."""
        return mambaish_config(self.scheduler.model_config) is not None

    def owns_row(self, turn: StageTurn, row: int) -> bool:
        """Whether the row's request still is the one the step ran for."""
        record = record_of(turn)
        req = record.reqs[row]
        return owns_row(
            launched_rebuilds=record.rebuilds[row],
            rebuilds=req.retraction_count,
            is_retracted=req.is_retracted,
            is_finished=req.finished(),
            chunks_in_flight=req.inflight_middle_chunks,
        )

    def commit_cache(self, turn: StageTurn, rows: FrameRows, owned: Sequence[int]) -> None:
        """Keep the accepted path of the owned rows: recurrent states, a tree's KV. The last stage did it in verify.

        A verify leaves a recurrent state after every node in scratch, and the request's own state unusable.
        """
        has_tree = rows.accept_index is not None
        if not owned or not (has_tree or self.is_recurrent) or self.scheduler.pp_group.is_last_rank:
            return
        shape = self.layout.shape
        accept_index = rows.accept_index if has_tree else chain_nodes(rows.num_accepted, shape)
        batch, take = self._as_verified(turn, owned)
        accept_index, num_accepted = accept_index[take], rows.num_accepted[take]
        nodes = nodes_of_batch(accept_index, shape).to(torch.int32)
        if self.is_recurrent:
            commit_mamba_states_after_verify(
                self.scheduler.tp_worker, batch, num_accepted.to(torch.int32), nodes, shape.num_draft_tokens
            )
        if has_tree:
            move_accept_tokens_to_target_kvcache(
                batch, nodes, (num_accepted - 1).to(torch.int32), self.scheduler.token_to_kv_pool_allocator
            )

    def _as_verified(self, turn: StageTurn, owned: Sequence[int]) -> tuple[ScheduleBatch, Tensor | slice]:
        """(the batch as it was verified, of the owned rows; the index that takes them)."""
        record = record_of(turn)
        slots = record.result.spec_verify_out_cache_loc.view(-1, self.layout.shape.num_draft_tokens)
        everything = len(owned) == len(record.reqs)
        take = slice(None) if everything else index_tensor(owned, slots.device)
        batch = record.snapshot.copy()
        batch.tree_cache = record.snapshot.tree_cache
        batch.req_pool_indices = record.snapshot.req_pool_indices[take]
        batch.seq_lens, batch.out_cache_loc = record.seq_lens[take], slots[take].reshape(-1)
        if batch.mamba_track_indices is not None:
            batch.mamba_track_indices = batch.mamba_track_indices[take]
        return batch, take

    def advance(
        self, turn: StageTurn, on_device: FrameRows, on_host: FrameRows | None, live: Sequence[RowIdentity]
    ) -> None:
        """Lengths of the live batch on the device; on the host too if the frame was read, else the host has none."""
        batch, record, launched = turn.batch, record_of(turn), turn.launch.identities
        batch.seq_lens = advanced_lengths(batch.seq_lens, record.seq_lens, on_device.num_accepted, launched, live)
        batch.seq_lens_sum = None
        if on_host is None or batch.seq_lens_cpu is None or record.seq_lens_cpu is None:
            batch.seq_lens_cpu = None
            return
        batch.seq_lens_cpu = advanced_lengths(
            batch.seq_lens_cpu, record.seq_lens_cpu, on_host.num_accepted, launched, live
        )
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())

    def fold(self, turn: StageTurn, newer: TreeRows) -> None:
        """The requests of the batch carry the newer trees from now on."""
        if isinstance(turn.batch.spec_info, PPSpecRelayInput):
            turn.batch.spec_info.rows.fold(newer)
        else:
            turn.batch.spec_info = PPSpecRelayInput(newer)

    def deliver(self, turn: StageTurn, rows: FrameRows, owned: Sequence[int]) -> None:
        """Hand tokens and counts of the owned rows to SGLang's result processor."""
        record, verify = record_of(turn), turn.launch.header.kind is FrameKind.VERIFY
        target, tokens, num_accepted = record.snapshot, rows.tokens, rows.num_accepted
        if len(owned) < len(record.reqs) and wants_extras(target):
            target = with_others_over(target, owned)  # logprobs go by place
        elif len(owned) < len(record.reqs):
            keep = list(owned)
            target, tokens, num_accepted = narrowed(target, keep), tokens[keep], num_accepted[keep]
        result = GenerationBatchResult(
            next_token_ids=tokens.flatten() if verify else tokens[:, 0],
            accept_lens=num_accepted if verify else None,
            speculative_num_draft_tokens=self.layout.shape.num_draft_tokens,
            speculative_output_stride=self.layout.shape.max_accepted,
            can_run_cuda_graph=record.result.can_run_cuda_graph,
            fpm_timing=record.result.fpm_timing,
        )
        attach_extras(self.scheduler, record, result, owned)
        self.scheduler.process_batch_result(target, result)


def narrowed(snapshot: ScheduleBatch, keep: list[int]) -> ScheduleBatch:
    """A copy of a result snapshot with the rows ``keep`` only."""
    smaller = snapshot.copy()
    smaller.reqs = [snapshot.reqs[i] for i in keep]
    smaller.req_pool_indices_cpu = snapshot.req_pool_indices_cpu[keep]
    for places in ("mamba_track_buffer_indices", "mamba_lazy_spec_track_positions_cpu"):
        if getattr(snapshot, places) is not None:
            setattr(smaller, places, [getattr(snapshot, places)[i] for i in keep])
    if snapshot.forward_mode.is_extend():  # else left over from the prefill the batch began as
        smaller.extend_lens = [snapshot.extend_lens[i] for i in keep]
    return smaller


def with_others_over(snapshot: ScheduleBatch, owned: Sequence[int]) -> ScheduleBatch:
    """A copy of a result snapshot in which rows that are not ``owned`` are over, each at its place."""
    known = set(owned)
    same_places = snapshot.copy()
    same_places.reqs = [req if row in known else _over(req) for row, req in enumerate(snapshot.reqs)]
    return same_places


def _over(req: Req) -> Req:
    """``req`` as one that has ended and was answered, which SGLang passes over; the request itself is left alone."""
    over = copy.copy(req)
    over.finished_reason, over.finished_output, over.inflight_middle_chunks = FINISH_ABORT(), True, 0
    return over
