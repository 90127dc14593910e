"""All hooks or none: check the host, register, apply, and look whether they really are in place."""

from __future__ import annotations

import logging
from functools import partial

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..core.settings import Settings
from .symbols import PINNED_VERSION, check_host, host_version

logger = logging.getLogger(__name__)

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
ARGUMENT_CHECK = "sglang.srt.arg_groups.validation_hook.check_pipeline_parallel_compat"
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"
HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
AUX_CAPTURE = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"
)
TARGET_FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
DRAFT_EMBEDDING = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._resolve_shared_embed_and_head"
MM_EMBEDDING = "sglang.srt.managers.mm_utils.general_mm_embed_routine"
HOST_PLAN = "sglang.srt.layers.attention.flashinfer_backend.fast_prefill_plan"
TARGETS = (
    SCHEDULER,
    ARGUMENT_CHECK,
    RESERVE,
    HEADROOM,
    AUX_CAPTURE,
    TARGET_FORWARD,
    DRAFT_EMBEDDING,
    MM_EMBEDDING,
    HOST_PLAN,
)


def install(settings: Settings) -> None:
    """Put our scheduler and argument check in place; ``SystemExit`` with symbol, version and fix if that fails.

    SGLang logs and swallows what a plugin raises and goes on natively, but it does not swallow ``SystemExit``.
    """
    problems = check_host()
    if problems:
        raise SystemExit("sglang_pp_spec cannot run on this host:\n  " + "\n  ".join(problems))
    from .arguments import check_before_host
    from .aux_states import capture_on_every_stage, complete_on_last_stage, keep_own_embedding
    from .host_plans import plan_behind_copy
    from .mm_embeds import give_to_drafter, send_with_hidden_states
    from .overlap import reserve_for_lag, row_headroom
    from .scheduler import PPSpecScheduler

    PPSpecScheduler.settings = settings
    HookRegistry.register(SCHEDULER, PPSpecScheduler, HookType.REPLACE)
    HookRegistry.register(ARGUMENT_CHECK, partial(check_before_host, settings=settings), HookType.BEFORE)
    HookRegistry.register(RESERVE, reserve_for_lag, HookType.AFTER)
    HookRegistry.register(HEADROOM, row_headroom, HookType.AFTER)
    HookRegistry.register(AUX_CAPTURE, capture_on_every_stage, HookType.AFTER)
    HookRegistry.register(TARGET_FORWARD, complete_on_last_stage, HookType.AFTER)
    HookRegistry.register(TARGET_FORWARD, give_to_drafter, HookType.AFTER)
    HookRegistry.register(MM_EMBEDDING, send_with_hidden_states, HookType.AFTER)
    HookRegistry.register(DRAFT_EMBEDDING, keep_own_embedding, HookType.AROUND)
    HookRegistry.register(HOST_PLAN, plan_behind_copy, HookType.AROUND)
    HookRegistry.apply_hooks()
    _verify(PPSpecScheduler)
    logger.info("sglang_pp_spec active on sglang %s: %s", host_version(), settings)


def _verify(replacement: type) -> None:
    """A hook that was registered but not applied leaves a native server under our name: stop instead."""
    import sglang.srt.managers.scheduler as module

    applied = HookRegistry._patched
    missing = [target for target in TARGETS if target not in applied]
    if module.Scheduler is not replacement and SCHEDULER not in missing:
        missing.append(SCHEDULER)
    if missing:
        raise SystemExit(
            f"sglang_pp_spec: {', '.join(missing)} could not be hooked in sglang {host_version()}; "
            f"install sglang=={PINNED_VERSION} and remove other plugins that replace it"
        )
