"""Who may write the KV tables when: behind the step that still reads them, and no sooner than somebody writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_pp_spec.core.frame import FrameKind
from sglang_pp_spec.host import engine as module
from sglang_pp_spec.host.engine import SchedulerEngine
from sglang_pp_spec.observe.timeline import Timeline


class Launched:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def engine_with(newest: object) -> SchedulerEngine:
    engine = SchedulerEngine.__new__(SchedulerEngine)
    engine.scheduler = SimpleNamespace(stage_loop=SimpleNamespace(turns=[newest]))
    engine._has_streams, engine._reading, engine.state, engine.layout = True, [], None, None
    engine.timeline = Timeline.open("", 0)
    return engine


def turn_of(kind: FrameKind) -> SimpleNamespace:
    header = SimpleNamespace(slot=0, step=3, kind=kind)
    return SimpleNamespace(launch=SimpleNamespace(header=header), forward=object())


def test_what_an_ended_request_gives_back_is_written_behind_every_launched_step(monkeypatch) -> None:
    launched = [Launched(), Launched()]
    turns = [SimpleNamespace(forward=SimpleNamespace(launched=one)) for one in (*launched, None)]
    monkeypatch.setattr(module, "record_of", lambda turn: turn.forward)
    engine = engine_with(None)
    engine.scheduler.stage_loop.turns = [None, *turns, SimpleNamespace(forward=None)]
    engine.wait_for_launched()
    assert [one.waits for one in launched] == [1, 1]


@pytest.mark.parametrize(("kind", "waits_at_once"), [(FrameKind.VERIFY, 0), (FrameKind.PREFILL, 1)])
def test_a_verified_round_is_accounted_for_beside_the_next_one_and_a_prompt_behind_it(
    monkeypatch, kind: FrameKind, waits_at_once: int
) -> None:
    launched, newest = Launched(), turn_of(FrameKind.VERIFY)
    record = SimpleNamespace(launched=launched, sends=[], reqs=[], extras=None)
    monkeypatch.setattr(module, "account_frame", lambda *_: None)
    monkeypatch.setattr(module, "record_of", lambda turn: record)
    engine = engine_with(newest)
    engine.account(turn_of(kind))
    assert launched.waits == waits_at_once
    engine.wait_for_tables()  # requests come or go
    assert launched.waits == 1
    engine.wait_for_tables()
    assert launched.waits == 1


@pytest.mark.parametrize(
    ("chunked", "recurrent", "waits"), [(None, True, []), ("prompt", False, []), ("prompt", True, ["launched"])]
)
def test_a_chunk_s_state_is_copied_for_the_prefix_cache_behind_the_chunk(chunked, recurrent, waits) -> None:
    """The last stage runs chunks on another stream; a copy on the schedule stream could take the state before."""
    order: list[str] = []

    def next_batch(**_) -> SimpleNamespace:
        order.append("stash")
        return SimpleNamespace(running_batch="running", batch_to_run=None)

    engine = engine_with(None)
    engine.enter = lambda slot: None
    engine.state = SimpleNamespace(is_recurrent=recurrent)
    engine.wait_for_launched = lambda: order.append("launched")
    engine.scheduler = SimpleNamespace(
        chunked_req=chunked,
        mbs=[None],
        last_mbs=[None],
        running_mbs=[None],
        running_batch="running",
        last_batch=None,
        _engine_paused=False,
        slot_share=SimpleNamespace(begin_turn=lambda *_: None),
        get_next_batch_to_run=next_batch,
    )
    assert engine.schedule(0) is None
    assert order == [*waits, "stash"]
