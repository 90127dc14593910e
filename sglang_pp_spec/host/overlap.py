"""Are rounds launched before the host has read the frame of the round before? One answer for all stages.

SGLang turns its own overlap schedule off under pipeline parallelism; ours does not depend on it. Overlap is on unless

- the user gave --disable-overlap-schedule;
- an attention backend of some stage plans from lengths on the host: those are in the frame that nobody has read;
- forwards run on the host itself, as on the CPU engine: there is nothing to hide the host's work behind, and a token
  would only leave one forward later. SGLANG_PP_SPEC_OVERLAP=on has it there all the same, for tests.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens
from sglang.srt.runtime_context import get_parallel, get_spec

logger = logging.getLogger(__name__)

#: Rounds of a request that the host has not accounted for when the next one is launched.
OVERLAP_LAG = 1


def agree_on_overlap(scheduler) -> bool:
    """Collective over the pipeline's stages; the reason against it is logged."""
    group = scheduler.pp_group
    reasons: list[str | None] = [None] * group.world_size
    dist.all_gather_object(reasons, _reason_against(scheduler), group=group.cpu_group)
    against = sorted({reason for reason in reasons if reason})
    logger.info("sglang_pp_spec: overlap %s", "off: " + "; ".join(against) if against else "on")
    return not against


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
    return reserve // 2 * (2 + OVERLAP_LAG) if _is_pp_spec() else reserve


def row_headroom(extra: int) -> int | None:
    """Target:       sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len   (AFTER)

    Why:          a row of the KV table must hold what is reserved past the longest request.
    How:          the larger of the host's headroom and the reserve of above.
    Upstream:     sglang #26972 does it for page > 1
    Remove when:  see ``reserve_for_lag``.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1) if _is_pp_spec() else extra


def _is_pp_spec() -> bool:
    return get_parallel().pp_size > 1 and get_spec().speculative_algorithm is not None


def _reason_against(scheduler) -> str | None:
    if scheduler.server_args.disable_overlap_schedule:
        return "--disable-overlap-schedule"
    if torch.device(scheduler.device).type == "cpu":
        # Here no backend is in the way: host and device lengths are one tensor.
        return None if scheduler.settings.overlap == "on" else "forwards run on the host"
    backends = [scheduler.tp_worker.model_runner.attn_backend]
    if scheduler.draft_worker is not None:
        backends = list(scheduler.draft_worker.spec_v2_attn_backends)
    if decide_needs_cpu_seq_lens(backends):
        names = sorted({type(backend).__name__ for backend in backends})
        return f"{', '.join(names)} plans from host lengths; --attention-backend triton does not"
    return None
