"""flashinfer plans a round's attention from the host's lengths, without reading the device's.

SGLang has both plans, and off by default: without them a plan reads its lengths back from the device, behind all that
is queued there. On a stage of a pipeline that is another slot's forward or hidden states that are still to come, and
the host launches nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.environ import envs

#: Per flashinfer wrapper: the copy of its newest plan to the device is done.
_copied: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def prefer_host_plans() -> None:
    """Before graphs are captured: plan chains' verify and draft on the host, unless the user said otherwise."""
    for option in (envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN, envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR):
        if not option.is_set():
            option.set(True)


def plan_behind_copy(original: Callable, wrapper: Any, *args: Any, **options: Any) -> Any:
    """Target:       sglang.srt.layers.attention.flashinfer_backend.fast_prefill_plan   (AROUND)

    Why:          a plan is written to a pinned buffer of its wrapper and copied from there to the device, behind what
                  is queued. Slots of one batch size share the wrapper, and a plan that reads nothing back does not
                  wait: the next slot's would be written over this one's before it was copied.
    How:          the host waits until the plan before has been copied: until the step before has begun.
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
