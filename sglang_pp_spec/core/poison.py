"""Overwrite free memory, so that whoever still reads a tensor that was freed is found out.

A development aid (SGLANG_PP_SPEC_POISON). PyTorch gives a freed tensor's memory to the next tensor of that stream,
whatever another stream still does with it; usually that is noticed much later, or never.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

BYTE = 0x7F  # as int64 it is out of every range, as bfloat16 it is 3.4e38
#: (bytes of a tensor, how many): from a frame to the hidden states of a prompt, a few turns' worth of each
TENSORS = ((512, 32), (4 << 10, 32), (32 << 10, 16), (256 << 10, 8), (2 << 20, 4), (16 << 20, 2))


def poison_free_memory(device: torch.device | str, streams: Iterable[torch.Stream] = ()) -> None:
    """Take memory that tensors of these sizes were freed from, fill it with ``BYTE``, give it back.

    On the current stream and on each of ``streams``: a CUDA allocator keeps what is free for each stream apart. The
    filling waits for what that stream was given before, as a new tensor's would; no host waits for it.
    """
    for stream in (None, *streams):
        with contextlib.nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
            held = [
                torch.empty(size, dtype=torch.uint8, device=device).fill_(BYTE)
                for size, count in TENSORS
                for _ in range(count)
            ]
            del held
