"""Contract 2, 7, 8, 9, 11, 12: who a request is, what it has in flight, and who may give that back."""

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pp_spec.core.errors import FenceViolation, LedgerFault
from sglang_pp_spec.core.frame import FrameKind
from sglang_pp_spec.core.ledger import Ledger


class Request:
    """What an engine owns; another object is another request."""

    def __init__(self, rid):
        self.rid = rid
        self.rebuilds = 0


def ledger(num_slots=4, **options):
    return Ledger(epoch=1, num_slots=num_slots, **options)


def identify(book, *requests):
    return [book.identify(req.rid, owner=req, rebuilds=req.rebuilds) for req in requests]


def launch(book, slot, *requests, step=0, samples=None, kind=FrameKind.VERIFY):
    """Launch all requests of the slot; ``samples`` None: each row decides tokens."""
    return book.launch(
        step=step,
        slot=slot,
        kind=kind,
        identities=identify(book, *requests),
        samples=[True] * len(requests) if samples is None else samples,
    )


# Identity.


def test_a_request_is_the_same_for_as_long_as_its_state_is():
    book, req = ledger(), Request("a")
    assert len({identify(book, req)[0] for _ in range(5)}) == 1


def test_retraction_makes_another_incarnation():
    book, req = ledger(), Request("a")
    (before,) = identify(book, req)
    req.rebuilds += 1
    (after,) = identify(book, req)
    assert before.rid == after.rid and before != after and before.words != after.words
    assert book.is_current(after) and not book.is_current(before)


def test_a_new_request_with_an_old_id_is_another_incarnation_even_if_the_old_one_was_never_retired():
    book, old, new = ledger(), Request("a"), Request("a")
    (before,), (after,) = identify(book, old), identify(book, new)
    assert before != after and book.is_current(after) and not book.is_current(before)


def test_a_new_request_at_the_old_address_is_another_incarnation():
    """Objects are compared, not their addresses: Python reuses an address as soon as the old object is gone."""
    book, addresses, incarnations = ledger(), set(), set()
    for _ in range(50):
        req = Request("a")
        addresses.add(id(req))
        incarnations.add(identify(book, req)[0])
        del req
    assert len(addresses) < 50, "an address was used again"
    assert len(incarnations) == 50


def test_incarnation_numbers_are_never_used_twice():
    book, seen = ledger(), set()
    for rid in "abcabc":
        req = Request(rid)
        (identity,) = identify(book, req)
        book.retire(identity)
        seen.add(identity.incarnation)
    assert len(seen) == 6


def test_retiring_an_old_incarnation_leaves_the_new_one_alone():
    book, old, new = ledger(), Request("a"), Request("a")
    (before,), (after,) = identify(book, old), identify(book, new)
    book.retire(before)
    assert book.is_current(after) and identify(book, new) == [after]


def test_a_request_that_ends_outside_a_step_is_forgotten_with_its_object():
    """Aborted while it waited to resume, a request is in no step that could retire it; it used to stay for ever."""
    book, req = ledger(), Request("a")
    identify(book, req)
    assert "a" in book._lives
    del req
    gc.collect()
    assert book._lives == {}


def test_the_end_of_an_old_object_does_not_end_the_life_of_a_new_one():
    book, old, new = ledger(), Request("a"), Request("a")
    identify(book, old)
    (after,) = identify(book, new)
    del old
    gc.collect()
    assert book.is_current(after)


def test_asking_without_begin_starts_no_life():
    """Applying a late frame of an ended request used to start a life nobody would end."""
    book, req = ledger(), Request("a")
    assert book.identify("a", owner=req, rebuilds=0, begin=False).incarnation == 0
    assert book._lives == {}
    (identity,) = identify(book, req)
    assert book.identify("a", owner=req, rebuilds=0, begin=False) == identity
    assert book.identify("a", owner=req, rebuilds=1, begin=False) != identity


def done(book, step):
    """Adopted and settled, as without overlap."""
    book.adopt(step)
    book.settle(step)


# The fence.


def test_a_request_with_a_frame_in_flight_is_not_launched_again():
    book, req = ledger(), Request("a")
    first = launch(book, 0, req)
    with pytest.raises(FenceViolation, match="step 1 slot 1: a#1 already has 1 frame"):
        launch(book, 1, req, step=1)
    done(book, first)
    launch(book, 1, req, step=2)


def test_a_refused_launch_takes_nothing():
    """All or nothing: the other rows of the batch are not fenced by a launch that did not happen."""
    book, a, b = ledger(), Request("a"), Request("b")
    launch(book, 0, a)
    with pytest.raises(FenceViolation):
        launch(book, 1, b, a, step=1)
    assert book.expected(1) is None
    book.check_integrity()
    launch(book, 1, b, step=2)


def test_the_last_chunk_of_a_prompt_is_fenced_like_a_verify():
    book, req = ledger(), Request("a")
    launch(book, 0, req, kind=FrameKind.PREFILL)
    with pytest.raises(FenceViolation):
        launch(book, 1, req, step=1)


def test_middle_chunks_are_not_fenced_and_fence_nothing():
    book, req = ledger(), Request("a")
    for slot in range(3):
        launch(book, slot, req, step=slot, samples=[False], kind=FrameKind.MIDDLE)
    final = launch(book, 3, req, step=3, kind=FrameKind.PREFILL)
    assert book._in_flight == {final.identities[0]: 1}
    for slot in range(4):
        done(book, book.expected(slot))
        book.check_integrity()
    assert book.is_idle


def test_a_middle_chunk_gives_back_nothing_when_its_final_chunk_is_in_flight():
    """Its frame comes first: released by it, the fence would be gone while the first token is still to come."""
    book, req = ledger(), Request("a")
    middle = launch(book, 0, req, samples=[False], kind=FrameKind.MIDDLE)
    launch(book, 1, req, step=1, kind=FrameKind.PREFILL)
    done(book, middle)
    with pytest.raises(FenceViolation, match="already has 1"):
        launch(book, 2, req, step=2)


def test_the_old_frame_of_a_reused_id_leaves_the_new_request_fenced():
    """Contract 9, 12: the share belongs to the incarnation, not to the id."""
    book, old, new = ledger(), Request("a"), Request("a")
    stale = launch(book, 0, old)
    launch(book, 1, new, step=1)
    done(book, stale)
    with pytest.raises(FenceViolation, match="a#2"):
        launch(book, 2, new, step=2)
    book.check_integrity()


def test_a_retracted_request_is_free_at_once_and_its_stale_frame_takes_nothing_from_it():
    book, req = ledger(), Request("a")
    stale = launch(book, 0, req)
    req.rebuilds += 1
    fresh = launch(book, 1, req, step=1)
    done(book, fresh)
    book.check_integrity()
    again = launch(book, 2, req, step=2)
    done(book, stale)
    done(book, again)
    assert book.is_idle and not book._in_flight


def test_a_request_that_is_in_a_batch_twice_is_refused():
    book, req = ledger(), Request("a")
    with pytest.raises(FenceViolation, match="twice"):
        launch(book, 0, req, req)
    book.check_integrity()


def test_with_overlap_a_request_runs_one_unaccounted_step_ahead_and_no_further():
    """Its KV is reserved for that many; and a step whose frame was not adopted fences it in any case."""
    book, req = ledger(max_unaccounted=2), Request("a")
    first = launch(book, 0, req)
    with pytest.raises(FenceViolation, match="already has 1"):
        launch(book, 1, req, step=1)
    book.adopt(first)
    second = launch(book, 1, req, step=2)
    book.adopt(second)
    with pytest.raises(FenceViolation, match="2 step"):
        launch(book, 2, req, step=3)
    book.settle(first)
    launch(book, 2, req, step=4)
    book.check_integrity()


def test_without_overlap_an_adopted_step_that_is_unaccounted_still_fences_its_requests():
    book, req = ledger(), Request("a")
    book.adopt(launch(book, 0, req))
    with pytest.raises(FenceViolation, match="1 step"):
        launch(book, 1, req, step=1)


def test_a_slot_with_overlap_holds_an_adopted_step_beside_the_newest_one():
    book, a, b, c = ledger(max_unaccounted=2), Request("a"), Request("b"), Request("c")
    first = launch(book, 0, a)
    with pytest.raises(LedgerFault, match="still holds step 0"):
        launch(book, 0, b, step=3)
    book.adopt(first)
    second = launch(book, 0, b, step=3)
    book.adopt(second)
    with pytest.raises(LedgerFault, match="still holds step 0, not accounted"):
        launch(book, 0, c, step=6)
    with pytest.raises(LedgerFault, match="step 3 is not what slot 0 holds"):
        book.settle(second)
    book.settle(first)
    assert book.expected(0) is second


def test_a_step_is_adopted_once_and_before_it_is_settled():
    book = ledger()
    step = launch(book, 0, Request("a"))
    with pytest.raises(LedgerFault, match="was not adopted"):
        book.settle(step)
    book.adopt(step)
    with pytest.raises(LedgerFault, match="not to be adopted"):
        book.adopt(step)
    book.settle(step)
    with pytest.raises(LedgerFault, match="not to be adopted"):
        book.adopt(step)


# Steps.


def test_a_slot_holds_one_step():
    book = ledger()
    launch(book, 0, Request("a"))
    with pytest.raises(LedgerFault, match="slot 0 still holds step 0"):
        launch(book, 0, Request("b"), step=4)


def test_only_the_step_a_slot_holds_can_be_settled_and_only_once():
    book, a, b = ledger(), Request("a"), Request("b")
    first = launch(book, 0, a)
    done(book, first)
    with pytest.raises(LedgerFault, match="step 0 is not what slot 0 holds"):
        book.settle(first)
    second = launch(book, 0, b, step=4)
    with pytest.raises(LedgerFault):
        book.settle(first)
    assert book.expected(0) is second
    book.check_integrity()


def test_a_share_that_outlived_its_step_is_found():
    book = ledger()
    step = launch(book, 0, Request("a"))
    book._launched[0] = []
    with pytest.raises(LedgerFault, match="in flight"):
        book.check_integrity()
    book._launched[0] = [step]
    book.adopt(step)
    book._unaccounted.clear()
    with pytest.raises(LedgerFault, match="not accounted"):
        book.check_integrity()


actions = st.lists(
    st.tuples(
        st.sampled_from(["launch", "adopt", "settle", "rebuild", "renew"]), st.integers(0, 3), st.integers(0, 2)
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions, st.integers(1, 2))
def test_shares_equal_those_of_a_plain_model_whatever_happens(todo, bound):
    """The model: a list of [slot, owner, rebuilds, adopted], oldest first."""
    book, requests = ledger(max_unaccounted=bound), [Request(rid) for rid in "abc"]
    model: list[list] = []
    for step, (what, slot, which) in enumerate(todo):
        req = requests[which]
        in_slot = [entry for entry in model if entry[0] == slot]
        if what == "launch":
            own = [entry for entry in model if entry[1] is req and entry[2] == req.rebuilds]
            allowed = all(entry[3] for entry in in_slot + own) and max(len(in_slot), len(own)) < bound
            try:
                launch(book, slot, req, step=step)
                assert allowed
                model.append([slot, req, req.rebuilds, False])
            except (FenceViolation, LedgerFault):
                assert not allowed
        elif what == "adopt" and in_slot and not in_slot[-1][3]:
            book.adopt(book._launched[slot][-1])
            in_slot[-1][3] = True
        elif what == "settle" and in_slot and in_slot[0][3]:
            book.settle(book.expected(slot))
            model.remove(in_slot[0])
        elif what == "rebuild":
            req.rebuilds += 1
        elif what == "renew":
            requests[which] = Request(req.rid)
        book.check_integrity()
        assert sum(book._unaccounted.values()) == len(model)
        assert sum(book._in_flight.values()) == sum(not entry[3] for entry in model)
    assert book.is_idle == (not model)
