"""Contract, links: stages run ahead of each other as a seed decides, over links of capacity 0, 1 and 2.

What every stage does must not depend on it: the states after each frame are those of the stage-by-stage run.
"""

import pytest
from links import Stuck
from toy_scheduling import Event
from world import TREE, World, arrive


def busy_events():
    events = [arrive(rid, turn, prompt=3 + 4 * (turn % 3), max_new=5) for turn, rid in enumerate("abcde")]
    events += [Event.of(9, "retract", rid) for rid in "abde"]
    events += [Event.of(11, "abort", "c"), arrive("c", 11, max_new=4)]
    return sorted(events, key=lambda event: event.turn)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("link_capacity", [0, 1, 2])
def test_every_interleaving_over_every_capacity_gives_the_same_states(num_stages, depth, link_capacity):
    options = {"depth": depth, "shape": TREE, "chunk": 5, "max_running": 2}
    straight = World(num_stages, busy_events(), **options).run().check_end()
    num_turns = straight.engines[0].num_turns
    orders = set()
    for seed in range(4):
        world = World(num_stages, busy_events(), link_capacity=link_capacity, seed=seed, **options)
        world.run_threads(num_turns).check_end()
        assert world.states == straight.states
        assert all(link.most_waiting <= max(1, link_capacity) for link in world.proxies)
        orders.add(tuple(world.baton.order))
    assert straight.happened("retracted") and straight.happened("dropped")
    assert len(orders) > 1, "the seeds chose differently"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_slow_last_stage_delays_and_changes_nothing(num_stages):
    """Frames held back by several steps: the other stages run ahead as far as there are slots, then wait."""
    events = busy_events()
    straight = World(num_stages, events, depth=2).run().check_end()
    world = World(num_stages, events, depth=2, seed=0)
    pick = world.baton._random.choice
    world.baton._random.choice = lambda runners: pick([min(runners, key=lambda runner: runner.name)])
    ahead = []
    for link in world.frames:
        link.tamper = lambda number, frame: ahead.append(world.loops[0].step - number) or (frame,)
    world.run_threads(straight.engines[0].num_turns).check_end()
    assert max(ahead) >= num_stages, f"stage 0 was ahead of a frame by {max(ahead)} turns"
    assert world.states == straight.states


@pytest.mark.parametrize("num_stages", [3, 4])
def test_a_frame_that_never_comes_ends_in_a_report_of_who_waits_for_what(num_stages):
    world = World(num_stages, [arrive("a", max_new=9)], seed=1)
    world.frames[1].tamper = lambda number, frame: ()
    with pytest.raises(Stuck, match="nobody can go on: .*stage 1: receive 0 on frames to 1"):
        world.run_threads(60)


@pytest.mark.parametrize("seed", range(30))
def test_five_stages_with_random_traffic(seed):
    import random

    draw = random.Random(seed)
    events = [
        arrive(rid, draw.randrange(12), prompt=draw.randint(1, 12), max_new=draw.randint(1, 6)) for rid in "abcdefg"
    ]
    events += [Event.of(draw.randrange(1, 25), draw.choice(["retract", "abort"]), draw.choice("abcdefg"))]
    events += [Event.of(draw.randrange(5, 25), "permute")]
    events.sort(key=lambda event: event.turn)
    world = World(5, events, depth=seed % 3, shape=TREE, chunk=5, max_running=3).run().check_end()
    assert len(world.happened("launched")) > 5
