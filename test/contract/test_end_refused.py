"""The order to end a request that a frame was refused for, as it finds the request on a stage."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_pp_spec.host import refused
from sglang_pp_spec.host.refused import MARK, end_refused


class Request(SimpleNamespace):
    def __init__(self, *, holds_kv: bool, is_retracted: bool = False) -> None:
        kv = SimpleNamespace(holds_kv=holds_kv)
        super().__init__(rid="a", kv=kv, is_retracted=is_retracted, finished_reason=None)

    def __eq__(self, other: object) -> bool:
        return self is other

    def finished(self) -> bool:
        return self.finished_reason is not None


@pytest.fixture
def released(monkeypatch) -> list[Request]:
    found: list[Request] = []
    ended = SimpleNamespace(to_json=lambda: {"type": "abort"})
    monkeypatch.setattr(refused, "prepare_abort", lambda req, *_: setattr(req, "finished_reason", ended))
    monkeypatch.setattr(refused, "release_kv_cache", lambda req, *_, **__: found.append(req))
    return found


def scheduler(*, running=(), waiting=(), chunked=None, known=None) -> SimpleNamespace:
    batches = [SimpleNamespace(reqs=list(running)), None]
    return SimpleNamespace(
        refused_requests={} if known is None else {"a": known},
        running_mbs=batches,
        last_mbs=[None, None],
        mbs=batches,
        waiting_queue=list(waiting),
        chunked_req=chunked,
        tree_cache=None,
        stage_loop=SimpleNamespace(engine=SimpleNamespace(wait_for_launched=lambda: None)),
        _release_aborted_request=lambda req: None,
        send_abort_output=lambda order, req: None,
    )


ORDER = SimpleNamespace(rid="a", abort_message=MARK)


@pytest.mark.parametrize("stage_0", [True, False], ids=["stage 0 names it", "another stage finds it"])
def test_a_running_request_gives_its_kv_back_once(released, stage_0: bool) -> None:
    req = Request(holds_kv=True)
    end_refused(scheduler(running=(req,), known=req if stage_0 else None), ORDER)
    assert released == [req] and req.finished()


def test_a_request_whose_prompt_is_not_through_gets_no_further_chunk(released) -> None:
    req = Request(holds_kv=True)
    stage = scheduler(running=(req,), chunked=req, known=req)
    end_refused(stage, ORDER)
    assert stage.chunked_req is None and released == [req]


@pytest.mark.parametrize("stage_0", [True, False], ids=["stage 0 names it", "another stage finds it"])
def test_a_request_that_a_pause_retracted_does_not_come_back(released, stage_0: bool) -> None:
    """A stage whose frame was right had given it tokens by then, and would have gone on from another prompt."""
    req = Request(holds_kv=False, is_retracted=True)
    stage = scheduler(waiting=(req,), known=req if stage_0 else None)
    end_refused(stage, ORDER)
    assert stage.waiting_queue == [] and req.finished() and released == []


def test_a_request_that_ended_where_its_frame_was_right_and_a_new_one_of_its_name_are_left_alone(released) -> None:
    ended, new = Request(holds_kv=False), Request(holds_kv=False)
    ended.finished_reason = object()
    stage = scheduler(running=(ended,), waiting=(new,))
    end_refused(stage, ORDER)
    assert released == [] and stage.waiting_queue == [new] and not new.finished()
