"""Contract 7, 21, 22: one stage's scheduler does something else: found at the first frame, or it hangs; never silent.

Comparisons between toy stages are off: the frame check is alone.
"""

import pytest
from links import Stuck
from toy_engine import ToyEngine
from toy_scheduling import Event
from world import World, arrive

from sglang_pp_spec.core.errors import FenceViolation, FrameRefused, LedgerFault

WHERE = [(num_stages, stage) for num_stages in (2, 3, 4) for stage in range(num_stages)]


class LenientWorld(World):
    strict = False


def world_with(deviate, num_stages, stage, events=None, **options):
    """``deviate(engine, slot, schedule)`` replaces the schedule of one stage."""

    class Deviating(ToyEngine):
        compares = False

        def schedule(self, slot):
            ordinary = super().schedule
            return deviate(self, slot, ordinary) if self.stage == stage else ordinary(slot)

        def _input_of(self, req, tree):
            return ()

    events = events or [arrive(rid, prompt=3, max_new=6) for rid in "abcdefgh"[: 2 * num_stages]]
    return LenientWorld(num_stages, events, engine=Deviating, max_running=2, **options)


def swap(engine, slot, schedule):
    if engine.num_turns == 1:
        engine.waiting[:2] = engine.waiting[1::-1]
        engine.log.append(("deviated",))
    return schedule(slot)


def drop(engine, slot, schedule):
    if engine.num_turns == 1:
        engine.waiting.pop(0)
        engine.log.append(("deviated",))
    return schedule(slot)


def add(engine, slot, schedule):
    if engine.num_turns == 1:
        engine.arrive("x")
        engine.waiting.insert(0, engine.waiting.pop())
        engine.log.append(("deviated",))
    return schedule(slot)


def postpone(engine, slot, schedule):
    if engine.num_turns == 1:
        engine.log.append(("deviated",))
        first = engine.waiting.pop(0)
        batch = schedule(slot)
        engine.waiting.insert(0, first)
        return batch
    return schedule(slot)


@pytest.mark.parametrize("deviate", [swap, drop, add, postpone])
@pytest.mark.parametrize(("num_stages", "stage"), WHERE)
def test_a_stage_that_schedules_other_requests_is_found_at_its_first_frame(num_stages, stage, deviate):
    world = world_with(deviate, num_stages, stage)
    with pytest.raises(FrameRefused, match=r"row \d is not|the frame says num_rows|the frame says kind"):
        world.run()
    assert world.happened("deviated", stage)
    wrong = world.engines[stage if stage < num_stages - 1 else 0]
    assert all(req.out == [] for req in wrong.everything if req.waiting or req.frames_in_flight)


@pytest.mark.parametrize(("num_stages", "stage"), WHERE)
def test_a_stage_that_skips_a_turn_stops_with_a_report(num_stages, stage):
    """Participation is part of the schedule: the missing proxy or frame is missed, or a later one is refused."""

    def skip(engine, slot, schedule):
        if engine.num_turns == num_stages + 1:
            engine.log.append(("deviated",))
            return None
        return schedule(slot)

    events = [arrive(rid, prompt=2, max_new=20) for rid in "abcdefgh"]
    world = world_with(skip, num_stages, stage, events)
    with pytest.raises((FrameRefused, Stuck, AssertionError)):
        world.run()
    assert world.happened("deviated", stage)


@pytest.mark.parametrize(("num_stages", "stage"), WHERE)
@pytest.mark.parametrize("delay", [1, 2, 5])
def test_an_abort_that_reaches_one_stage_late_has_the_same_effect_or_is_refused(num_stages, stage, delay):
    outcomes = []

    class Late(ToyEngine):
        compares = False

        def abort(self, rid):
            if self.stage == stage and not getattr(self, "held", None):
                self.held = (self.num_turns + delay, rid)
            else:
                super().abort(rid)

        def take_requests(self):
            super().take_requests()
            if getattr(self, "held", None) and self.num_turns >= self.held[0]:
                super().abort(self.held[1])

        def _input_of(self, req, tree):
            return ()

    for turn in range(1, 14):
        events = [arrive("a", max_new=8), arrive("b", max_new=8), Event.of(turn, "abort", "a")]
        world = LenientWorld(num_stages, events, engine=Late)
        try:
            world.run()
            others = {tuple(engine.requests["b"].out) for engine in world.engines}
            assert len(others) == 1, "the request that was not aborted must not notice"
            assert all(engine.requests["a"].finished for engine in world.engines)
            outcomes.append("same")
        except (FrameRefused, Stuck):
            outcomes.append("refused")
    assert "refused" in outcomes, "the late abort changed what was scheduled"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_scheduler_that_launches_a_request_again_before_its_frame_is_stopped(num_stages):
    """The adversary takes another slot's decode batch at every turn."""

    def greedy(engine, slot, schedule):
        other = engine.running[(slot - 1) % engine.num_slots]
        if other is not None and other.reqs and other.reqs[0].frames_in_flight:
            engine.log.append(("deviated",))
            return other
        return schedule(slot)

    world = world_with(greedy, num_stages, 0)
    with pytest.raises(FenceViolation, match="already has 1 frame"):
        world.run()
    assert world.happened("deviated")


def test_a_request_that_is_in_a_batch_twice_is_stopped():
    """Forward isolation gone wrong made a host merge its decode batch twice."""

    def twice(engine, slot, schedule):
        batch = schedule(slot)
        if batch is not None and len(batch.reqs) == 2:
            batch.keep([0, 1, 0])
            engine.log.append(("deviated",))
        return batch

    world = world_with(twice, 3, 0)
    with pytest.raises(FenceViolation, match="twice"):
        world.run()
    assert world.happened("deviated")


def test_a_slot_launched_again_before_its_frame_is_stopped():
    world = World(3, [arrive("a", max_new=9), arrive("b", turn=3)])
    world.loops[0]._adopt = world.loops[0]._account = lambda turn: None
    with pytest.raises(LedgerFault, match="still holds step 0"):
        world.run()
