"""Contract 1, 2: a frame of another step or slot, or with other rows, is refused and leaves no trace."""

import pytest
from links import Stuck
from world import TREE, World, arrive

from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import FrameKind

STAGES = [(num_stages, stage) for num_stages in (2, 3, 4) for stage in range(num_stages - 1)]


def two_batches(num_stages, **options):
    """Several requests in as many slots as there are stages, several rounds long."""
    rids = "abcdefgh"[: 2 * num_stages]
    events = [arrive(rid, turn, prompt=4, max_new=9) for turn, rid in enumerate(rids)]
    return World(num_stages, events, shape=TREE, max_running=2, **options)


def state_of(engine):
    """Everything a frame could change on a stage, as one value."""
    ledger = engine.loop.ledger
    trees = [batch and batch.trees and batch.trees.tokens.tolist() for batch in engine.running]
    lengths = [batch and batch.lengths.tolist() for batch in engine.running]
    requests = [
        (req.state(), req.state_on_device(), req.finished, tuple(req.slots), req.frames_in_flight)
        for req in engine.everything
    ]
    lives = {rid: life.identity for rid, life in ledger._lives.items()}
    return repr((requests, engine.pool.content, engine.pool.free, trees, lengths, ledger._in_flight, lives))


def run_until_refused(world, stage):
    """The reason of the refusal on ``stage``; its state is the one from before the frame was read."""
    loop, before = world.loops[stage], []
    loop.transport.reading = lambda: before.append(state_of(loop.engine))
    with pytest.raises(FrameRefused) as refused:
        world.run()
    assert state_of(loop.engine) == before[-1]
    assert not loop.ledger.is_idle, "the refused frame's step is still open"
    return str(refused.value)


@pytest.mark.parametrize(("num_stages", "stage"), STAGES)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_duplicated_frame_is_refused_at_the_next_step(num_stages, stage, first):
    world = two_batches(num_stages)
    world.frames[stage].tamper = lambda number, frame: (frame, frame.clone()) if number == first else (frame,)
    reason = run_until_refused(world, stage)
    assert "the frame says step" in reason
    assert world.frames[stage].num_sent > first, "the frame was duplicated"


@pytest.mark.parametrize(("num_stages", "stage"), STAGES)
@pytest.mark.parametrize("lost", [0, 2, 5])
def test_a_lost_frame_is_noticed_at_the_frame_that_takes_its_place(num_stages, stage, lost):
    """The next frame (step t+1) is not taken for the lost one."""
    world = two_batches(num_stages, depth=1)
    world.frames[stage].tamper = lambda number, frame: () if number == lost else (frame,)
    reason = run_until_refused(world, stage)
    assert "the frame says step" in reason


@pytest.mark.parametrize(("num_stages", "stage"), STAGES)
def test_two_frames_in_the_wrong_order_are_refused(num_stages, stage):
    world = two_batches(num_stages)
    held = []

    def swap(number, frame):
        if number == 3:
            held.append(frame)
            return ()
        return (frame, *held) if number == 4 else (frame,)

    world.frames[stage].tamper = swap
    assert "the frame says step" in run_until_refused(world, stage)
    assert held, "a frame was overtaken"


def corrupt_at(world, stage, number, change):
    """Change a copy of frame ``number`` on its way to ``stage``; the list it returns tells whether that happened."""
    happened = []

    def tamper(n, frame):
        if n != number:
            return (frame,)
        frame = frame.clone()
        change(frame)
        happened.append(n)
        return (frame,)

    world.frames[stage].tamper = tamper
    return happened


HEADER_COLUMNS = {"layout": 0, "epoch": 1, "step": 2, "slot": 3, "kind": 4, "num_rows": 5}


@pytest.mark.parametrize("field", HEADER_COLUMNS)
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize(("num_stages", "stage"), STAGES)
def test_a_header_off_by_one_is_refused(num_stages, stage, field, by):
    """The slot check has a case of its own: with the step right and the slot wrong, only it can notice."""
    world = two_batches(num_stages)

    def change(frame):
        frame[0, HEADER_COLUMNS[field]] += by

    happened = corrupt_at(world, stage, 4, change)
    assert f"the frame says {field}" in run_until_refused(world, stage)
    assert happened


def swap_rows(frame):
    frame[[1, 2]] = frame[[2, 1]]


def older_incarnation(frame):
    frame[1, 1] -= 1


def other_request(frame):
    frame[1, 0] += 1


@pytest.mark.parametrize("change", [swap_rows, older_incarnation, other_request])
@pytest.mark.parametrize(("num_stages", "stage"), STAGES)
def test_rows_of_other_requests_or_in_another_order_are_refused(num_stages, stage, change):
    world = World(num_stages, [arrive("a", max_new=9), arrive("b", max_new=9)], max_running=2)
    happened = corrupt_at(world, stage, 1, change)
    assert "row 0 is not a#1" in run_until_refused(world, stage)
    assert happened and world.engines[stage].everything[1].rid == "b"


@pytest.mark.parametrize("accepted", [0, -1, 4, 2**40])
def test_a_count_out_of_range_is_refused_before_anything_is_applied(accepted):
    world = two_batches(3)

    def change(frame):
        frame[1, 2] = accepted

    number = 6
    happened = corrupt_at(world, 1, number, change)
    assert f"accepted {accepted} tokens" in run_until_refused(world, 1)
    assert happened and any(kind is FrameKind.VERIFY for *_, kind, _ in world.happened("launched"))


def test_a_lost_last_frame_is_waited_for_and_nothing_else_is_taken():
    world = World(3, [arrive("a", max_new=1)])
    world.frames[0].tamper = lambda number, frame: ()
    with pytest.raises(Stuck, match="receive 0 on frames to 0"):
        world.run()
    assert world.engines[0].everything[0].out == []
