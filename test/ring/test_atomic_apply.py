"""Contract 4: applying a frame is one thing. If it fails midway the step stays open and its requests stay fenced."""

import pytest
from world import TREE, World, arrive


class Broken(Exception):
    pass


@pytest.mark.parametrize("step", ["owns_row", "commit_cache", "advance", "fold", "deliver"])
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
    ledger = loop.ledger
    assert any(ledger.expected(slot) is not None for slot in range(loop.num_slots))
    assert {identity.rid for identity in ledger._unread} == {"a", "b"}
    ledger.check_integrity()
    assert all(req.frames_in_flight >= 1 for req in engine.everything)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_frame_is_read_before_it_is_used_or_with_overlap_before_it_is_accounted_for(num_stages, overlap):
    """The order on a stage, per step; without overlap nothing at all happens before the check."""
    world, calls = World(num_stages, [arrive("a", max_new=5)]), []
    engine, transport = world.engines[0], world.loops[0].transport
    adopt, account = engine.adopt, engine.account
    transport.reading = lambda: calls.append("read")
    engine.adopt = lambda turn, live: (calls.append("adopt"), adopt(turn, live))[1]
    engine.account = lambda turn: (calls.append("account"), account(turn))[1]
    world.run().check_end()
    order = ["adopt", "read", "account"] if overlap else ["read", "adopt", "account"]
    assert len(calls) >= 6 and calls == order * (len(calls) // 3)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_with_overlap_the_next_round_is_launched_before_the_frame_is_read(num_stages, overlap):
    """On every stage, for every round that follows a round of the same slot; never without overlap."""
    world, calls = World(num_stages, [arrive("a", max_new=12)]), []
    for engine, loop in zip(world.engines, world.loops, strict=True):
        run = engine.run
        loop.transport.reading = lambda stage=engine.stage: calls.append((stage, "read"))
        note = lambda stage=engine.stage: calls.append((stage, "run"))  # noqa: E731
        engine.run = lambda turn, proxy, note=note, run=run: (note(), run(turn, proxy))[1]
    world.run().check_end()
    for stage in range(num_stages):
        order = [what for where, what in calls if where == stage]
        rounds = len(order) // 2
        assert rounds > 4
        assert order == (["run", *["run", "read"] * (rounds - 1), "read"] if overlap else ["run", "read"] * rounds)
