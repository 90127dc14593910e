"""Lengths of a batch after a frame: on the device always, on the host where the frame was read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.host import commit

A, B, C = (RowIdentity(rid, 1) for rid in "abc")


def advanced(monkeypatch, *, live, lengths, read=True, host=True):
    """(device, host, sum) of a batch of ``live`` requests after a frame that accepts 2 tokens of A and 3 of B."""
    launched, at_launch, accepted = (A, B), (10, 20), (2, 3)
    record = SimpleNamespace(seq_lens=torch.tensor(at_launch), seq_lens_cpu=torch.tensor(at_launch) if host else None)
    monkeypatch.setattr(commit, "record_of", lambda turn: record)
    batch = SimpleNamespace(
        seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths) if host else None, seq_lens_sum=-1
    )
    turn = SimpleNamespace(batch=batch, launch=SimpleNamespace(identities=launched))
    rows = SimpleNamespace(num_accepted=torch.tensor(accepted))
    commit.SchedulerState(None, None).advance(turn, rows, rows if read else None, live)
    on_host = None if batch.seq_lens_cpu is None else batch.seq_lens_cpu.tolist()
    return batch.seq_lens.tolist(), on_host, batch.seq_lens_sum


def test_a_frame_that_was_read_advances_the_lengths_on_the_host_too(monkeypatch):
    assert advanced(monkeypatch, live=[A, B], lengths=[10, 20]) == ([12, 23], [12, 23], 35)


def test_a_request_that_left_takes_its_length_along_and_one_that_joined_keeps_its_own(monkeypatch):
    assert advanced(monkeypatch, live=[B, C], lengths=[20, 7]) == ([23, 7], [23, 7], 30)


@pytest.mark.parametrize("options", [{"read": False}, {"host": False}], ids=["unread", "no host lengths before"])
def test_without_a_frame_on_the_host_it_knows_no_lengths(monkeypatch, options):
    assert advanced(monkeypatch, live=[A, B], lengths=[10, 20], **options) == ([12, 23], None, None)
