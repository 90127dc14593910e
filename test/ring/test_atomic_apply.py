"""Contract 4: applying a frame is one thing. If it fails midway the step stays open and its requests stay fenced."""

import pytest
from world import TREE, World, arrive


class Broken(Exception):
    pass


@pytest.mark.parametrize("step", ["owns_row", "commit_cache", "advance", "fold", "account"])
@pytest.mark.parametrize(("num_stages", "stage"), [(2, 0), (3, 1), (4, 2), (4, 3)])
def test_a_failure_within_apply_releases_nothing(num_stages, stage, step):
    """A fence that is free although progress did not move lets the request run again from an old token."""
    world = World(num_stages, [arrive("a", max_new=9), arrive("b", max_new=9)], shape=TREE)
    engine, loop = world.engines[stage], world.loops[stage]

    def fail(*args):
        if engine.num_turns > 2 * num_stages:
            raise Broken
        return type(engine).__dict__[step](engine, *args)

    setattr(engine, step, fail)
    with pytest.raises(Broken):
        world.run()
    (open_turn,) = [turn for turn in loop.turns if turn is not None]
    assert open_turn.launch is loop.ledger.expected(open_turn.launch.header.slot)
    assert {identity.rid for identity in loop.ledger._in_flight} == {"a", "b"}
    loop.ledger.check_integrity()
    assert all(req.frames_in_flight == 1 for req in engine.everything)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_frame_is_checked_before_any_part_of_it_is_used(num_stages):
    """The order of calls on a stage, per step: fetch, check, then the parts of apply."""
    calls = []
    world = World(num_stages, [arrive("a", max_new=5)])
    engine, loop = world.engines[0], world.loops[0]
    fetch, apply, checked = loop.transport.fetch, engine.apply, loop._checked
    loop.transport.fetch = lambda slot: (calls.append("fetch"), fetch(slot))[1]
    loop._checked = lambda turn, frame: (calls.append("check"), checked(turn, frame))[1]
    engine.apply = lambda turn, frame, live: (calls.append("apply"), apply(turn, frame, live))[1]
    world.run().check_end()
    assert len(calls) >= 6 and calls == ["fetch", "check", "apply"] * (len(calls) // 3)
