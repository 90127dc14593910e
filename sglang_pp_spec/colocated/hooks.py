"""The hooks that put every stage on device 0 and the IPC backend between them; registered only when asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..core.settings import COLOCATED
from .backend import register as register_backend

DEVICE_INDEX = "sglang.srt.utils.common.maybe_reindex_device_id"
BACKEND = "sglang.srt.distributed.parallel_state.get_default_distributed_backend"
GROUP = "sglang.srt.distributed.parallel_state.init_model_parallel_group"


@contextlib.contextmanager
def on_device_0(original: Callable, gpu_id: int) -> Iterator[int]:
    """Target:       sglang.srt.utils.common.maybe_reindex_device_id   (AROUND)

    Why:          every stage is given a device of its own.
    How:          whatever the stage's number, its process uses device 0.
    Upstream:     none: a development mode of this project
    Remove when:  never
    """
    with original(0) as device:
        yield device


def ipc_on_cuda(original: Callable, device: str) -> str:
    """Target:       sglang.srt.distributed.parallel_state.get_default_distributed_backend   (AROUND)

    Why:          NCCL refuses two ranks on one device.
    How:          for CUDA tensors the backend of ``colocated.backend``, for CPU tensors gloo.
    Upstream:     none: see above
    Remove when:  never
    """
    if device != "cuda":
        raise SystemExit(f"sglang_pp_spec: {COLOCATED} puts all stages on one GPU; unset it for device {device}")
    return register_backend("cuda")


def build_group_without_pynccl(original: Callable, group_ranks, local_rank, backend, **options):
    """Target:       sglang.srt.distributed.parallel_state.init_model_parallel_group   (AROUND)

    Why:          PyNccl opens NCCL communicators beside the groups' own.
    How:          every group is built with ``use_pynccl=False`` and without the custom all-reduce; a group of several
                  tensor-parallel ranks would need collectives on the device, and is refused.
    Upstream:     none: see above
    Remove when:  never
    """
    if options.get("group_name") == "tp" and len(group_ranks[0]) > 1:
        raise SystemExit(f"sglang_pp_spec: {COLOCATED} has no tensor parallelism; use --tp-size 1")
    return original(
        group_ranks, local_rank, backend, **options | {"use_pynccl": False, "use_custom_allreduce": False}
    )


def register(registry, around) -> None:
    """Register the hooks; SGLang's ``HookRegistry`` and its ``HookType.AROUND``."""
    registry.register(DEVICE_INDEX, on_device_0, around)
    registry.register(BACKEND, ipc_on_cuda, around)
    registry.register(GROUP, build_group_without_pynccl, around)
