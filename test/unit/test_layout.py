"""Contract 15: one fixed layout per configuration, and a fingerprint that tells two layouts apart."""

from itertools import pairwise, product

import pytest

from sglang_pp_spec.core.layout import HEADER_FIELDS, NUM_ACCEPTED, NUM_DRAFTS, FrameLayout, TreeShape

CHAINS = [TreeShape(steps, 1, steps + 1) for steps in (1, 2, 3, 7)]
TREES = [TreeShape(steps, topk, tokens) for steps, topk, tokens in product((1, 2, 5), (2, 4), (2, 4, 16))]


@pytest.mark.parametrize("shape", CHAINS + TREES, ids=str)
def test_columns_follow_each_other_without_gap_or_overlap(shape):
    layout = FrameLayout(shape, capacity=8)
    groups = [layout.tokens, layout.drafts, layout.parents, layout.selected, layout.accept_index]
    assert groups[0].start == max(NUM_ACCEPTED, NUM_DRAFTS) + 1
    assert all(a.stop == b.start for a, b in pairwise(groups))
    assert layout.size == (9, max(len(HEADER_FIELDS), groups[-1].stop))


@pytest.mark.parametrize("shape", CHAINS, ids=str)
def test_a_chain_carries_no_topology(shape):
    layout = FrameLayout(shape, capacity=8)
    assert layout.parents.start == layout.parents.stop == layout.accept_index.stop
    assert layout.drafts.stop - layout.drafts.start == shape.num_steps


def test_widths_are_those_of_the_configuration():
    shape = TreeShape(num_steps=3, topk=4, num_draft_tokens=10)
    assert (shape.num_drafts, shape.max_accepted, shape.num_parents) == (9, 4, 9)
    assert TreeShape(1, 4, 3).num_parents == 0, "one step has no parents to list"


def test_every_difference_between_two_layouts_changes_the_fingerprint():
    layouts = [FrameLayout(shape, capacity) for shape in CHAINS + TREES for capacity in (1, 8, 9, 33)]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert all(0 < layout.fingerprint < 2**63 for layout in layouts)


@pytest.mark.parametrize("shape", [(0, 1, 2), (1, 0, 2), (1, 2, 1), (3, 1, 3), (3, 1, 5)])
def test_a_shape_that_no_tree_has_is_refused(shape):
    with pytest.raises(ValueError):
        TreeShape(*shape)
