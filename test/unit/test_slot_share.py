"""How many requests a slot takes before it leaves the rest to the other slots."""

from types import SimpleNamespace

import pytest

from sglang_pp_spec.core.settings import Settings
from sglang_pp_spec.host.slot_share import SlotShare

STAGES = 2


class Request:
    def __init__(self, finished: bool = False) -> None:
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


def batch(*requests: Request) -> SimpleNamespace:
    return SimpleNamespace(reqs=list(requests))


def slots(waiting: int, *running: SimpleNamespace, slot_fill: int = 1, in_flight: tuple = (), **more) -> SlotShare:
    scheduler = SimpleNamespace(
        running_mbs=list(running),
        mbs=list(in_flight),
        last_mbs=[None],
        waiting_queue=[Request() for _ in range(waiting)],
        chunked_req=None,
        enable_priority_preemption=False,
        pp_group=SimpleNamespace(world_size=STAGES),
        settings=Settings(slot_fill=slot_fill),
    )
    vars(scheduler).update(more)
    return SlotShare(scheduler)


def share(waiting: int, *running: SimpleNamespace, **more) -> int:
    return slots(waiting, *running, **more).fair_share()


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


def test_a_prompt_between_two_chunks_counts_though_no_batch_has_it():
    """Its last chunk once found every slot full by a share that had forgotten it, until some request ended."""
    assert share(0, batch(Request()), batch(Request()), chunked_req=Request()) == 2
    assert share(0, batch(Request()), batch(Request()), chunked_req=Request(finished=True)) == 1


def test_a_slot_that_was_full_by_its_share_opens_when_the_share_grows_and_not_before():
    one, other = batch(Request()), batch(Request())
    found = slots(0, one, other)
    found.begin_turn(0, one)
    assert found.allocatable(10, running_bs=1) == 0
    one.batch_is_full = True
    found.begin_turn(0, one)
    assert one.batch_is_full
    found.scheduler.waiting_queue.append(Request())
    found.begin_turn(0, one)
    assert not one.batch_is_full and found.allocatable(10, running_bs=1) == 1


def test_a_slot_that_the_host_closed_for_want_of_kv_is_left_closed():
    """It was opened again in every turn, and every turn went through the whole queue for nothing."""
    one = batch(Request())
    found = slots(5, one)
    found.begin_turn(0, one)
    assert found.allocatable(10, running_bs=1) == 2
    one.batch_is_full = True  # by the host: no room in the KV pool
    found.scheduler.waiting_queue.append(Request())
    found.begin_turn(0, one)
    assert one.batch_is_full


def test_with_priority_preemption_the_host_decides_alone():
    """It would release a running request's KV to make room in a slot that only the share had closed."""
    found = slots(0, batch(Request()), enable_priority_preemption=True)
    found.begin_turn(0, batch(Request()))
    assert found.allocatable(3, running_bs=1) == 3


def test_a_turn_that_admits_nobody_counts_nobody():
    """Going through every request in every turn is work on the path that each round takes."""
    one = batch(Request())
    found = slots(0, one)
    found.fair_share = lambda: pytest.fail("counted")
    found.begin_turn(0, one)
