"""Contract 10, 11, 12: abort, retract, pause, finish and id reuse at every point between launch and apply.

One long prompt in several chunks, one request in decode, one with a prefix-cache hit: the event comes at every turn.
"""

import pytest
from oracle import Oracle
from toy_scheduling import Event
from world import CHAIN, TREE, World, arrive

from sglang_pp_spec.core.frame import FrameKind

LAST_TURN = 22


def crowd(**options):
    """a decodes, b is prefilled in four chunks, c hits the cache."""
    return [
        arrive("a", 0, prompt=3, max_new=7, **options),
        arrive("b", 1, prompt=14, max_new=4),
        arrive("c", 3, prompt=6, max_new=5, cached=5),
    ]


def at_every_turn(num_stages, events_at, **options):
    """Run the crowd once per turn with ``events_at(turn)`` added; the log entries of stage 0 and of the last."""
    logs = []
    for turn in range(LAST_TURN):
        events = sorted([*crowd(), *events_at(turn)], key=lambda event: event.turn)
        world = World(num_stages, events, chunk=4, max_running=2, **options).run()
        world.check_end()
        logs.append(world.engines[0].log)
        assert world.engines[0].log != [] and world.engines[-1].log != []
    return logs


def entries(logs, what):
    return [entry for log in logs for entry in log if entry[0] == what]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("rid", ["a", "b", "c"])
def test_a_request_aborted_at_any_point_gets_no_further_token_and_harms_no_other(num_stages, shape, rid):
    logs = at_every_turn(num_stages, lambda turn: [Event.of(turn, "abort", rid)], shape=shape)
    in_flight = {entry[3] for entry in entries(logs, "aborted")}
    assert in_flight & {1, 2, 3}, "the request had frames in flight when the abort came"
    assert entries(logs, "dropped") or rid == "b", "frames of the aborted request arrived and were dropped"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("rid", ["a", "b", "c"])
def test_a_request_retracted_at_any_point_resumes_and_delivers_each_position_once(num_stages, depth, rid):
    """Undrained: its old frames arrive after it was queued again, some after it was launched again."""
    logs = at_every_turn(num_stages, lambda turn: [Event.of(turn, "retract", rid)], depth=depth)
    retracted = entries(logs, "retracted")
    assert any(frames for *_, frames, _ in retracted), "a frame was in flight"
    assert entries(logs, "dropped"), "a frame from before the retraction was dropped"
    if rid == "b":
        most = max(chunks for *_, chunks in retracted)
        assert most >= min(3, num_stages + depth - 1), "several middle chunks were in flight"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_two_retractions_in_a_row_leave_two_generations_of_stale_frames(num_stages):
    logs = at_every_turn(
        num_stages, lambda turn: [Event.of(turn, "retract", "b"), Event.of(turn + 1, "retract", "b")], depth=1
    )
    twice = [[e for e in log if e[0] == "retracted" and e[3] > 0] for log in logs]
    assert any(len(retracted) == 2 for retracted in twice)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_pause_with_retract_drains_every_slot_first_and_loses_nothing(num_stages, shape):
    """Retract on pause looked at the current slot only: chunks in flight elsewhere then hit a reset counter."""
    pause = lambda turn: [Event.of(turn, "pause"), Event.of(turn + 3, "resume")]  # noqa: E731
    logs = at_every_turn(num_stages, pause, shape=shape)
    assert max(entry[2] for entry in entries(logs, "paused")) >= num_stages - 1, "several slots were in flight"
    assert all(frames == chunks == 0 for *_, frames, chunks in entries(logs, "retracted")), "nothing was in flight"
    assert entries(logs, "retracted")


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_an_id_used_again_while_its_old_frame_is_in_flight_inherits_nothing(num_stages):
    """The new request waits in the same turn; the old frame's tokens, drafts and fence belong to the old one."""
    reuse = lambda turn: [Event.of(turn, "abort", "a"), arrive("a", turn, prompt=5, max_new=6)]  # noqa: E731
    logs = at_every_turn(num_stages, reuse)
    aborted = entries(logs, "aborted")
    assert any(frames for *_, frames in aborted), "the old request had a frame in flight"
    assert entries(logs, "dropped")


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_an_id_used_again_right_after_its_request_finished_starts_anew(num_stages):
    events = [arrive("a", 0, max_new=1), *[arrive("a", turn, prompt=2, max_new=3) for turn in (40, 80)]]
    world = World(num_stages, events).run()
    world.check_end()
    assert [req.life for req in world.engines[0].everything] == [1, 2, 3]
    assert world.loops[0].ledger._next_incarnation == 4, "three requests, three incarnations"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("max_new", [1, 2, 3, 4, 5])
def test_a_request_that_reaches_its_limit_within_a_round_ends_there_on_every_stage(num_stages, max_new):
    """Contract 13, 20: the run of tokens after the end is neither committed nor emitted."""
    oracle = Oracle(2, accept=lambda step, rid: 2)
    world = World(num_stages, [arrive("a", max_new=max_new), arrive("b", max_new=6)], oracle=oracle).run()
    world.check_end()
    assert len(world.engines[0].requests["a"].out) == max_new
    cut = [entry for entry in world.happened("accepted") if entry[1] == "a"]
    if max_new in (2, 3, 5):
        assert 1 + sum(drafts + 1 for *_, drafts in cut) > max_new, "more was accepted than could be emitted"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_running_out_of_kv_retracts_the_same_request_on_every_stage(num_stages):
    events = [arrive(rid, prompt=4, max_new=12) for rid in "abcd"]
    world = World(num_stages, events, pool_size=34, max_running=2).run()
    world.check_end()
    retracted = [world.happened("retracted", stage) for stage in range(num_stages)]
    assert retracted[0] and all(other == retracted[0] for other in retracted)
    assert any(kind is FrameKind.VERIFY for *_, kind, _ in world.happened("launched"))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_surplus_round_leaves_the_kv_alone_that_its_request_gave_back(num_stages, shape, overlap):
    """The pool holds one request: the next one moves into the slots while the round after the last is in flight."""
    events = [arrive(rid, turn, prompt=3, max_new=6) for turn, rid in enumerate("abcd")]
    oracle = Oracle(2, accept=lambda step, rid: 2)
    pool_size = 3 + 6 + 2 * shape.num_draft_tokens
    world = World(num_stages, events, shape=shape, oracle=oracle, pool_size=pool_size).run().check_end()
    assert bool(world.happened("dropped")) is bool(overlap), "a surplus round ran, and only with overlap"
