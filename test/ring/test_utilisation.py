"""Contract, schedule: with as many slots as stages, no stage waits; exchanging a frame first costs a whole stage."""

import pytest
from oracle import Oracle
from world import World, arrive

from sglang_pp_spec.core.stage_loop import StageLoop


class ExchangeFirst(StageLoop):
    """Waits for the next slot's frame before it launches this slot, as SGLang's own loop does."""

    def take_turn(self, slot):
        other = self.turns[(slot + 1) % self.num_slots]
        self._read(other)
        self._adopt(other)
        self._account(other)
        return super().take_turn(slot)


def full_pipeline(num_stages, *, depth=0, loop=StageLoop, batches=None, rounds=25, **options):
    """One decoding request per slot for the whole time; every stage takes one unit per step."""
    rids = "abcdefgh"[: batches or num_stages + depth]
    oracle = Oracle(2, accept=lambda step, rid: 0)
    events = [arrive(rid, turn, prompt=2, max_new=rounds) for turn, rid in enumerate(rids)]
    world = World(num_stages, events, depth=depth, loop=loop, oracle=oracle, max_running=1, **options)
    return world.run().check_end()


def busy_share(world):
    """Smallest busy share of a stage after the pipeline has filled and before it drains."""
    start, end = 2.0 * world.num_slots, world.engines[0].clock.now - 2.0 * world.num_slots
    assert end - start > 20
    return min(engine.clock.utilisation(start, end) for engine in world.engines)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_as_many_slots_as_stages_keep_every_stage_busy(num_stages, depth):
    world = full_pipeline(num_stages, depth=depth)
    assert busy_share(world) > 0.9, f"busy {busy_share(world):.3f}"


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_exchanging_first_leaves_a_share_of_one_over_p_unused(num_stages):
    """SGLang #40499: the loop that waits for an output before the next launch is capped at (P-1)/P."""
    share = busy_share(full_pipeline(num_stages, loop=ExchangeFirst))
    assert share == pytest.approx((num_stages - 1) / num_stages, abs=0.03)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_one_batch_alone_uses_one_stage_at_a_time(num_stages):
    """The ceiling for a single micro-batch: no order of operations can do better, only overlap on the host."""
    share = busy_share(full_pipeline(num_stages, batches=1))
    assert share == pytest.approx(1 / num_stages, abs=0.03)
