"""How much of the host's work on a round comes behind the launch of the next one? One answer for all stages.

SGLang turns its own overlap schedule off under pipeline parallelism; ours does not depend on it. Overlap is on, but

- off if the user gave --disable-overlap-schedule;
- off if a request's own recurrent state is kept for its prefix when it ends: a surplus round would have changed it;
- of accounting alone if an attention backend of some stage plans from lengths on the host (flashinfer): those are in
  the frame, which is read first then;
- off where forwards run on the host itself, as on the CPU engine: there is nothing to hide the host's work behind,
  and a token would only leave one forward later. SGLANG_PP_SPEC_OVERLAP has it there all the same, for tests.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from ..core.ring import Overlap

logger = logging.getLogger(__name__)

_WORDS = {Overlap.OFF: "off: ", Overlap.ACCOUNTING: "of accounting alone: ", Overlap.ON: "on"}

#: Rounds of a request that the host has not accounted for when the next one is launched.
OVERLAP_LAG = 1


def agree_on_overlap(scheduler) -> Overlap:
    """Collective over the pipeline's stages: the least of what each can do, and why, in the log."""
    group = scheduler.pp_group
    stages: list[tuple[Overlap, str]] = [(Overlap.OFF, "")] * group.world_size
    dist.all_gather_object(stages, _possible_here(scheduler), group=group.cpu_group)
    agreed = min(overlap for overlap, _ in stages)
    reasons = sorted({reason for overlap, reason in stages if overlap is agreed and reason})
    logger.info("sglang_pp_spec: overlap %s", _WORDS[agreed] + "; ".join(reasons))
    return agreed


def reserve_for_lag(reserve: int) -> int | None:
    """Target:       sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode   (AFTER)

    Why:          the host reserves two decode steps of KV past the committed length, one for a round it has not
                  accounted for and one for the verify. The tail draft writes one step further; with overlap rounds
                  are launched one more step ahead. Past the reserve the drafter would write to slots of others.
    How:          a third step, with or without overlap: a few tokens per request. A is the host's allocation per
                  decode step: device length <= committed + A, verify writes A, the tail draft starts up to A later
                  and writes A.
    Upstream:     none
    Remove when:  the host sizes the reserve by the rounds in flight.
    """
    return reserve // 2 * (2 + OVERLAP_LAG) if is_pp_spec() else reserve


def row_headroom(extra: int) -> int | None:
    """Target:       sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len   (AFTER)

    Why:          a row of the KV table must hold what is reserved past the longest request.
    How:          the larger of the host's headroom and the reserve of above.
    Upstream:     sglang #26972 does it for page > 1
    Remove when:  see ``reserve_for_lag``.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1) if is_pp_spec() else extra


def is_pp_spec() -> bool:
    """Whether this process serves a stage of PP x spec."""
    return get_parallel().pp_size > 1 and get_spec().speculative_algorithm is not None


def _possible_here(scheduler) -> tuple[Overlap, str]:
    """How much overlap this stage can have, and what is in the way of more."""
    if scheduler.server_args.disable_overlap_schedule:
        return Overlap.OFF, "--disable-overlap-schedule"
    if _keeps_last_states(scheduler):
        return Overlap.OFF, "the prefix cache keeps a request's last state (--mamba-radix-cache-strategy no_buffer)"
    wanted = scheduler.settings.overlap
    on_host = torch.device(scheduler.device).type == "cpu"
    if on_host and wanted == "auto":
        return Overlap.OFF, "forwards run on the host"
    if wanted == "accounting":
        return Overlap.ACCOUNTING, "SGLANG_PP_SPEC_OVERLAP=accounting"
    planning = [] if on_host else _planning_from_host_lengths(scheduler)  # the CPU engine plans nothing
    if planning:
        why = f"{', '.join(planning)} plans from host lengths; --attention-backend triton does not"
        return Overlap.ACCOUNTING, why
    return Overlap.ON, ""


def _keeps_last_states(scheduler) -> bool:
    """Whether the prefix cache takes a request's own recurrent state over, and no checkpoint of it.

    With the strategy no_buffer, for which SGLang demands --disable-overlap-schedule of who asks for it. Where it
    falls back to no_buffer by itself, its resolved settings alone say so; ``server_args`` do not.
    """
    cache = scheduler.tree_cache
    return (
        cache.supports_mamba() and cache.supports_prefix_sharing() and not get_exec().mamba.enable_mamba_extra_buffer
    )


def _planning_from_host_lengths(scheduler) -> list[str]:
    """Names of the attention backends here, if one of them does."""
    backends = [scheduler.tp_worker.model_runner.attn_backend]
    if scheduler.draft_worker is not None:
        backends = list(scheduler.draft_worker.spec_v2_attn_backends)
    present = [backend for backend in backends if backend is not None]
    return sorted({type(backend).__name__ for backend in present if decide_needs_cpu_seq_lens([backend])})
