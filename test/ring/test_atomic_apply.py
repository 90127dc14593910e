"""Contract 4: applying a frame is one thing. If it fails midway the step stays open and its requests stay fenced."""

from functools import partial

import pytest
from world import TREE, World, arrive

from sglang_pp_spec.core.ring import Overlap


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
    assert {identity.rid for identity in ledger._unaccounted} == {"a", "b"}
    ledger.check_integrity()
    assert all(req.frames_in_flight >= 1 for req in engine.everything)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_frame_is_read_before_it_is_used_or_with_overlap_before_it_is_accounted_for(num_stages, overlap):
    """The order on a stage, per step; where frames are read first nothing at all happens before the check."""
    world, calls = World(num_stages, [arrive("a", max_new=5)]), []
    engine, transport = world.engines[0], world.loops[0].transport
    adopt, account = engine.adopt, engine.account
    transport.reading = lambda: calls.append("read")
    engine.adopt = lambda turn, live: (calls.append("adopt"), adopt(turn, live))[1]
    engine.account = lambda turn: (calls.append("account"), account(turn))[1]
    world.run().check_end()
    order = ["adopt", "read", "account"] if overlap is Overlap.ON else ["read", "adopt", "account"]
    assert len(calls) >= 6 and calls == order * (len(calls) // 3)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("work", ["read", "account"])
def test_a_round_is_launched_before_what_the_mode_leaves_for_later(num_stages, work, overlap):
    """On every stage, for every round that follows a round of the same slot: reading, accounting, or nothing."""
    world, calls = World(num_stages, [arrive("a", max_new=12)]), []
    for engine, loop in zip(world.engines, world.loops, strict=True):
        note = partial(calls.append, (engine.stage, work))
        run, account = engine.run, engine.account
        if work == "read":
            loop.transport.reading = note
        else:
            engine.account = lambda turn, note=note, account=account: (note(), account(turn))[1]
        launch = partial(calls.append, (engine.stage, "run"))
        engine.run = lambda turn, proxy, launch=launch, run=run: (launch(), run(turn, proxy))[1]
    world.run().check_end()
    later = overlap is Overlap.ON or (overlap is Overlap.ACCOUNTING and work == "account")
    for stage in range(num_stages):
        order = [what for where, what in calls if where == stage]
        rounds = len(order) // 2
        assert rounds > 4
        assert order == (["run", *["run", work] * (rounds - 1), work] if later else ["run", work] * rounds)
