"""What a round does with device tensors never reads them back: reading would make the host wait for the device.

The frame's host copy is the only thing read on the host, once a round, and it is no device tensor. Device tensors are
stood in for by ordinary ones on which reading fails.
"""

from __future__ import annotations

import pytest
import torch

from sglang_pp_spec.core.apply import advanced_lengths, nodes_of_batch
from sglang_pp_spec.core.frame import FrameHeader, FrameKind, FramePayload, FrameRows, begin_frame, fill_rows
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import FrameLayout, TreeShape
from sglang_pp_spec.core.tree_rows import TreeRows

SHAPES = [TreeShape(2, 1, 3), TreeShape(2, 2, 4)]
READERS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__")


class DeviceTensor(torch.Tensor):
    """A tensor that cannot be read by the host; what is computed from it cannot either."""


def _refuse(self: torch.Tensor, *args: object, **kwargs: object) -> None:
    raise AssertionError("a device tensor was read on the hot path")


for _name in READERS:
    setattr(DeviceTensor, _name, _refuse)


def on_device(*size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.int64).as_subclass(DeviceTensor)


def test_the_guard_notices_a_read() -> None:
    with pytest.raises(AssertionError, match="hot path"):
        (on_device(3) + 1).tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_a_frame_reads_nothing_back(shape: TreeShape) -> None:
    layout = FrameLayout(shape, capacity=4)
    rows = [RowIdentity("a", 1), RowIdentity("b", 2)]
    header = FrameHeader(1, 2, 0, FrameKind.VERIFY, 2)
    started = begin_frame(header, rows, layout, num_accepted=[1, 1], num_drafts=[shape.num_drafts] * 2)
    tree = not shape.is_chain
    payload = FramePayload(
        tokens=on_device(2, shape.max_accepted),
        num_accepted=on_device(2),
        drafts=on_device(2, shape.num_drafts),
        parents=on_device(2, shape.num_parents) if tree else None,
        selected=on_device(2, shape.num_drafts) if tree else None,
        accept_index=on_device(2, shape.max_accepted) if tree else None,
    )
    fill_rows(started.as_subclass(DeviceTensor), layout, payload)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_applying_a_frame_reads_nothing_back_from_the_device(shape: TreeShape) -> None:
    layout = FrameLayout(shape, capacity=4)
    rows = [RowIdentity("a", 1), RowIdentity("b", 2)]
    views = FrameRows.of(on_device(*layout.size), layout, 2)
    trees = TreeRows.of_frame(views, shape, rows)
    trees.fold(TreeRows.of_frame(views, shape, rows))
    trees.aligned(rows).topology()
    advanced_lengths(on_device(2), on_device(2), views.num_accepted, rows, rows)
    if views.accept_index is not None:
        nodes_of_batch(views.accept_index, shape)
