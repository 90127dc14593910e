"""Contract 16, 17, 23: a request's tokens, topology and draft count are one thing, whatever happens to the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pp_spec.core.frame import FrameRows
from sglang_pp_spec.core.identity import RowIdentity
from sglang_pp_spec.core.layout import NUM_ACCEPTED, NUM_DRAFTS, FrameLayout, TreeShape
from sglang_pp_spec.core.tree_rows import TreeRows

CHAIN = TreeShape(3, 1, 4)
TREE = TreeShape(3, 2, 6)
WIDE = TreeShape(3, 2, 7)


def numbers(identity, version, width, part):
    """A block that says whose it is, of which frame, and which part."""
    base = identity.incarnation * 1_000_000 + version * 10_000 + part * 1_000
    return [base + column for column in range(width)]


def row_of(identity, version, shape):
    """The reference: one request's row as a plain value."""
    tree = not shape.is_chain
    return (
        tuple(numbers(identity, version, shape.num_draft_tokens, 1)),
        tuple(numbers(identity, version, shape.num_parents, 2)) if tree else None,
        tuple(numbers(identity, version, shape.num_drafts, 3)) if tree else None,
        shape.num_drafts if version % 3 else 0,
    )


def rows_of(identities, version, shape):
    """``TreeRows`` with the reference's numbers."""
    reference = [row_of(identity, version, shape) for identity in identities]

    def block(part, width):
        return torch.tensor([row[part] for row in reference], dtype=torch.int64).reshape(-1, width)

    return TreeRows(
        shape=shape,
        identities=list(identities),
        tokens=block(0, shape.num_draft_tokens),
        parents=None if shape.is_chain else block(1, shape.num_parents),
        selected=None if shape.is_chain else block(2, shape.num_drafts),
        num_drafts=torch.tensor([row[3] for row in reference], dtype=torch.int64),
    )


def as_model(rows):
    """identity -> row, as plain values; also checks that all parts have as many rows as there are identities."""
    parts = [rows.tokens, rows.num_drafts, *(p for p in (rows.parents, rows.selected) if p is not None)]
    assert {part.shape[0] for part in parts} == {len(rows.identities)}
    parents, selected = rows.parents, rows.selected
    return {
        identity: (
            tuple(rows.tokens[i].tolist()),
            None if parents is None else tuple(parents[i].tolist()),
            None if selected is None else tuple(selected[i].tolist()),
            int(rows.num_drafts[i]),
        )
        for i, identity in enumerate(rows.identities)
    }


def ids(text):
    return [RowIdentity(rid, ord(rid)) for rid in text]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("filter"), st.randoms(use_true_random=False)),
        st.tuples(st.just("merge"), st.integers(1, 3)),
        st.tuples(st.just("fold"), st.randoms(use_true_random=False)),
        st.tuples(st.just("aligned"), st.randoms(use_true_random=False)),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(operations, st.sampled_from([CHAIN, TREE]), st.integers(0, 5))
def test_a_row_is_one_value_under_any_recomposition(todo, shape, start):
    """Against a dict from request to row: filter, merge, fold and aligned only move, replace or drop whole rows."""
    identities = [RowIdentity(str(i), i + 1) for i in range(start)]
    rows, model = rows_of(identities, 1, shape), {i: row_of(i, 1, shape) for i in identities}
    fresh = start
    for version, (what, how) in enumerate(todo, 2):
        if what == "filter":
            keep = [i for i in range(len(rows.identities)) if how.random() < 0.7]
            how.shuffle(keep)
            expected = [rows.identities[i] for i in keep]
            rows.filter(keep, torch.tensor(keep, dtype=torch.int64))
            assert rows.identities == expected
            model = {identity: model[identity] for identity in expected}
        elif what == "merge":
            joining = [RowIdentity(str(fresh + i), fresh + i + 1) for i in range(how)]
            fresh += how
            expected = rows.identities + joining
            rows.merge(rows_of(joining, version, shape))
            assert rows.identities == expected
            model |= {identity: row_of(identity, version, shape) for identity in joining}
        elif what == "fold":
            known = [identity for identity in rows.identities if how.random() < 0.6]
            known += [RowIdentity("gone", 90_000 + version)]
            known += [RowIdentity(i.rid, i.incarnation + 500) for i in rows.identities if how.random() < 0.2]
            how.shuffle(known)
            before = list(rows.identities)
            rows.fold(rows_of(known, version, shape))
            assert rows.identities == before, "folding neither adds nor moves a request"
            model |= {identity: row_of(identity, version, shape) for identity in known if identity in model}
        else:
            order = list(rows.identities)
            how.shuffle(order)
            order = order[: how.randint(0, len(order))]
            view = rows.aligned(order)
            assert view.identities == order and as_model(view) == {i: model[i] for i in order}
        assert as_model(rows) == model


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_folding_the_same_requests_replaces_every_part(shape):
    rows = rows_of(ids("abc"), 1, shape)
    rows.fold(rows_of(ids("abc"), 2, shape))
    assert as_model(rows) == {i: row_of(i, 2, shape) for i in ids("abc")}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_folding_permuted_rows_finds_their_requests(shape):
    rows = rows_of(ids("abc"), 1, shape)
    rows.fold(rows_of(ids("cab"), 2, shape))
    assert rows.identities == ids("abc") and as_model(rows) == {i: row_of(i, 2, shape) for i in ids("abc")}


def test_an_older_incarnation_of_a_request_here_is_not_adopted():
    rows = rows_of(ids("ab"), 2, TREE)
    rows.fold(rows_of([RowIdentity("a", 1), *ids("b")], 4, TREE))
    assert as_model(rows) == {ids("a")[0]: row_of(ids("a")[0], 2, TREE), ids("b")[0]: row_of(ids("b")[0], 4, TREE)}


def test_a_request_without_a_tree_is_named():
    with pytest.raises(KeyError, match=r"no tree for \['x#120'\]; trees here: \['a#97', 'b#98'\]"):
        rows_of(ids("ab"), 1, TREE).aligned(ids("bx"))


def test_the_same_id_in_another_incarnation_has_no_tree():
    with pytest.raises(KeyError, match="a#7"):
        rows_of(ids("ab"), 1, TREE).aligned([RowIdentity("a", 7)])


@pytest.mark.parametrize("other", [CHAIN, WIDE])
def test_rows_of_another_shape_cannot_join(other):
    rows = rows_of(ids("a"), 1, TREE)
    with pytest.raises(ValueError, match="cannot join"):
        rows.merge(rows_of(ids("b"), 1, other))
    assert as_model(rows) == {ids("a")[0]: row_of(ids("a")[0], 1, TREE)}


def filled_frame(shape, num_rows=3):
    layout = FrameLayout(shape, capacity=4)
    frame = torch.arange(5 * layout.width, dtype=torch.int64).reshape(layout.size)
    frame[1:, NUM_ACCEPTED] = torch.tensor([1, 2, 4, 3])
    frame[1:, NUM_DRAFTS] = shape.num_drafts
    return layout, frame, FrameRows.of(frame, layout, num_rows)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_bonus_token_is_the_last_accepted_one(shape):
    layout, frame, rows = filled_frame(shape)
    trees = TreeRows.of_frame(rows, shape, ids("abc"))
    assert trees.tokens[:, 0].tolist() == [
        int(frame[1 + i, layout.tokens.start + n - 1]) for i, n in enumerate([1, 2, 4])
    ]
    assert torch.equal(trees.tokens[:, 1:], frame[1:4, layout.drafts])


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_trees_do_not_change_when_the_frames_buffer_is_used_again(shape):
    """The buffer is overwritten by the slot's next receive, rounds before the tree was verified."""
    _, frame, rows = filled_frame(shape)
    trees = TreeRows.of_frame(rows, shape, ids("abc"))
    before = as_model(trees)
    frame.fill_(-987)
    assert as_model(trees) == before


def test_trees_keep_no_larger_tensor_alive():
    _, _, rows = filled_frame(TREE, num_rows=1)
    trees = TreeRows.of_frame(rows, TREE, ids("a"))
    for part in (trees.tokens, trees.parents, trees.selected, trees.num_drafts):
        assert part.untyped_storage().nbytes() == part.numel() * 8


def test_a_row_that_sampled_nothing_reads_no_token_before_its_first():
    layout, frame, _ = filled_frame(TREE)
    frame[1, NUM_ACCEPTED] = 0
    frame[1, NUM_DRAFTS] = 0
    trees = TreeRows.of_frame(FrameRows.of(frame, layout, 1), TREE, ids("a"))
    assert trees.tokens[0, 0] == frame[1, layout.tokens.start] and trees.num_drafts.tolist() == [0]


def test_the_topology_of_a_chain_is_a_constant():
    parents, selected = rows_of(ids("ab"), 1, CHAIN).topology()
    assert parents.tolist() == [[-1, 0, 1]] * 2 and selected.tolist() == [[0, 1, 2]] * 2


def test_the_topology_of_a_tree_is_the_rows_own():
    rows = rows_of(ids("ab"), 1, TREE)
    parents, selected = rows.topology()
    assert parents is rows.parents and selected is rows.selected
