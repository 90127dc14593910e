"""A frame on a GPU, seen by the host: it is read once its copy is there, and it is not waited for without end."""

from __future__ import annotations

import pytest
import torch

from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.host.transport import DeviceFrame
from sglang_pp_spec.observe.timeline import Timeline


class FakeEvent:
    """Reached after it was asked ``after`` times; never if that is None."""

    def __init__(self, after: int | None) -> None:
        self.after, self.asked = after, 0

    def query(self) -> bool:
        self.asked += 1
        return self.after is not None and self.asked > self.after


def frame_with(copied: FakeEvent, timeout_s: float) -> DeviceFrame:
    host = torch.arange(6).reshape(2, 3)
    return DeviceFrame(host.clone(), host, FakeEvent(0), copied, Timeline.open("", 0), timeout_s)


def test_a_frame_is_read_as_soon_as_its_copy_is_there() -> None:
    copied = FakeEvent(after=50)
    frame = frame_with(copied, timeout_s=60.0)
    assert torch.equal(frame.read(), frame.host)
    assert copied.asked == 51


def test_a_frame_that_never_comes_is_refused_by_name_instead_of_hanging_until_a_watchdog_ends_the_server() -> None:
    with pytest.raises(FrameRefused, match="no frame within 0 s.*previous stage launched another batch"):
        frame_with(FakeEvent(after=None), timeout_s=0.05).read()
