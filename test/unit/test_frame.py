"""Contract 1, 2, 13, 15, 16, 23, 25: what is written into a frame, and what is refused before anything reads it."""

import contextlib

import pytest
import torch

from sglang_pp_spec.core.errors import FrameRefused
from sglang_pp_spec.core.frame import (
    FrameHeader,
    FrameKind,
    FramePayload,
    FrameRows,
    begin_frame,
    check_frame,
    fill_rows,
)
from sglang_pp_spec.core.identity import RowIdentity, rid_digest
from sglang_pp_spec.core.layout import NUM_ACCEPTED, NUM_DRAFTS, FrameLayout, TreeShape

CHAIN = FrameLayout(TreeShape(3, 1, 4), capacity=5)
TREE = FrameLayout(TreeShape(3, 2, 6), capacity=5)
ROWS = (RowIdentity("a", 3), RowIdentity("b", 4), RowIdentity("c", 9))
POISON = -987


def header(kind=FrameKind.VERIFY, rows=ROWS, **changes):
    fields = {"epoch": 5, "step": 100, "slot": 2, "kind": kind, "num_rows": len(rows)} | changes
    return FrameHeader(**fields)


def payload(layout, kind=FrameKind.VERIFY, rows=3):
    """Different numbers everywhere."""
    shape, tree = layout.shape, not layout.shape.is_chain
    numbers = torch.arange(1000, 9000)
    verify = kind is FrameKind.VERIFY
    return FramePayload(
        tokens=numbers[: rows * (shape.max_accepted if verify else 1)].reshape(rows, -1),
        num_accepted=torch.arange(rows) % shape.max_accepted + 1 if verify else None,
        drafts=numbers[2000 : 2000 + rows * shape.num_drafts].reshape(rows, -1),
        parents=numbers[3000 : 3000 + rows * shape.num_parents].reshape(rows, -1) if tree else None,
        selected=numbers[4000 : 4000 + rows * shape.num_drafts].reshape(rows, -1) if tree else None,
        accept_index=numbers[5000 : 5000 + rows * shape.max_accepted].reshape(rows, -1) if tree and verify else None,
    )


def packed(layout, kind=FrameKind.VERIFY, rows=ROWS, **changes):
    num_drafts = [layout.shape.num_drafts] * len(rows)
    frame = begin_frame(
        header(kind, rows, **changes), rows, layout, num_accepted=[1] * len(rows), num_drafts=num_drafts
    )
    frame[1 + len(rows) :] = POISON
    fill_rows(frame, layout, payload(layout, kind, len(rows)))
    return frame


@pytest.mark.parametrize("layout", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", [FrameKind.VERIFY, FrameKind.PREFILL])
def test_what_was_filled_in_is_what_comes_out(layout, kind):
    frame, given = packed(layout, kind), payload(layout, kind)
    check_frame(frame, header(kind), ROWS, layout, samples=[True] * 3)
    rows = FrameRows.of(frame, layout, 3)
    assert torch.equal(rows.tokens[:, : given.tokens.shape[1]], given.tokens)
    assert torch.equal(rows.drafts, given.drafts)
    assert rows.num_drafts.tolist() == [layout.shape.num_drafts] * 3
    assert rows.num_accepted.tolist() == ([1, 2, 3] if kind is FrameKind.VERIFY else [1, 1, 1])
    if layout is TREE:
        assert torch.equal(rows.parents, given.parents) and torch.equal(rows.selected, given.selected)
    else:
        assert rows.parents is rows.selected is rows.accept_index is None


def test_drafts_of_some_rows_reach_those_rows_and_the_others_stay_empty():
    frame = begin_frame(header(FrameKind.PREFILL), ROWS, TREE, num_accepted=[1, 0, 1], num_drafts=[5, 0, 5])
    given = payload(TREE, FrameKind.PREFILL)
    index = torch.tensor([0, 2])
    some = FramePayload(
        tokens=given.tokens,
        num_accepted=None,
        drafts=given.drafts[:2],
        parents=given.parents[:2],
        selected=given.selected[:2],
        draft_rows=index,
    )
    fill_rows(frame, TREE, some)
    check_frame(frame, header(FrameKind.PREFILL), ROWS, TREE, samples=[True, False, True])
    rows = FrameRows.of(frame, TREE, 3)
    assert torch.equal(rows.drafts[index], given.drafts[:2]) and not rows.drafts[1].any()
    assert torch.equal(rows.parents[index], given.parents[:2])


def test_narrower_integers_are_widened_on_the_way_in():
    """SGLang's kernels return int32 counts and indices."""
    frame = packed(TREE)
    given = payload(TREE)
    fields = {name: value.to(torch.int32) for name, value in vars(given).items() if value is not None}
    again = begin_frame(header(), ROWS, TREE, num_accepted=[1] * 3, num_drafts=[5] * 3)
    fill_rows(again, TREE, FramePayload(**{**vars(given), **fields}))
    assert torch.equal(again[1:4], frame[1:4])


# Refusals. Each changes one thing of a frame that is right otherwise.


@pytest.mark.parametrize("layout", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("field", ["layout", "epoch", "step", "slot", "kind", "num_rows"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_header_field_off_by_one_is_named(layout, field, by):
    frame = packed(layout)
    frame[0, ["layout", "epoch", "step", "slot", "kind", "num_rows"].index(field)] += by
    with pytest.raises(FrameRefused, match=rf"step 100 slot 2 .*the frame says {field} "):
        check_frame(frame, header(), ROWS, layout)


def test_the_frame_of_a_neighbouring_step_is_refused_although_all_else_fits():
    """The same requests in the same slot one round earlier: identities and layout are right, only the step is not."""
    for step in (99, 101):
        with pytest.raises(FrameRefused, match=f"the frame says step {step}, expected 100"):
            check_frame(packed(CHAIN, step=step), header(), ROWS, CHAIN)


def test_the_frame_of_another_slot_is_refused_although_step_and_rows_fit():
    with pytest.raises(FrameRefused, match="the frame says slot 1, expected 2"):
        check_frame(packed(CHAIN, slot=1), header(), ROWS, CHAIN)


def test_the_frame_of_an_earlier_engine_run_is_refused():
    with pytest.raises(FrameRefused, match="the frame says epoch 4, expected 5"):
        check_frame(packed(CHAIN, epoch=4), header(), ROWS, CHAIN)


def test_permuted_rows_are_refused_and_both_orders_are_reported():
    frame = packed(CHAIN, rows=(ROWS[1], ROWS[0], ROWS[2]))
    with pytest.raises(FrameRefused, match=r"row 0 is not a#3; .*'a#3', 'b#4'.*received \['b#4', 'a#3', 'c#9'\]"):
        check_frame(frame, header(), ROWS, CHAIN)


@pytest.mark.parametrize("incarnation", [1, 2, 4])
def test_the_same_id_in_another_incarnation_is_refused(incarnation):
    frame = packed(CHAIN, rows=(RowIdentity("a", incarnation), *ROWS[1:]))
    with pytest.raises(FrameRefused, match="row 0 is not a#3"):
        check_frame(frame, header(), ROWS, CHAIN)


def test_another_request_in_the_same_incarnation_number_is_refused():
    frame = packed(CHAIN, rows=(*ROWS[:2], RowIdentity("x", 9)))
    with pytest.raises(FrameRefused, match=rf"row 2 is not c#9; .*\?{rid_digest('x'):x}#9"):
        check_frame(frame, header(), ROWS, CHAIN)


@pytest.mark.parametrize("rows", [ROWS[:2], (*ROWS, RowIdentity("d", 10))])
def test_a_row_more_or_less_is_refused(rows):
    with pytest.raises(FrameRefused, match="the frame says num_rows"):
        check_frame(packed(CHAIN, rows=rows), header(), ROWS, CHAIN)


@pytest.mark.parametrize("layout", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("accepted", [-(2**40), -1, 0, 5, 2**40])
def test_a_verify_row_accepts_at_least_one_and_at_most_a_path(layout, accepted):
    frame = packed(layout)
    frame[2, NUM_ACCEPTED] = accepted
    with pytest.raises(FrameRefused, match=rf"row 1 accepted {accepted} tokens, which is not within \[1, 4\]"):
        check_frame(frame, header(), ROWS, layout)


@pytest.mark.parametrize("drafts", [-1, 1, 2, 4])
def test_a_row_carries_all_drafts_or_none(drafts):
    frame = packed(CHAIN)
    frame[1, NUM_DRAFTS] = drafts
    with pytest.raises(FrameRefused, match=f"row 0 carries {drafts} drafts, not 0 or 3"):
        check_frame(frame, header(), ROWS, CHAIN)


def prefill(accepted, drafts, kind=FrameKind.PREFILL):
    return begin_frame(header(kind), ROWS, CHAIN, num_accepted=accepted, num_drafts=drafts)


@pytest.mark.parametrize(
    ("accepted", "drafts", "reason"),
    [
        ([1, 2, 0], [3, 3, 0], r"row 1 accepted 2 tokens, which is not within \[1, 1\]"),
        ([1, 0, 0], [3, 0, 0], r"row 1 accepted 0 tokens, which is not within \[1, 1\]"),
        ([1, 1, 1], [3, 3, 0], r"row 2 accepted 1 tokens, which is not within \[0, 0\]"),
        ([1, 1, 0], [3, 3, 3], "row 2 carries drafts but sampled no token"),
    ],
)
def test_a_prompt_gives_one_token_where_it_ended_and_none_where_it_goes_on(accepted, drafts, reason):
    """Row 2 is a middle chunk: its token id is a placeholder and must never be taken for output."""
    check_frame(prefill([1, 1, 0], [3, 0, 0]), header(FrameKind.PREFILL), ROWS, CHAIN, samples=[True, True, False])
    with pytest.raises(FrameRefused, match=reason):
        check_frame(prefill(accepted, drafts), header(FrameKind.PREFILL), ROWS, CHAIN, samples=[True, True, False])


def test_a_step_of_middle_chunks_alone_gives_no_token_at_all():
    check_frame(prefill([0] * 3, [0] * 3, FrameKind.MIDDLE), header(FrameKind.MIDDLE), ROWS, CHAIN)
    with pytest.raises(FrameRefused, match=r"not within \[0, 0\]"):
        check_frame(prefill([0, 1, 0], [0] * 3, FrameKind.MIDDLE), header(FrameKind.MIDDLE), ROWS, CHAIN)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(5, CHAIN.width), torch.zeros(7, CHAIN.width), torch.zeros(6, CHAIN.width + 1), torch.zeros(6)],
)
def test_a_tensor_of_another_size_is_no_frame(tensor):
    with pytest.raises(FrameRefused, match="is no frame of layout"):
        check_frame(tensor.to(torch.int64), header(), ROWS, CHAIN)


def test_a_tensor_of_another_type_is_no_frame():
    with pytest.raises(FrameRefused, match="is no frame of layout"):
        check_frame(packed(CHAIN).to(torch.int32), header(), ROWS, CHAIN)


def test_a_frame_on_the_device_is_not_read_by_the_check():
    """Reading it there would wait for the device."""
    with pytest.raises(ValueError, match="host copy"):
        check_frame(torch.empty(CHAIN.size, dtype=torch.int64, device="meta"), header(), ROWS, CHAIN)


# What is never read or written.


def test_padding_rows_are_never_read():
    frame = packed(TREE)
    assert (frame[4:] == POISON).all(), "the padding is poisoned"
    check_frame(frame, header(), ROWS, TREE)
    views = [view for view in vars(FrameRows.of(frame, TREE, 3)).values() if view is not None]
    assert all(view.shape[0] == 3 and not (view == POISON).any() for view in views)


def test_filling_writes_no_padding_row_and_no_header():
    before = begin_frame(header(), ROWS, TREE, num_accepted=[1] * 3, num_drafts=[5] * 3)
    frame = before.clone()
    frame[4:] = POISON
    fill_rows(frame, TREE, payload(TREE))
    assert torch.equal(frame[0], before[0]) and (frame[4:] == POISON).all()


def test_a_check_changes_nothing_whether_it_refuses_or_not():
    for frame in (packed(TREE), packed(TREE, step=99), packed(TREE, rows=ROWS[::-1])):
        before = frame.clone()
        with contextlib.suppress(FrameRefused):
            check_frame(frame, header(), ROWS, TREE)
        assert torch.equal(frame, before)


@pytest.mark.parametrize(
    ("part", "width"),
    [("tokens", 5), ("drafts", 4), ("drafts", 6), ("parents", 4), ("selected", 4), ("accept_index", 5)],
)
def test_a_part_of_another_width_is_refused_before_anything_is_written(part, width):
    """Too wide a token block used to spill into the draft columns; the frame still had the right size."""
    frame = begin_frame(header(), ROWS, TREE, num_accepted=[1] * 3, num_drafts=[5] * 3)
    before = frame.clone()
    wrong = FramePayload(**{**vars(payload(TREE)), part: torch.ones(3, width, dtype=torch.int64)})
    with pytest.raises(ValueError, match="wide"):
        fill_rows(frame, TREE, wrong)
    assert torch.equal(frame, before)


def test_topology_does_not_fit_a_chain():
    frame = packed(CHAIN)
    with pytest.raises(ValueError, match="a chain carries no selected"):
        fill_rows(frame, CHAIN, FramePayload(**{**vars(payload(CHAIN)), "selected": torch.ones(3, 3)}))


def test_a_batch_larger_than_a_frame_is_refused_on_both_ends():
    rows = tuple(RowIdentity(str(i), i) for i in range(6))
    with pytest.raises(ValueError, match="a batch of 6 rows does not fit a frame of 5"):
        begin_frame(header(rows=rows), rows, CHAIN, num_accepted=[1] * 6, num_drafts=[3] * 6)
    with pytest.raises(ValueError, match="a batch of 6 rows does not fit a frame of 5"):
        check_frame(packed(CHAIN), header(rows=rows), rows, CHAIN)


@pytest.mark.parametrize(
    "counts", [{"num_accepted": [1], "num_drafts": [3] * 3}, {"num_accepted": [1] * 3, "num_drafts": []}]
)
def test_counts_for_some_rows_only_are_refused(counts):
    with pytest.raises(ValueError):
        begin_frame(header(), ROWS, CHAIN, **counts)


def test_identities_that_do_not_match_the_header_are_refused_on_both_ends():
    with pytest.raises(ValueError, match="2 identities for a frame of 3 rows"):
        begin_frame(header(), ROWS[:2], CHAIN, num_accepted=[1] * 2, num_drafts=[3] * 2)
    with pytest.raises(ValueError, match="2 identities for a frame of 3 rows"):
        check_frame(packed(CHAIN), header(), ROWS[:2], CHAIN)


def test_an_empty_frame_is_a_frame():
    frame = begin_frame(header(rows=()), (), CHAIN, num_accepted=[], num_drafts=[])
    check_frame(frame, header(rows=()), (), CHAIN, samples=[])


# Contract 25.


class NoSync(torch.Tensor):
    """A tensor that cannot be read on the host, as one on a device must not be."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name not in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero"), f"{name} waits"
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("layout", [CHAIN, TREE], ids=["chain", "tree"])
def test_filling_and_viewing_a_frame_never_reads_it_on_the_host(layout):
    frame = begin_frame(header(), ROWS, layout, num_accepted=[1] * 3, num_drafts=[layout.shape.num_drafts] * 3)
    guarded = frame.as_subclass(NoSync)
    with pytest.raises(AssertionError, match="tolist waits"):
        guarded.tolist()
    parts = {name: part.as_subclass(NoSync) for name, part in vars(payload(layout)).items() if part is not None}
    fill_rows(guarded, layout, FramePayload(**{**vars(payload(layout)), **parts}))
    FrameRows.of(guarded, layout, 3)
    check_frame(frame, header(), ROWS, layout)


def test_the_digest_of_an_id_is_the_same_in_every_process():
    """A known value: ``hash`` differs per process and would refuse every frame."""
    assert rid_digest("a") == 1_702_698_405_120_146_464
    assert all(0 <= rid_digest(str(i)) < 2**63 for i in range(100))
