"""Contract 3, 17, 18, 19: the batch changes while its step is in flight; what the step left behind still fits."""

from itertools import product

import pytest
from oracle import Oracle
from toy_scheduling import Event
from world import CHAIN, TREE, World, arrive


def three_decoding(turn_of_event, name, **options):
    """Three requests of one slot in decode, a fourth in another slot, an event at one turn."""
    events = [arrive(rid, 0, prompt=2 + i, max_new=8) for i, rid in enumerate("abc")]
    events += [arrive("d", 1, prompt=7, max_new=6), Event.of(turn_of_event, name, *options.pop("rid", ()))]
    return events


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rows_permuted_while_their_step_is_in_flight_keep_their_tokens(num_stages, shape):
    recomposed = 0
    for turn in range(2 * num_stages, 5 * num_stages):
        world = World(num_stages, three_decoding(turn, "permute"), shape=shape).run().check_end()
        recomposed += len(world.happened("recomposed"))
    assert recomposed >= num_stages, "the live batch differed from the launched one when the frame came"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("rid", ["a", "b", "c"])
def test_a_row_that_left_while_its_step_was_in_flight_shifts_no_other(num_stages, rid):
    recomposed = 0
    for turn in range(2 * num_stages, 4 * num_stages):
        world = World(num_stages, three_decoding(turn, "retract", rid=(rid,)), shape=TREE).run().check_end()
        recomposed += len(world.happened("recomposed"))
    assert recomposed >= num_stages - 1


@pytest.mark.parametrize("num_stages", [3, 4])
def test_recurrent_state_and_kv_are_committed_after_other_slots_ran(num_stages):
    """Scratch that is shared between micro-batches is overwritten by then: lost quality, normal accept length."""
    events = [arrive(rid, turn, prompt=3, max_new=9) for turn, rid in enumerate("abcdefgh")]
    oracle = Oracle(2, accept=lambda step, rid: 1 + step % 2)
    world = World(num_stages, events, shape=TREE, max_running=2, oracle=oracle).run().check_end()
    launched = world.happened("launched")
    slots_between = [b[2] for a, b in zip(launched, launched[1:], strict=False) if b[1] == a[1] + 1 and b[2] != a[2]]
    assert len(slots_between) > 4 * num_stages, "another slot was launched between launch and apply"
    assert any(drafts == 2 for *_, drafts in world.happened("accepted")), "a path that is no prefix was accepted"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_the_drafts_an_oracle_made_right_are_the_ones_accepted(num_stages):
    """Contract 6, 26, exhaustively: accept patterns 0..k over three rounds of two requests in one batch."""
    seen = set()
    for patterns in product(range(3), repeat=4):
        oracle = Oracle(2, accept=lambda step, rid, p=patterns: p[(step // num_stages * 2 + (rid == "b")) % 4])
        world = World(num_stages, [arrive("a", max_new=9), arrive("b", max_new=9)], oracle=oracle).run().check_end()
        seen.update(drafts for *_, drafts in world.happened("accepted"))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_an_empty_draft_column_is_no_draft_even_where_it_is_right(num_stages, shape):
    """Contract 16: a row without drafts holds zeros; the true next token of this request *is* 0.

    The text would be right either way; the count tells: one token per round, no draft accepted.
    """
    oracle = Oracle(2, lost=lambda step, rid: True)
    world = World(num_stages, [arrive("zero", max_new=4)], shape=shape, oracle=oracle).run().check_end()
    accepted = [drafts for *_, drafts in world.happened("accepted")]
    assert accepted == [0, 0, 0]
    trees = [tree for step in world.states.values() for stage in step.values() for *_, tree in stage if tree]
    assert any(tree[1:] == (0,) * (len(tree) - 1) for tree in trees), "the filler was the right token"


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("lost_every", [1, 2, 3])
def test_grammar_holds_with_illegal_and_with_lost_drafts(num_stages, lost_every):
    """Contract 20: at every third position the target would leave the grammar, and the drafter proposes just that."""
    oracle = Oracle(2, accept=lambda step, rid: 2, lost=lambda step, rid: step // num_stages % lost_every == 1)
    events = [arrive("g", prompt=4, max_new=9, grammar=True), arrive("a", max_new=9)]
    world = World(num_stages, events, oracle=oracle).run().check_end()
    drafts = [drafts for _, rid, *_, drafts in world.happened("accepted") if rid == "g"]
    assert min(drafts) < 2 <= max(drafts) or lost_every > 1, "a draft set was cut in the middle"
    assert len({engine.requests["g"].grammar_position for engine in world.engines}) == 1
