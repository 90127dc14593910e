"""The last stage's worker: verify, draft extend, then at once the draft of the next round.

Stage 0 needs the next round's tokens before it can run its half, so drafting cannot wait for the next turn of the
slot. The same holds after prefill: the chunk that ends a prompt is drafted for too, so the first decode round of
a request verifies a real tree.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode, PPProxyTensors
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_utils import draft_tp_context, spec_stage_span
from torch import Tensor

from .rows import drafted_rows
from .streams import start_host_copy


class TailDraftWorker(EAGLEWorkerV2):
    """EAGLE worker of the last stage.

    Target:       sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2   (subclass, built by our scheduler)
    Why:          the host drafts after verify only, blocks the host for the new lengths while doing it, and leaves
                  a request without a tree after prefill.
    How:          ``forward_batch_generation`` calls the host's verify, draft extend and draft in our order; the
                  phases themselves are the host's.
    Upstream:     sglang #30775; a draft after prefill is not upstream.
    Remove when:  the host drafts at the end of prefill and of verify without reading lengths back.
    """

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish=None,
        grammar_barrier=None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> GenerationBatchResult:
        """One step of the last stage; the next trees are on the result's ``next_verify_*`` fields.

        ``next_verify_chain`` is [drafted rows, num_draft_tokens] int64 (column 0 = bonus token); None if no row
        was drafted for. Runs inside the scheduler's forward isolation, which undoes the edits to ``batch``.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = super().forward_batch_generation(
                batch, on_publish=on_publish, grammar_barrier=grammar_barrier, pp_proxy_tensors=pp_proxy_tensors
            )
            rows = drafted_rows(batch)
            if rows:
                batch.spec_info = result.next_draft_input
                _keep_rows(batch, rows)
                self._draft_next(batch, result, batch.spec_info, batch.seq_lens, self._start_reading(batch.seq_lens))
            return result
        result = self.verify(batch, pp_proxy_tensors=pp_proxy_tensors, grammar_barrier=grammar_barrier)
        read_lens = self._start_reading(result.new_seq_lens)
        with self._drafting("draft_extend"):
            self.draft_worker._draft_extend_for_decode(batch, result, kv_loc_plan=None)
        self._draft_next(batch, result, result.next_draft_input, result.new_seq_lens, read_lens)
        # Lengths advance on all stages alike, when the frame is applied; with new lengths on the result the host's
        # run_batch would advance them here, blocking on a copy to the host.
        result.new_seq_lens = None
        return result

    def _draft_next(
        self,
        batch: ScheduleBatch,
        result: GenerationBatchResult,
        draft_input: EagleDraftInput,
        seq_lens: Tensor,
        read_lens: Callable[[], Tensor | None],
    ) -> None:
        """Draft the round that starts at ``seq_lens`` ([rows] int64, device) and put its trees on ``result``.

        ``read_lens`` waits for their host copy; see ``_start_reading``. flashinfer's plan of the draft needs that
        wait even where the host knows the lengths: it is written to a pinned buffer that slots of one batch size
        share, and behind it the other slot's draft is done.
        """
        batch.spec_info = draft_input
        batch.forward_mode = ForwardMode.DECODE
        batch.input_ids = None
        batch.seq_lens = seq_lens
        batch.seq_lens_cpu = read_lens()
        batch.seq_lens_sum = None if batch.seq_lens_cpu is None else int(batch.seq_lens_cpu.sum())
        with self._drafting("draft"):
            verify_input, parents, selected = self.draft_worker.draft(batch, with_topology=True)
        result.next_verify_chain = verify_input.draft_token.view(len(batch.reqs), -1)
        result.next_verify_parent_list = parents
        result.next_verify_top_scores_index = selected

    def _start_reading(self, seq_lens: Tensor) -> Callable[[], Tensor | None]:
        """Start a copy of ``seq_lens`` to the host if a draft is planned from it; the result waits for it.

        It is queued behind the verify, so what is launched until it is asked for runs while the host plans. On the
        CPU the host copy is the tensor itself.
        """
        if seq_lens.is_cpu:
            return lambda: seq_lens
        if not decide_needs_cpu_seq_lens(self.spec_v2_attn_backends):
            return lambda: None
        return start_host_copy(seq_lens)

    @contextlib.contextmanager
    def _drafting(self, span: str) -> Iterator[None]:
        """The surroundings the host gives every draft phase."""
        with (
            draft_tp_context(self.draft_worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
            spec_stage_span(span),
        ):
            yield


class _NoPenalties:
    """The forward's copy of the sampling info carries no penalizer, but the host's filter asks for one."""

    def filter(self, keep_indices: Tensor) -> None:
        """Nothing to filter: penalties were accumulated before the forward, and drafting reads none."""


def _keep_rows(batch: ScheduleBatch, rows: list[int]) -> None:
    """Leave ``rows`` of ``batch`` alone, inside forward isolation, which brings the others back."""
    if len(rows) < len(batch.reqs):
        batch.sampling_info = dataclasses.replace(batch.sampling_info, penalizer_orchestrator=_NoPenalties())
        batch.filter_batch(keep_indices=rows)
