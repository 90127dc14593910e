"""Python lists on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def index_tensor(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 tensor of ``values`` on ``device``; through pinned memory, so that the host never waits for the copy."""
    return on_device(torch.tensor(values, dtype=torch.int64), device)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``; see ``index_tensor``."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
