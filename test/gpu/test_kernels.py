"""SGLang's CUDA tree kernels against the CPU reference, bit by bit: it decides what every stage verifies.

The reference is the one the CPU engine runs; ``test/unit/test_tree_kernels.py`` holds it against a naive second one.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from test_tree_kernels import TreeMaskMode, build, draw_shape, draw_tree

from sglang_pp_spec.cpu_engine.tree import verify_tree_greedy

NUM_TREES = 10_000
PER_BATCH = 40

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random_batches(seed: int):
    """(rng, trees, topk, depth, nodes): topk 1..4, depth 1..6, 2..32 nodes; a chain has depth + 1 nodes."""
    rng = random.Random(seed)
    for _ in range(NUM_TREES // PER_BATCH):
        topk, depth, num_nodes = draw_shape(rng)
        if topk == 1:
            num_nodes = depth + 1
        yield rng, [draw_tree(rng, topk, depth, num_nodes) for _ in range(PER_BATCH)], topk, depth, num_nodes


@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY])
def test_10000_trees_are_built_alike(mode: TreeMaskMode) -> None:
    from sglang.srt.speculative import eagle_utils

    host_mode = eagle_utils.TreeMaskMode(int(mode))
    compared = 0
    for _, trees, topk, depth, num_nodes in random_batches(seed=11):
        expected = build(trees, topk, depth, mode)
        mask, positions, index, child, sibling, _ = eagle_utils.build_tree_kernel_efficient(
            torch.zeros(len(trees), dtype=torch.int64, device="cuda"),
            torch.tensor([tree.parent_list for tree in trees], dtype=torch.int64, device="cuda").view(len(trees), -1),
            torch.tensor([tree.ids for tree in trees], dtype=torch.int64, device="cuda"),
            torch.zeros(len(trees), num_nodes - 1, dtype=torch.int64, device="cuda"),
            torch.tensor([tree.seq_len for tree in trees], dtype=torch.int64, device="cuda"),
            sum(tree.seq_len for tree in trees),
            topk,
            depth,
            num_nodes,
            host_mode,
        )
        for name, got, want in (
            ("mask", mask, expected.mask),
            ("positions", positions, expected.positions),
            ("index", index, expected.index),
            ("child", child, expected.child),
            ("sibling", sibling, expected.sibling),
        ):
            assert torch.equal(got.cpu(), want), (
                f"{name} of a tree with topk {topk}, depth {depth}, {num_nodes} nodes"
            )
        compared += len(trees)
    assert compared == NUM_TREES


def test_10000_trees_are_verified_alike() -> None:
    """Tokens from an alphabet of three: siblings share tokens, and long paths are accepted."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    longest = 0
    for rng, trees, topk, depth, num_nodes in random_batches(seed=12):
        built = build(trees, topk, depth, TreeMaskMode.QLEN_ONLY)
        tokens = torch.tensor([[rng.randint(0, 2) for _ in range(num_nodes)] for _ in trees])
        targets = torch.tensor([[rng.randint(0, 2) for _ in range(num_nodes)] for _ in trees])
        outputs = {
            "predicts": torch.full((len(trees) * num_nodes,), -7, dtype=torch.int32),
            "accept_index": torch.full((len(trees), depth + 1), -1, dtype=torch.int32),
            "accept_token_num": torch.full((len(trees),), -7, dtype=torch.int32),
        }
        on_gpu = {name: tensor.cuda() for name, tensor in outputs.items()}
        verify_tree_greedy(
            **outputs, candidates=tokens, retrive_index=built.index, retrive_next_token=built.child,
            retrive_next_sibling=built.sibling, target_predict=targets,
        )  # fmt: skip
        verify_tree_greedy_func(
            **on_gpu, candidates=tokens.cuda(), retrieve_index=built.index.cuda(),
            retrieve_next_token=built.child.cuda(), retrieve_next_sibling=built.sibling.cuda(),
            target_predict=targets.cuda(), topk=topk,
        )  # fmt: skip
        for name, want in outputs.items():
            assert torch.equal(on_gpu[name].cpu(), want), f"{name}, topk {topk}, depth {depth}, {num_nodes} nodes"
        longest = max(longest, int(outputs["accept_token_num"].max()))
    assert longest >= 3
