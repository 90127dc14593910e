"""on_mismatch=abort: a frame refused on stage 0 costs the affected requests and nobody else."""

import pytest
from test_refused_frames import corrupt_at
from toy_engine import AbortingEngine, ToyEngine
from world import CHAIN, TREE, World, arrive

from sglang_pp_spec.core.errors import FrameRefused


def crowd(num_stages, engine=AbortingEngine, shape=TREE):
    """Two requests in every slot."""
    rids = "abcdefgh"[: 2 * num_stages]
    events = [arrive(rid, turn // 2, prompt=4, max_new=8) for turn, rid in enumerate(rids)]
    return World(num_stages, events, shape=shape, max_running=2, engine=engine)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_a_wrong_row_ends_its_request_on_every_stage_and_no_other(num_stages, shape, number, column):
    """Where the frame held the request's last token, the other stages end it by that frame, stage 0 by the abort."""
    world = crowd(num_stages, shape=shape)

    def change(frame):
        frame[2, column] += 77

    happened = corrupt_at(world, 0, number, change)
    world.run().check_end()
    refused = world.happened("refused")
    assert happened and len(refused) == 1
    assert world.oracle.suspect == {(refused[0][2], 1)}
    assert [req.rid for req in world.engines[0].everything if req.aborted] == [refused[0][2]]
    assert all(not req.aborted or req.rid == refused[0][2] for engine in world.engines for req in engine.everything)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("column", range(6))
def test_a_wrong_header_aborts_every_request_of_the_slot_and_no_other_slot(num_stages, column):
    world = crowd(num_stages)

    def change(frame):
        frame[0, column] += 1

    assert corrupt_at(world, 0, num_stages + 1, change) is not None
    world.run().check_end()
    refused = {rid for _, _, rid, _ in world.happened("refused")}
    assert len(refused) == 2
    assert {req.rid for req in world.engines[0].everything if req.aborted} == refused


@pytest.mark.parametrize("num_stages", [3, 4])
def test_a_stage_that_cannot_put_the_abort_before_all_others_stops(num_stages):
    world = crowd(num_stages)
    happened = corrupt_at(world, 1, num_stages, lambda frame: frame[1].zero_())
    with pytest.raises(FrameRefused, match="row 0 is not"):
        world.run()
    assert happened


@pytest.mark.parametrize("num_stages", [2, 3])
def test_without_the_policy_the_same_frame_stops_the_stage(num_stages):
    world = crowd(num_stages, engine=ToyEngine)
    happened = corrupt_at(world, 0, 1, lambda frame: frame.__setitem__((2, 0), 5))
    with pytest.raises(FrameRefused):
        world.run()
    assert happened
