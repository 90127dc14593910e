"""Contract 8, 16: middle chunks fill the pipeline and decide nothing."""

import pytest
from toy_requests import ToyBatch
from world import World, arrive

from sglang_pp_spec.core.frame import FrameKind


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 8])
def test_the_chunks_of_a_prompt_occupy_consecutive_slots(num_stages, num_chunks):
    """m chunks leave the last stage m + P - 1 steps after the first entered, and nothing is in between."""
    world = World(num_stages, [arrive("a", prompt=4 * num_chunks, max_new=1)], chunk=4).run().check_end()
    launched = world.happened("launched")
    assert [turn for _, turn, *_ in launched] == list(range(num_chunks))
    kinds = [kind for *_, kind, _ in launched]
    assert kinds == [FrameKind.MIDDLE] * (num_chunks - 1) + [FrameKind.PREFILL]
    last_stage = world.engines[-1].clock.work
    assert last_stage[-1][1] == num_chunks + num_stages - 1, "one chunk per step and stage, without a gap"
    assert max(link.most_waiting for link in world.frames) <= world.num_slots


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_several_middle_chunks_are_in_flight_at_once_and_none_is_fenced(num_stages):
    most = [0] * num_stages

    class Watched(World):
        def _note(self, stage, step, state):
            super()._note(stage, step, state)
            for req in self.engines[stage].everything:
                most[stage] = max(most[stage], req.chunks_in_flight)
                if req.committed < len(req.prompt) and not req.finished:
                    assert not self.loops[stage].ledger._in_flight, "a middle chunk took the fence"

    Watched(num_stages, [arrive("a", prompt=40, max_new=3)], chunk=4).run().check_end()
    assert min(most) >= num_stages - 1, f"chunks in flight per stage: {most}"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_middle_chunk_beside_a_finished_prompt_gets_no_token(num_stages):
    """The placeholder of the middle chunk's row is in the same frame as a real first token."""
    world = World(num_stages, [arrive("a", prompt=3, max_new=4), arrive("b", prompt=9, max_new=4)], chunk=5)
    world.run().check_end()
    mixed = [
        rids for *_, kind, rids in world.happened("launched") if kind is FrameKind.PREFILL and rids == ["a", "b"]
    ]
    assert mixed, "one frame held a final and a middle chunk"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_cache_hit_makes_the_first_step_a_last_chunk_of_one_token(num_stages):
    lengths = []
    seen = ToyBatch.of

    def noting(kind, reqs, ranges, samples):
        lengths.extend(end - start for start, end in ranges)
        return seen(kind, reqs, ranges, samples)

    ToyBatch.of = staticmethod(noting)
    try:
        world = World(num_stages, [arrive("a", prompt=12, cached=12, max_new=5)], chunk=4).run().check_end()
    finally:
        ToyBatch.of = seen
    assert set(lengths) == {1} and world.happened("accepted"), "and its drafts were verified in the next round"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_slots_that_fill_and_drain_at_different_times_stay_in_step(num_stages, depth):
    """Unequal micro-batches, idle slots between busy ones, a slot that empties while others are in flight."""
    events = [arrive(rid, 3 * i, prompt=2 + 5 * (i % 2), max_new=1 + 3 * i) for i, rid in enumerate("abcdef")]
    world = World(num_stages, events, depth=depth, chunk=4, max_running=1 + num_stages // 2).run().check_end()
    turns = [turn for _, turn, *_ in world.happened("launched")]
    assert any(b - a > 1 for a, b in zip(turns, turns[1:], strict=False)), "some slot was empty between two others"
