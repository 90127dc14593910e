"""The CPU's attention backend as one that plans from lengths on the host, as flashinfer does, for tests.

Registered with SGLANG_PP_SPEC_OVERLAP=accounting alone. The kernels of the CPU engine read the device's lengths, so
a host copy that is missing or stale would go unnoticed there; on a GPU it would plan another attention.
"""

from __future__ import annotations

from sglang_pp_spec.core.settings import Settings

from .hooks import Hook


def plan_from_host_lengths(original, self, forward_batch):
    """End the server if a forward's lengths on the host are not those on the device.

    Target:       sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend.init_forward_metadata
                  sglang.srt.layers.attention.intel_amx_backend.IntelAMXMultiStepDraftBackend.init_forward_metadata
                  (AROUND both)
    Why:          see above
    How:          host and device lengths are compared, then the original runs
    Upstream:     none: specific to tests on the CPU engine
    Remove when:  never; without its setting it is not registered
    """
    on_host, on_device = forward_batch.seq_lens_cpu, forward_batch.seq_lens
    if on_host is None or on_host.tolist() != on_device.tolist():
        mode = forward_batch.forward_mode.name
        raise RuntimeError(f"{mode}: lengths on the host are {on_host}, on the device {on_device}")
    return original(self, forward_batch)


_BACKENDS = "sglang.srt.layers.attention.intel_amx_backend"
HOOKS = (
    Hook(
        f"{_BACKENDS}.IntelAMXAttnBackend.init_forward_metadata",
        plan_from_host_lengths,
        ("self", "forward_batch"),
        "85a5c07c8c5848d8",
    ),
    Hook(
        f"{_BACKENDS}.IntelAMXMultiStepDraftBackend.init_forward_metadata",
        plan_from_host_lengths,
        ("self", "forward_batch"),
        "5552600a57b9c43b",
    ),
)


def register(registry, settings: Settings) -> None:
    """Register the hooks if ``settings`` play such a backend; ``registry`` is SGLang's ``HookRegistry``."""
    if settings.overlap != "accounting":
        return
    from sglang.srt.plugins.hook_registry import HookType

    for hook in HOOKS:
        registry.register(hook.target, hook.around, HookType.AROUND)
