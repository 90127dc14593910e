"""Hidden states that a stage received: their memory is free once the forward that reads them is done, not before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.host.aux_states import KEY
from sglang_pp_spec.host.engine import SchedulerEngine


class Received(torch.Tensor):
    """A tensor on a GPU that remembers the streams it was recorded on."""

    is_cpu = False

    def record_stream(self, stream: object) -> None:
        self.streams = [*getattr(self, "streams", []), stream]


def let_go(tensors: dict[str, object]) -> None:
    engine = SimpleNamespace(_has_streams=True, scheduler=SimpleNamespace(forward_stream="forward"))
    SchedulerEngine._let_go(engine, SimpleNamespace(tensors=tensors))


def test_received_hidden_states_are_recorded_on_the_stream_that_reads_them() -> None:
    tensors = {name: torch.zeros(2).as_subclass(Received) for name in ("hidden_states", "residual")}
    let_go(tensors)
    assert [tensor.streams for tensor in tensors.values()] == [["forward"], ["forward"]]


def test_what_the_host_sends_beside_tensors_is_passed_over() -> None:
    """A prompt's hidden states come with a message type; taken for a tensor, it ended every server on a GPU."""
    received = torch.zeros(2).as_subclass(Received)
    let_go({"__msg_type__": "proxy", "residual": None, "hidden_states": received})
    assert received.streams == ["forward"]


@pytest.mark.parametrize(("is_last", "kept"), [(True, []), (False, [f"{KEY}0"])])
def test_only_a_stage_that_passes_aux_hidden_states_on_keeps_them(is_last: bool, kept: list[str]) -> None:
    """Of a prompt of 8K tokens they are hundreds of MB, and the last stage held them until its turn was over."""
    engine = SimpleNamespace(scheduler=SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=is_last)))
    proxy = SimpleNamespace(tensors={"hidden_states": torch.zeros(2), f"{KEY}0": torch.zeros(2)})
    assert list(SchedulerEngine._passes_on(engine, proxy)) == kept
