"""A frame that is used before the host has read it, made safe on the device.

With ``Overlap.ON`` a stage launches the next round from a frame its host has not looked at. The comparisons of
``check_frame`` are made here by the device instead: a row that is not exactly what the step was launched with becomes
degenerate, so that nothing of another step or request is written or verified. Tokens and trees of a right row are
taken as they are. The host finds the same fault when it reads the frame, and refuses it before any token reaches a
request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .frame import FrameKind
from .layout import HEADER_FIELDS, NUM_ACCEPTED, NUM_DRAFTS, FrameLayout
from .ledger import Launch
from .refusal import degenerate_frame
from .upload import on_device


def guarded(frame: Tensor, launch: Launch, layout: FrameLayout) -> Tensor:
    """[1 + num_rows, width] int64 on ``frame``'s device: its right rows, degenerate ones in place of wrong ones.

    Waits for nothing: all comparisons are device work in the order of the current stream.
    """
    num_rows = launch.header.num_rows
    safe = on_device(degenerate_frame(launch, layout)[: 1 + num_rows], frame.device)
    frame = frame[: 1 + num_rows]
    words = len(HEADER_FIELDS)
    same_header = (frame[0, :words] == safe[0, :words]).all()
    same_rows = (frame[:, :NUM_ACCEPTED] == safe[:, :NUM_ACCEPTED]).all(dim=1)
    right = same_header & same_rows & _counts_are_possible(frame, safe, launch, layout)
    return torch.where(right.unsqueeze(1), frame, safe)


def _counts_are_possible(frame: Tensor, safe: Tensor, launch: Launch, layout: FrameLayout) -> Tensor:
    """[1 + num_rows] bool: counts and drafts within what the step allows; ``count_problem`` on the device."""
    accepted, drafts = frame[:, NUM_ACCEPTED], frame[:, NUM_DRAFTS]
    fewest = safe[:, NUM_ACCEPTED]
    most = layout.shape.max_accepted if launch.header.kind is FrameKind.VERIFY else fewest
    full = (drafts == layout.shape.num_drafts) & (accepted > 0)
    return (accepted >= fewest) & (accepted <= most) & ((drafts == 0) | full)
