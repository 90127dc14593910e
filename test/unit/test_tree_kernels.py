"""Tree builder and greedy verifier against second implementations that follow parents one at a time.

The reference here is deliberately of another kind: it draws a tree as explicit nodes with parent
pointers, derives from them the two index tensors a drafter would emit, and reads the expected mask,
depths and links off the pointers. Nothing is shared with the code under test but the data format.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from sglang_pp_spec.cpu_engine.tree import TreeMaskMode, build_tree, verify_tree_greedy

NUM_TREES = 600  # per mask mode, in batches of one to four


@dataclass
class Tree:
    """A random draft tree. Node 0 is the root; node ``i`` has candidate id ``ids[i - 1]``."""

    ids: list[int]  # ascending candidate ids of nodes 1..n-1
    parent: list[int | None]  # parent node of every node, None for the root
    parent_list: list[int]  # what the drafter reports, -1 in column 0
    seq_len: int

    def lineage(self, node: int) -> list[int]:
        """``node`` and its ancestors up to and including the root."""
        above = self.parent[node]
        return [node] if above is None else [node, *self.lineage(above)]


def candidate_slots(step: int, topk: int) -> range:
    """Candidate ids that the drafter scores in ``step`` (1-based)."""
    if step == 1:
        return range(topk)
    first = topk + topk * topk * (step - 2)
    return range(first, first + topk * topk)


def draw_tree(rng: random.Random, topk: int, depth: int, num_nodes: int) -> Tree:
    """Play a drafter: keep ``topk`` beams per step, then pick nodes so that no parent is left out."""
    owner: dict[int, int | None] = {}  # candidate id -> candidate id of its parent, None = root
    parent_list = [] if depth == 1 else [-1]
    beams: list[int | None] = [None]
    for step in range(1, depth + 1):
        slots = candidate_slots(step, topk)
        for offset, candidate in enumerate(slots):
            owner[candidate] = beams[offset // topk]
        kept = list(slots) if step == 1 else rng.sample(list(slots), topk)
        if step < depth:
            parent_list += kept
        beams = kept
    picked: set[int] = set()
    while len(picked) < num_nodes - 1:
        open_ids = [c for c, above in owner.items() if c not in picked and (above is None or above in picked)]
        picked.add(rng.choice(open_ids))
    ids = sorted(picked)
    node_of = {candidate: i + 1 for i, candidate in enumerate(ids)}
    parent = [None, *(0 if owner[c] is None else node_of[owner[c]] for c in ids)]
    return Tree(ids, parent, parent_list, rng.randint(0, 9))


def draw_shape(rng: random.Random) -> tuple[int, int, int]:
    """topk, depth, num_nodes, with no more nodes than the drafter scores."""
    topk, depth = rng.randint(1, 4), rng.randint(1, 6)
    scored = topk + (depth - 1) * topk * topk
    return topk, depth, rng.randint(2, min(32, scored + 1))


@dataclass
class Built:
    """Buffers as the host allocates them, after a build."""

    mask: torch.Tensor
    positions: torch.Tensor
    index: torch.Tensor
    child: torch.Tensor
    sibling: torch.Tensor


def build(trees: list[Tree], topk: int, depth: int, mode: TreeMaskMode) -> Built:
    batch_size, n = len(trees), len(trees[0].parent)
    seq_lens = torch.tensor([tree.seq_len for tree in trees])
    links = torch.full((3, batch_size, n), -1)
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        word = torch.uint8 if n <= 8 else torch.uint16 if n <= 16 else torch.uint32
        mask = torch.zeros(batch_size * n, dtype=word)
    else:
        cells = batch_size * n * n + (int(seq_lens.sum()) * n if mode == TreeMaskMode.FULL_MASK else 0)
        mask = torch.full((cells,), True)
    built = Built(mask, torch.empty(batch_size * n, dtype=torch.int64), *links)
    build_tree(
        torch.tensor([tree.parent_list for tree in trees], dtype=torch.int64).view(batch_size, -1),
        torch.tensor([tree.ids for tree in trees]),
        seq_lens,
        built.mask,
        built.positions,
        built.index,
        built.child,
        built.sibling,
        topk,
        depth,
        n,
        int(mode),
    )
    return built


def read_mask(built: Built, trees: list[Tree], mode: TreeMaskMode) -> list[list[set[int]]]:
    """Per tree and node, the set of nodes it sees, decoded cell by cell; prefix cells must be True."""
    n, seen, cursor = len(trees[0].parent), [], 0
    cells = built.mask.tolist()
    for tree in trees:
        rows = []
        for _ in range(n):
            if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
                word, cursor = cells[cursor], cursor + 1
                rows.append({bit for bit in range(32) if word >> bit & 1})
                continue
            prefix = tree.seq_len if mode == TreeMaskMode.FULL_MASK else 0
            assert all(cells[cursor : cursor + prefix]), "a prefix cell was cleared"
            cursor += prefix
            rows.append({node for node in range(n) if cells[cursor + node]})
            cursor += n
        seen.append(rows)
    assert cursor == len(cells)
    return seen


def batches(seed: int):
    rng = random.Random(seed)
    drawn = 0
    while drawn < NUM_TREES:
        topk, depth, n = draw_shape(rng)
        trees = [draw_tree(rng, topk, depth, n) for _ in range(rng.randint(1, 4))]
        drawn += len(trees)
        yield rng, trees, topk, depth, n


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_every_node_sees_exactly_its_ancestors_and_sits_at_its_depth(mode):
    for _, trees, topk, depth, n in batches(seed=1):
        built = build(trees, topk, depth, mode)
        assert read_mask(built, trees, mode) == [[set(t.lineage(i)) for i in range(n)] for t in trees]
        expected = [t.seq_len + len(t.lineage(i)) - 1 for t in trees for i in range(n)]
        assert built.positions.tolist() == expected


def test_links_list_the_children_of_every_node_in_ascending_order():
    for _, trees, topk, depth, n in batches(seed=2):
        built = build(trees, topk, depth, TreeMaskMode.QLEN_ONLY)
        assert built.index.flatten().tolist() == list(range(len(trees) * n))
        for tree, child, sibling in zip(trees, built.child.tolist(), built.sibling.tolist(), strict=True):
            for node in range(n):
                chain, cursor = [], child[node]
                while cursor != -1:
                    chain.append(cursor)
                    cursor = sibling[cursor]
                assert chain == [i for i in range(n) if tree.parent[i] == node]
            assert sibling[0] == -1


def test_a_mask_buffer_longer_than_the_batch_is_left_alone_behind_it():
    tree = draw_tree(random.Random(3), topk=2, depth=3, num_nodes=6)
    mask = torch.full((100,), True)
    links = torch.full((3, 1, 6), -1)
    build_tree(
        torch.tensor([tree.parent_list]), torch.tensor([tree.ids]), torch.tensor([tree.seq_len]), mask,
        torch.empty(6, dtype=torch.int64), *links, 2, 3, 6, TreeMaskMode.QLEN_ONLY,
    )  # fmt: skip
    assert not mask[:36].all() and mask[36:].all()


def test_an_orphan_is_neither_linked_nor_makes_others_visible():
    """NaN scores can pick a node without its parent; the GPU kernels leave such a node unlinked."""
    links = torch.full((3, 1, 3), -1)
    mask, positions = torch.ones(9, dtype=torch.bool), torch.empty(3, dtype=torch.int64)
    build_tree(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2]]), torch.tensor([5]), mask, positions, *links,
        2, 2, 3, TreeMaskMode.QLEN_ONLY,
    )  # fmt: skip
    assert links[1].tolist() == [[1, -1, -1]] and links[2].tolist() == [[-1, -1, -1]]
    assert mask.view(3, 3).tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert positions.tolist() == [5, 6, 6]


def test_a_packed_mask_refuses_more_than_32_nodes():
    with pytest.raises(ValueError, match="32"):
        build_tree(
            torch.arange(-1, 35).view(1, -1), torch.arange(35).view(1, -1), torch.tensor([0]),
            torch.zeros(36, dtype=torch.uint32), torch.empty(36, dtype=torch.int64),
            *torch.full((3, 1, 36), -1), 1, 36, 36, TreeMaskMode.QLEN_ONLY_BITPACKING,
        )  # fmt: skip


def expected_path(tree: Tree, tokens: list[int], targets: list[int], max_path: int) -> list[int]:
    """Nodes accepted: repeatedly the first child, by node number, that carries the target's token."""
    path = [0]
    while len(path) < max_path:
        fitting = [i for i, above in enumerate(tree.parent) if above == path[-1] and tokens[i] == targets[path[-1]]]
        if not fitting:
            break
        path.append(fitting[0])
    return path


def test_verify_follows_the_target_to_the_deepest_matching_node():
    """Tokens come from an alphabet of three, so siblings often share a token and matches are common."""
    lengths = set()
    for rng, trees, topk, depth, n in batches(seed=4):
        built = build(trees, topk, depth, TreeMaskMode.QLEN_ONLY)
        tokens = torch.tensor([[rng.randint(0, 2) for _ in range(n)] for _ in trees])
        targets = torch.tensor([[rng.randint(0, 2) for _ in range(n)] for _ in trees])
        max_path = rng.randint(1, depth + 1)
        predicts = torch.full((len(trees) * n,), -7, dtype=torch.int32)
        accept_index = torch.full((len(trees), max_path), -1, dtype=torch.int32)
        accept_num = torch.full((len(trees),), -7, dtype=torch.int32)
        verify_tree_greedy(
            predicts=predicts, accept_index=accept_index, accept_token_num=accept_num, candidates=tokens,
            retrive_index=built.index, retrive_next_token=built.child, retrive_next_sibling=built.sibling,
            target_predict=targets,
        )  # fmt: skip
        want = torch.full_like(predicts, -7)
        for row, tree in enumerate(trees):
            path = expected_path(tree, tokens[row].tolist(), targets[row].tolist(), max_path)
            flat = [row * n + node for node in path]
            assert accept_index[row].tolist() == flat + [-1] * (max_path - len(path))
            assert accept_num[row] == len(path) - 1
            for node in path:
                want[row * n + node] = targets[row, node]
            lengths.add(len(path))
        assert torch.equal(predicts, want)
    assert lengths >= {1, 2, 3, 4}, "the random trees never accepted a long path: the test shows little"


def test_an_empty_batch_is_accepted():
    build_tree(
        torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool),
        torch.empty(0, dtype=torch.int64), *torch.empty(3, 0, 4, dtype=torch.int64), 2, 1, 4, 1,
    )  # fmt: skip
    empty = torch.empty(0, 4, dtype=torch.int64)
    predicts = torch.empty(0, dtype=torch.int32)
    accept_index = torch.empty(0, 2, dtype=torch.int32)
    verify_tree_greedy(predicts, accept_index, predicts, empty, empty, empty, empty, empty)
