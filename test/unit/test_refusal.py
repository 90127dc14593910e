"""on_mismatch=abort: whom a refused frame concerns, and what stands in for it."""

import pytest
import torch

from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import FrameKind, FrameRows, begin_frame, check_frame
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import HEADER_FIELDS, NUM_ACCEPTED, NUM_DRAFTS, FrameLayout, TreeShape
from sglang_pp_spec.core.ledger import Ledger
from sglang_pp_spec.core.refusal import affected_rows, degenerate

LAYOUTS = [FrameLayout(TreeShape(3, 1, 4), 5), FrameLayout(TreeShape(3, 2, 6), 5)]
KINDS = [(FrameKind.VERIFY, (True, True, True)), (FrameKind.PREFILL, (True, True, False))]
ROWS = [RowIdentity(rid, i) for i, rid in enumerate("abc", 1)]


@pytest.fixture(params=LAYOUTS, ids=["chain", "tree"])
def layout(request):
    return request.param


@pytest.fixture(params=KINDS, ids=["verify", "prefill"])
def launch(request):
    kind, samples = request.param
    return Ledger(epoch=1, num_slots=4).launch(step=8, slot=2, kind=kind, identities=ROWS, samples=samples)


def right_frame(launch, layout):
    """A frame that is accepted, all its unused space filled with old data."""
    accepted = [int(samples) for samples in launch.samples]
    drafts = [layout.shape.num_drafts * count for count in accepted]
    frame = begin_frame(launch.header, launch.identities, layout, num_accepted=accepted, num_drafts=drafts)
    frame[1:, NUM_DRAFTS + 1 :] = torch.arange(5 * (layout.width - NUM_DRAFTS - 1)).reshape(5, -1) + 7000
    return frame


def check(frame, launch, layout):
    check_frame(frame, launch.header, launch.identities, layout, samples=launch.samples)


def test_the_right_frame_affects_nobody(launch, layout):
    check(right_frame(launch, layout), launch, layout)
    assert affected_rows(right_frame(launch, layout), launch, layout) == ()


@pytest.mark.parametrize("column", range(len(HEADER_FIELDS)))
def test_a_wrong_header_affects_every_row_of_the_slot(launch, layout, column):
    frame = right_frame(launch, layout)
    frame[0, column] += 1
    assert affected_rows(frame, launch, layout) == (0, 1, 2)


@pytest.mark.parametrize("column", [0, 1, NUM_ACCEPTED, NUM_DRAFTS])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_wrong_identity_or_count_affects_its_own_row_alone(launch, layout, row, column):
    frame = right_frame(launch, layout)
    frame[1 + row, column] += 50
    assert affected_rows(frame, launch, layout) == (row,)


def test_swapped_rows_are_both_affected(launch, layout):
    frame = right_frame(launch, layout)
    frame[[1, 2]] = frame[[2, 1]]
    assert affected_rows(frame, launch, layout) == (0, 1)


def test_what_is_no_frame_affects_every_row(launch, layout):
    assert affected_rows(torch.zeros(2, 2, dtype=torch.int64), launch, layout) == (0, 1, 2)
    assert affected_rows(right_frame(launch, layout).to(torch.int32), launch, layout) == (0, 1, 2)


@pytest.mark.parametrize("rows", [(0,), (1, 2), (0, 1, 2), ()])
def test_what_stands_in_for_it_is_accepted_and_leaves_the_other_rows_as_they_were(launch, layout, rows):
    frame = right_frame(launch, layout)
    frame[0, 2] += len(rows) == 3
    for row in rows:
        frame[1 + row, :NUM_ACCEPTED] = -5
    before = frame.clone()
    safe = degenerate(frame, launch, layout, rows)
    check(safe, launch, layout)
    assert torch.equal(frame, before), "the received frame is evidence and stays as it is"
    for row in range(3):
        if row not in rows:
            assert torch.equal(safe[1 + row], before[1 + row])


def test_a_degenerate_row_carries_its_root_and_nothing_else(launch, layout):
    safe = degenerate(right_frame(launch, layout), launch, layout, (0, 1, 2))
    view = FrameRows.of(safe, layout, 3)
    assert view.num_drafts.tolist() == [0, 0, 0]
    assert view.num_accepted.tolist() == [int(samples) for samples in launch.samples]
    assert not view.tokens.any() and not view.drafts.any()
    if view.accept_index is not None and launch.header.kind is FrameKind.VERIFY:
        assert view.accept_index.tolist() == [[0, -1, -1, -1]] * 3


def test_every_refusal_affects_somebody(launch, layout):
    """The pure function and the check agree: refused exactly if a row is affected."""
    generator = torch.Generator().manual_seed(0)
    outcomes = set()
    for _ in range(300):
        frame = right_frame(launch, layout)
        row = int(torch.randint(0, 4, (), generator=generator))
        column = int(torch.randint(0, layout.width, (), generator=generator))
        frame[row, column] += int(torch.randint(-2, 3, (), generator=generator))
        try:
            check(frame, launch, layout)
            refused = False
        except FrameRefused:
            refused = True
        assert refused is bool(affected_rows(frame, launch, layout))
        outcomes.add(refused)
    assert outcomes == {True, False}
