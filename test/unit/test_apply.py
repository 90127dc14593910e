"""Contract 3, 4, 6, 10, 19: the order in which a frame takes effect, and for whom."""

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.core.apply import account_frame, adopt_frame, advanced_lengths, nodes_of_batch, owns_row
from sglang_pp_spec.core.frame import FrameKind, begin_frame
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import FrameLayout, TreeShape
from sglang_pp_spec.core.ledger import Ledger
from sglang_pp_spec.core.stage_loop import Turn

SHAPE = TreeShape(2, 2, 4)
LAYOUT = FrameLayout(SHAPE, capacity=4)
A, B, C, D = (RowIdentity(rid, i) for i, rid in enumerate("abcd", 1))


class State:
    """Notes what is called, with what."""

    def __init__(self, not_owned=()):
        self.not_owned, self.calls = not_owned, []

    def owns_row(self, turn, row):
        return row not in self.not_owned

    def commit_cache(self, turn, rows, owned):
        self.calls.append(("commit_cache", owned))

    def advance(self, turn, on_device, on_host, live):
        self.calls.append(("advance", live, on_host is not None))

    def fold(self, turn, newer):
        self.calls.append(("fold", newer.identities))

    def deliver(self, turn, rows, owned):
        self.calls.append(("deliver", owned))


def turn_of(kind, samples=(True, True, True)):
    launch = Ledger(epoch=1, num_slots=1).launch(step=0, slot=0, kind=kind, identities=[A, B, C], samples=samples)
    return Turn(launch, SimpleNamespace())


def applied(state, turn, live=(A, B, C), read=True):
    """The calls of adopting and accounting for a frame; ``read`` False: it is read in between."""
    launch = turn.launch
    frame = begin_frame(
        launch.header, launch.identities, LAYOUT, num_accepted=[int(s) for s in launch.samples], num_drafts=[0] * 3
    )
    turn.adoptable, turn.on_host = frame, frame if read else None
    adopt_frame(state, turn, LAYOUT, live)
    turn.on_host = frame
    account_frame(state, turn, LAYOUT)
    return state.calls


def test_the_cache_is_committed_at_forward_time_lengths_before_they_advance():
    names = [name for name, *_ in applied(State(), turn_of(FrameKind.VERIFY))]
    assert names == ["commit_cache", "advance", "fold", "deliver"]


@pytest.mark.parametrize("read", [True, False])
def test_a_host_that_has_not_read_the_frame_is_given_no_lengths(read):
    ((_, _, has_host_rows),) = [
        c for c in applied(State(), turn_of(FrameKind.VERIFY), read=read) if c[0] == "advance"
    ]
    assert has_host_rows is read


def test_a_request_that_ends_between_adopting_and_accounting_gets_no_token():
    """Aborted while its frame was adopted and unread: its cache moved, its output must not."""
    state, turn = State(), turn_of(FrameKind.VERIFY)
    fold = state.fold
    state.fold = lambda turn, newer: (fold(turn, newer), setattr(state, "not_owned", (1,)))
    calls = {call[0]: call[1] for call in applied(state, turn, read=False)}
    assert calls["commit_cache"] == [0, 1, 2] and calls["deliver"] == [0, 2]


def test_a_finished_prompt_moves_no_cache_and_no_length():
    assert [name for name, *_ in applied(State(), turn_of(FrameKind.PREFILL))] == ["fold", "deliver"]


def test_a_middle_chunk_folds_nothing():
    calls = applied(State(), turn_of(FrameKind.MIDDLE, samples=(False,) * 3))
    assert calls == [("deliver", [0, 1, 2])]


def test_rows_are_labelled_as_launched_whatever_the_batch_is_now():
    calls = {call[0]: call[1] for call in applied(State(), turn_of(FrameKind.VERIFY), live=(C, A))}
    assert calls["fold"] == [A, B, C] and calls["advance"] == (C, A)


def test_a_row_that_lost_its_request_reaches_neither_cache_nor_accounting():
    calls = {call[0]: call[1] for call in applied(State(not_owned=(1,)), turn_of(FrameKind.VERIFY))}
    assert calls["commit_cache"] == calls["deliver"] == [0, 2]


def test_a_refused_row_gets_no_token_but_a_refused_middle_chunk_is_still_drained():
    turn = turn_of(FrameKind.PREFILL, samples=(True, True, False))
    turn.refused_rows = (0, 2)
    assert dict(applied(State(), turn))["deliver"] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "owns"),
    [
        ({}, True),
        ({"rebuilds": 1}, False),
        ({"rebuilds": 1, "chunks_in_flight": 1}, False),
        ({"is_retracted": True}, False),
        ({"is_finished": True}, False),
        ({"is_finished": True, "chunks_in_flight": 1}, True),
        ({"chunks_in_flight": 2}, True),
    ],
)
def test_who_owns_a_row(changes, owns):
    usual = {
        "launched_rebuilds": 0,
        "rebuilds": 0,
        "is_retracted": False,
        "is_finished": False,
        "chunks_in_flight": 0,
    }
    assert owns_row(**(usual | changes)) is owns


def lengths(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_lengths_grow_from_the_forward_time_snapshot_by_what_was_accepted():
    live = lengths(-9, -9, -9)
    assert advanced_lengths(live, lengths(10, 20, 30), lengths(1, 3, 2), [A, B, C], [A, B, C]).tolist() == [
        11,
        23,
        32,
    ]


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        ([C, B, A], [32, 23, 11]),
        ([C], [32]),
        ([D, B], [70, 23]),
        ([B, D, A], [23, 71, 11]),
        ([], []),
        ([RowIdentity("a", 99)], [70]),
    ],
)
def test_lengths_follow_their_requests_into_any_other_batch(live, expected):
    """A request that joined keeps its own length, and so does another incarnation of one that left."""
    current = lengths(*range(70, 70 + len(live)))
    before = current.clone()
    result = advanced_lengths(current, lengths(10, 20, 30), lengths(1, 3, 2), [A, B, C], live)
    assert result.tolist() == expected
    assert torch.equal(current, before), "the old lengths may still be read by a forward"


def test_nodes_are_numbered_through_the_batch_and_nothing_stays_nothing():
    accept_index = torch.tensor([[0, 2, 3], [0, -1, -1], [0, 1, -1]])
    assert nodes_of_batch(accept_index, SHAPE).tolist() == [[0, 2, 3], [4, -1, -1], [8, 9, -1]]


@pytest.mark.parametrize("path", [[0, 2, 3], [0, 1, 2], [0, 3, -1], [0, -1, -1]])
def test_compaction_moves_the_accepted_path_to_the_front(path):
    """A slot-map simulator, two rows: after a move by these nodes the front of each row holds exactly its path."""
    slots = torch.arange(100, 108)
    content = {int(slot): f"node {i}" for i, slot in enumerate(slots)}
    nodes = nodes_of_batch(torch.tensor([[0, 1, -1], path]), SHAPE)
    moved = {
        int(slots[4 + place]): content[int(slots[node])] for place, node in enumerate(nodes[1].tolist()) if node >= 0
    }
    assert list(moved.values()) == [f"node {4 + node}" for node in path if node >= 0]
