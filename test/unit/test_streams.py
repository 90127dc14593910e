"""What crosses streams on a GPU, on the CPU engine: asked for by tests, or not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.core.settings import Settings
from sglang_pp_spec.host.streams import host_copy_of, keep_until_read, uses_streams


@pytest.mark.parametrize(
    ("device", "asked", "expected"), [("cuda", False, True), ("cpu", False, False), ("cpu", True, True)]
)
def test_streams_are_used_where_forwards_run_beside_the_host_or_a_test_asks(device, asked, expected) -> None:
    scheduler = SimpleNamespace(device=device, settings=Settings(streams=asked))
    assert uses_streams(scheduler) is expected


def test_what_is_no_tensor_is_not_kept_for_a_stream_on_any_machine() -> None:
    """A message type among hidden states ended every server on a GPU, and no test on a CPU had noticed."""
    keep_until_read(torch.zeros(2), "stream")
    with pytest.raises(TypeError, match="not str"):
        keep_until_read("proxy", "stream")


def test_a_host_copy_is_a_copy() -> None:
    frame = torch.arange(6).reshape(2, 3)
    copy = host_copy_of(frame)
    assert torch.equal(copy, frame) and copy.data_ptr() != frame.data_ptr()
