"""A frame nobody has read is harmless on the device: a row that ``check_frame`` would refuse is degenerate."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import FrameKind, FrameRows, begin_frame, check_frame
from sglang_pp_spec.core.guard import guarded
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import FrameLayout, TreeShape
from sglang_pp_spec.core.ledger import Ledger

A, B, C = (RowIdentity(rid, i) for i, rid in enumerate("abc", 1))
SHAPES = [TreeShape(3, 1, 4), TreeShape(2, 2, 4)]
WIDTH = {shape: FrameLayout(shape, capacity=5).width for shape in SHAPES}


def made(shape, kind=FrameKind.VERIFY, samples=(True, True, True)):
    """(layout, launch, the right frame with every payload column at 5)."""
    layout = FrameLayout(shape, capacity=5)
    launch = Ledger(epoch=3, num_slots=2).launch(step=9, slot=1, kind=kind, identities=[A, B, C], samples=samples)
    counts = [2 if kind is FrameKind.VERIFY else int(s) for s in samples]
    drafts = [shape.num_drafts if s else 0 for s in samples]
    frame = begin_frame(launch.header, launch.identities, layout, num_accepted=counts, num_drafts=drafts)
    frame[1:4, layout.tokens.start :] = 5
    return layout, launch, frame


def is_refused(frame, launch, layout):
    try:
        check_frame(frame, launch.header, launch.identities, layout, samples=launch.samples)
    except FrameRefused:
        return True
    return False


def is_degenerate(row, layout):
    """One token, no drafts, and of a tree the root alone."""
    rows = FrameRows.of(torch.stack([row, row]), layout, 1)
    root_only = rows.accept_index is None or rows.accept_index[0].tolist() == [0] + [-1] * (
        layout.shape.max_accepted - 1
    )
    return int(rows.num_accepted) <= 1 and int(rows.num_drafts) == 0 and root_only


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("kind", [FrameKind.VERIFY, FrameKind.PREFILL])
def test_a_right_frame_passes_as_it_is(shape, kind):
    layout, launch, frame = made(shape, kind)
    assert not is_refused(frame, launch, layout)
    assert torch.equal(guarded(frame, launch, layout), frame[:4])


def test_a_middle_chunks_row_beside_a_finished_prompt_passes():
    layout, launch, frame = made(SHAPES[0], FrameKind.PREFILL, samples=(True, False, True))
    assert not is_refused(frame, launch, layout)
    assert torch.equal(guarded(frame, launch, layout)[1:], frame[1:4])


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("column", range(6))
def test_a_wrong_header_leaves_nothing_of_any_row(shape, column):
    layout, launch, frame = made(shape)
    frame[0, column] += 1
    rows = guarded(frame, launch, layout)[1:]
    assert all(is_degenerate(row, layout) for row in rows)
    assert rows[:, :2].tolist() == [list(identity.words) for identity in (A, B, C)]


@pytest.mark.parametrize("shape", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize(("column", "value"), [(0, 1), (1, 1), (2, 0), (2, 5), (2, -1), (2, 2**40), (3, 1), (3, -1)])
def test_a_wrong_row_is_degenerate_and_its_neighbours_are_untouched(shape, column, value):
    layout, launch, frame = made(shape)
    frame[2, column] = value
    assert is_refused(frame, launch, layout)
    rows = guarded(frame, launch, layout)
    assert is_degenerate(rows[2], layout)
    assert torch.equal(rows[[1, 3]], frame[[1, 3]])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from([FrameKind.VERIFY, FrameKind.PREFILL]),
    st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(-3, 6),
)
def test_the_device_finds_exactly_what_the_host_refuses(shape, kind, samples, row, column, value):
    """A frame with one word changed: guarded is not the frame if and only if the check refuses it."""
    if kind is FrameKind.VERIFY:
        samples = [True] * 3
    layout, launch, frame = made(shape, kind, samples)
    frame[row, min(column, 3) if row else column] = value
    rows = guarded(frame, launch, layout)
    assert torch.equal(rows[1:], frame[1:4]) is not is_refused(frame, launch, layout)


def test_the_frame_itself_is_left_alone():
    """It may still be on its way to other stages, and the host reads it later."""
    layout, launch, frame = made(SHAPES[1])
    frame[1, 2] = 99
    before = frame.clone()
    guarded(frame, launch, layout)
    assert torch.equal(frame, before)
