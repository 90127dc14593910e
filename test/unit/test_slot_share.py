"""How many requests a slot takes before it leaves the rest to the other slots."""

from types import SimpleNamespace

import pytest

from sglang_pp_spec.core.settings import Settings
from sglang_pp_spec.host.scheduler import PPSpecScheduler

STAGES = 2


class Request:
    def __init__(self, finished: bool = False) -> None:
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


def batch(*requests: Request) -> SimpleNamespace:
    return SimpleNamespace(reqs=list(requests))


def share(waiting: int, *running: SimpleNamespace, slot_fill: int = 1, in_flight: tuple = ()) -> int:
    scheduler = SimpleNamespace(
        running_mbs=list(running),
        mbs=list(in_flight),
        last_mbs=[None],
        waiting_queue=[Request() for _ in range(waiting)],
        pp_group=SimpleNamespace(world_size=STAGES),
        settings=Settings(slot_fill=slot_fill),
    )
    return PPSpecScheduler._fair_share(scheduler)


@pytest.mark.parametrize(("waiting", "each"), [(0, 1), (1, 1), (2, 1), (3, 2), (8, 4), (9, 5)])
def test_requests_are_spread_over_as_many_slots_as_there_are_stages(waiting, each):
    assert share(waiting) == each


def test_a_request_counts_once_wherever_it_is_seen_and_not_at_all_when_it_is_over():
    """Prompts in flight were forgotten once, and eight requests over two slots took four prefills instead of two."""
    running, over = Request(), Request(finished=True)
    assert share(2, batch(running, over), in_flight=(batch(running, Request()),)) == 2


def test_a_slot_may_be_asked_to_fill_up_first():
    assert share(8, slot_fill=8) == 8
    assert share(20, slot_fill=8) == 10
