"""Poisoned memory shows a lifetime fault on a GPU, and only that."""

from __future__ import annotations

import pytest
import torch

from sglang_pp_spec.core.poison import BYTE, poison_free_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZE = 2048
A_LONG_TIME = 200_000_000  # clock cycles, about 0.1 s


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_tensor_freed_while_another_stream_still_reads_it_is_found_out(is_recorded: bool) -> None:
    side, read = torch.cuda.Stream(), torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    sent = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_LONG_TIME)
        read.copy_(sent)
    if is_recorded:
        sent.record_stream(side)
    del sent
    poison_free_memory("cuda", [side])
    torch.cuda.synchronize()
    assert set(read.tolist()) == {1 if is_recorded else BYTE}
