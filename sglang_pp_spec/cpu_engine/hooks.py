"""Corrections that let SGLang 0.5.23 run pipeline parallelism and EAGLE on a CPU without AMX.

All go through SGLang's plugin registry and only change what happens on a CPU.
"""

import contextlib
import hashlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def keep_intel_amx_backend(original, view):
    """Keep the attention backend that has an EAGLE draft variant.

    Target:       sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks   (AROUND)
    Why:          without AMX instructions `intel_amx` becomes `torch_native`, which has no draft backend,
                  and EAGLE stops at start-up
    How:          for `intel_amx` on the CPU no field is overridden; any other backend runs the original.
                  The backend itself only calls the two attention operators, which need no AMX here
    Upstream:     none: specific to the stand-in kernels
    Remove when:  torch_native gets an EAGLE draft backend, or the check looks for operators, not for AMX
    """
    if view.attention_backend == "intel_amx" and view.device == "cpu":
        return {}
    return original(view)


def build_group_without_pynccl(original, group_ranks, local_rank, backend, **kwargs):
    """Build CPU process groups without a CUDA communicator.

    Target:       sglang.srt.distributed.parallel_state.init_model_parallel_group   (AROUND)
    Why:          a PyNccl communicator is built for every group of two or more ranks, also on the CPU,
                  where there is no CUDA device: every PP or TP start fails
    How:          `use_pynccl=False` for the gloo backend; all else is the original's
    Upstream:     none known
    Remove when:  the factory leaves PyNccl out on CPU devices by itself
    """
    if backend == "gloo":
        kwargs["use_pynccl"] = False
    return original(group_ranks, local_rank, backend, **kwargs)


def init_with_first_local_layer(original, self, model_runner):
    """Let the attention backend look at a layer that this stage owns.

    Target:       sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend.__init__   (AROUND)
    Why:          it reads the value head size from layer 0; on a later stage that is a negative list
                  index, which PP2 survives by luck and PP3 and more do not (IndexError)
    How:          while it runs, the KV pool names its own first layer in `full_attention_layer_id_mapping`,
                  the field the constructor consults for hybrid models; the pool is as before afterwards
    Upstream:     none known
    Remove when:  the constructor starts from the pool's `start_layer`
    """
    with _first_layer_named(model_runner.token_to_kv_pool):
        original(self, model_runner)


@contextlib.contextmanager
def _first_layer_named(pool):
    start_layer = getattr(pool, "start_layer", 0) or 0
    if start_layer == 0 or hasattr(pool, "full_attention_layer_id_mapping"):
        yield
        return
    pool.full_attention_layer_id_mapping = {start_layer: 0}
    try:
        yield
    finally:
        del pool.full_attention_layer_id_mapping


def last_loc_in_torch(original, req_to_token, req_pool_indices_tensor, prefix_lens_tensor):
    """Find the slot before a request's next page without Triton.

    Target:       sglang.srt.mem_cache.allocation.get_last_loc   (AROUND)
    Why:          the host takes its Triton kernel for every backend but torch_native, and with pages of
                  more than one token the first prompt ends the scheduler: Triton has no CPU driver
    How:          the host's own PyTorch variant for tensors on the CPU
    Upstream:     none known
    Remove when:  the dispatcher looks at the device
    """
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    if not req_to_token.is_cpu:
        return original(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)
    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def norm_and_gate_in_torch(original, self, x, z=None):
    """Norm and gate of a gated delta rule's output without Triton.

    Target:       sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward   (AROUND)
    Why:          without AMX the host takes its Triton kernel, which has no CPU driver
    How:          PyTorch on the CPU for the one variant models use, norm before SiLU gate; else the original
    Upstream:     none known
    Remove when:  the module has a PyTorch variant for CPUs without AMX
    """
    from sglang_pp_spec.cpu_engine.layers import rmsnorm_gated

    plain = self.norm_before_gate and self.group_size is None and self.activation == "swish"
    if not x.is_cpu or z is None or not plain:
        return original(self, x, z)
    return rmsnorm_gated(x, self.weight, z, self.eps)


def take_steps_in_torch(original, dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None):
    """Take the recurrent states after the last accepted nodes without Triton.

    Target:       sglang.kernels.ops.mamba.mamba_state_scatter_triton.fused_mamba_state_scatter_with_mask and
                  sglang.kernels.ops.mamba.mamba_state_scatter_triton.fused_conv_window_scatter_with_mask   (AROUND)
    Why:          both are for GPUs alone, so no recurrent target can be verified on a CPU
    How:          PyTorch for tensors on the CPU
    Upstream:     none known
    Remove when:  the host has a PyTorch variant
    """
    from sglang_pp_spec.cpu_engine.recurrent import take_steps

    if not dst.is_cpu:
        return original(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw)
    take_steps(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw)
    return None


def one_window_after_the_other(original, pairs):
    """Take convolution windows by the function above, which has a variant for the CPU.

    Target:       sglang.kernels.ops.mamba.mamba_state_scatter_triton._conv_multi_eligible   (AROUND)
    Why:          the host's shorter way for several windows at once is a Triton kernel
    How:          no pair on the CPU is eligible for it
    Upstream:     none known
    Remove when:  as above
    """
    return not pairs[0][0].is_cpu and original(pairs)


def state_checkpoints_on_the_cpu(original):
    """Let the prefix cache keep checkpoints of recurrent states.

    Target:       sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer   (AROUND)
    Why:          the strategy that SGLang takes on GPUs is refused on a CPU, whose kernels hand out no states before
                  chunks; ours do
    How:          supported wherever this engine runs
    Upstream:     none: specific to the stand-in kernels
    Remove when:  never
    """
    return True


@dataclass(frozen=True)
class Hook:
    """One AROUND hook and the host function it was written against."""

    target: str
    around: Callable
    parameters: tuple[str, ...]  # those of the target that the hook names, in order, from the first
    source_sha256: str  # first 16 hex digits, of the target's source in 0.5.23


_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
_SCATTERED = ("dst", "src", "dst_indices_raw", "step_indices_raw", "src_indices_raw")

HOOKS = (
    Hook(
        "sglang.srt.arg_groups.overrides._attention_backend_platform_fallbacks",
        keep_intel_amx_backend,
        ("view",),
        "3079ae037f4ed53b",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        build_group_without_pynccl,
        ("group_ranks", "local_rank", "backend", "use_pynccl"),
        "cf0355669ac6af65",
    ),
    Hook(
        "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend.__init__",
        init_with_first_local_layer,
        ("self", "model_runner"),
        "78cef79fa3c1d97a",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        last_loc_in_torch,
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "b14bba7a1b96ac12",
    ),
    Hook(
        "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
        norm_and_gate_in_torch,
        ("self", "x", "z"),
        "1edbcfc2c1d05b91",
    ),
    Hook(
        "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        state_checkpoints_on_the_cpu,
        (),
        "2f50f077e12260f0",
    ),
    Hook(_SCATTER + "fused_mamba_state_scatter_with_mask", take_steps_in_torch, _SCATTERED, "a94dfc407eee32a2"),
    Hook(_SCATTER + "fused_conv_window_scatter_with_mask", take_steps_in_torch, _SCATTERED, "ebe82705a8f1fe84"),
    Hook(_SCATTER + "_conv_multi_eligible", one_window_after_the_other, ("pairs",), "321b21922330b712"),
)

TARGETS = tuple(hook.target for hook in HOOKS)


def register(registry) -> None:
    """Register the hooks; ``registry`` is SGLang's ``HookRegistry``."""
    from sglang.srt.plugins.hook_registry import HookType

    for hook in HOOKS:
        registry.register(hook.target, hook.around, HookType.AROUND)


def mismatches(hooks: Iterable[Hook] = HOOKS) -> list[str]:
    """Why the installed SGLang cannot take ``hooks``, one line per target; empty when it can.

    Decided by signature, before or after the hooks were applied. Imports the targets' modules.
    """
    problems = []
    for hook in hooks:
        try:
            found = tuple(inspect.signature(pkgutil.resolve_name(hook.target)).parameters)
        except (ImportError, AttributeError) as error:
            problems.append(f"{hook.target}: {error}")
            continue
        if found[: len(hook.parameters)] != hook.parameters:
            problems.append(f"{hook.target}: parameters {found}, expected to start {hook.parameters}")
    return problems


def source_changes() -> list[str]:
    """Targets whose source is not the one the hooks were written against: time to look for "Remove when"."""
    return [hook.target for hook in HOOKS if _source_sha256(hook.target) != hook.source_sha256]


def _source_sha256(target: str) -> str:
    source = inspect.getsource(pkgutil.resolve_name(target))
    return hashlib.sha256(source.encode()).hexdigest()[:16]
