"""flashinfer plans a chain's rounds from the host's lengths, without reading the device's.

SGLang has such plans for verify and draft, off by default: without them a plan reads its lengths from the device,
behind all that is queued there. On a stage of a pipeline that is another slot's forward or hidden states that are
still to come, and the host launches nothing meanwhile. Trees, prefills, batches larger than the captured ones and
targets with sliding windows are planned as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import attention_backends, get_spec

from ..core.layout import TreeShape

#: Per flashinfer wrapper: the copy of its newest plan to the device is done.
_copied: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def uses_flashinfer() -> bool:
    """Whether target or drafter have flashinfer's attention, for prompts or for rounds."""
    return "flashinfer" in (*attention_backends(), get_spec().speculative_draft_attention_backend)


def prefer_host_plans(shape: TreeShape) -> None:
    """Before graphs are captured: plan a chain's verify and draft on the host, unless the user said otherwise."""
    if not shape.is_chain:
        return
    for option in (envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN, envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR):
        if not option.is_set():
            option.set(True)


def plan_behind_copy(original: Callable, wrapper: Any, *args: Any, **options: Any) -> Any:
    """Target:       sglang.srt.layers.attention.flashinfer_backend.fast_prefill_plan   (AROUND)

    Why:          a plan is written to a pinned buffer of its wrapper and copied from there to the device, behind what
                  is queued. Slots of one batch size share the wrapper, and a plan that reads nothing back does not
                  wait: the next slot's would be written over this one's before it was copied.
    How:          the host waits until the plan before has been copied: until the step before has begun. With one
                  stage it has. The draft's own plan needs no wait (``TailDraftWorker._draft_next``).
    Upstream:     none; the host's own loops plan one batch at a time
    Remove when:  a plan owns its buffer until it has been copied.
    """
    copied = _copied.get(wrapper)
    if copied is None:
        copied = _copied[wrapper] = torch.get_device_module(wrapper.device).Event()
    else:
        copied.synchronize()
    plan = original(wrapper, *args, **options)
    copied.record()
    return plan
