"""Draft trees on the CPU: build one from the drafter's picks, and verify one greedily.

These two functions decide whether every pipeline stage verifies the same tree, so they must agree
with the kernels a GPU server runs. What they compute, in this project's words:

Candidates.  A drafter that keeps ``topk`` beams for ``depth`` steps scores ``topk`` candidates in
step 1 and ``topk * topk`` in each later step; candidate ids count them through in that order. The
best ``n - 1`` ids, ascending, become nodes ``1 .. n - 1``; node 0 is the last committed token.

Parents.  ``id // topk`` is 0 for a step-1 candidate, which hangs on the root. Otherwise it is a
column of ``parent_list``, and the entry there is the candidate id of the parent.

Links.  ``next_token[p]`` is the first child of ``p``; ``next_sibling[c]`` the next child of the same
parent; -1 ends a list. Children are linked in ascending node order.

Both functions write into buffers the caller allocated; nothing here depends on SGLang.
"""

from enum import IntEnum

import torch

NO_NODE = -1


class TreeMaskMode(IntEnum):
    """How the visibility matrix is laid out in the caller's flat buffer."""

    FULL_MASK = 0  # per request [n, seq_len + n], rows of different requests differ in length
    QLEN_ONLY = 1  # [bs, n, n]: only the tree part; the committed prefix is visible to every node
    QLEN_ONLY_BITPACKING = 2  # [bs, n] words of 1, 2 or 4 bytes: bit j of word i = "i sees j"


def build_tree(
    parent_list: torch.Tensor,  # [bs, topk * (depth - 1) + 1] int64, or [bs, 0] when depth is 1
    selected_index: torch.Tensor,  # [bs, n - 1] int64 candidate ids, ascending
    verified_seq_len: torch.Tensor,  # [bs] committed tokens before the tree
    tree_mask: torch.Tensor,  # flat, out: see TreeMaskMode; prefix cells of FULL_MASK stay untouched
    positions: torch.Tensor,  # [bs * n] int64, out: seq_len + distance from the root
    retrieve_index: torch.Tensor,  # [bs, n] int64, out: position of the node in the flattened batch
    retrieve_next_token: torch.Tensor,  # [bs, n] int64, out: first child or -1
    retrieve_next_sibling: torch.Tensor,  # [bs, n] int64, out: next sibling or -1
    topk: int,
    depth: int,
    draft_token_num: int,  # n, the root included
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of ``bs`` draft trees from the drafter's picks."""
    batch_size = verified_seq_len.shape[0]
    if batch_size == 0:
        return
    parents = parent_nodes(parent_list, selected_index, topk)
    visible, node_depth = ancestors(parents, depth)

    positions.view(batch_size, draft_token_num).copy_(verified_seq_len[:, None] + node_depth)
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num))
    retrieve_next_token.copy_(first_children(parents))
    retrieve_next_sibling.copy_(next_siblings(parents))
    write_mask(tree_mask, visible, verified_seq_len, TreeMaskMode(tree_mask_mode))


def parent_nodes(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """Parent node of every node, ``[bs, n]`` int64; -1 for the root and for an orphan.

    An orphan is a node whose parent was not picked; it happens only when scores are NaN. The GPU
    kernels leave it unlinked, and so does this.
    """
    batch_size = selected_index.shape[0]
    column = selected_index // topk
    parent = torch.zeros_like(column)
    if parent_list.shape[1] > 0 and column.shape[1] > 0:
        wanted = parent_list.gather(1, column)
        same = selected_index[:, None, :] == wanted[:, :, None]  # [bs, child, candidate]
        picked = torch.where(same.any(-1), same.int().argmax(-1) + 1, NO_NODE)
        parent = torch.where(column == 0, 0, picked)
    root = torch.full((batch_size, 1), NO_NODE, dtype=parent.dtype)
    return torch.cat((root, parent), dim=1)


def ancestors(parents: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Who sees whom, ``[bs, n, n]`` bool, and the distance from the root, ``[bs, n]`` int64.

    A node sees itself, its ancestors and the root. The walk goes up at most ``depth`` links.
    """
    batch_size, num_nodes = parents.shape
    visible = torch.zeros(batch_size, num_nodes, num_nodes, dtype=torch.bool)
    visible[:, :, 0] = True
    node = torch.arange(num_nodes).expand(batch_size, num_nodes)
    node_depth = torch.zeros_like(parents)
    for _ in range(depth):
        below_root = node > 0
        node = node.clamp(min=0)  # finished walks mark the root once more, which changes nothing
        visible.scatter_(2, node[:, :, None], True)
        node_depth += below_root
        node = parents.gather(1, node)
    return visible, node_depth


def first_children(parents: torch.Tensor) -> torch.Tensor:
    """Smallest child of every node, -1 for a leaf. ``[bs, n]`` int64."""
    num_nodes = parents.shape[1]
    is_child = parents[:, None, :] == torch.arange(num_nodes)[:, None]  # [bs, parent, child]
    return _first_true(is_child)


def next_siblings(parents: torch.Tensor) -> torch.Tensor:
    """Next larger child of the same parent, -1 for the last one. ``[bs, n]`` int64."""
    num_nodes = parents.shape[1]
    later = torch.ones(num_nodes, num_nodes, dtype=torch.bool).triu(1)
    linked = (parents >= 0)[:, :, None]
    return _first_true((parents[:, :, None] == parents[:, None, :]) & later & linked)


def _first_true(rows: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.any(-1), rows.int().argmax(-1), NO_NODE)


def write_mask(tree_mask: torch.Tensor, visible: torch.Tensor, seq_lens: torch.Tensor, mode: TreeMaskMode) -> None:
    """Store ``visible`` [bs, n, n] in the layout of ``mode``; the buffer may be longer than needed."""
    if mode == TreeMaskMode.QLEN_ONLY:
        tree_mask[: visible.numel()].copy_(visible.flatten())
    elif mode == TreeMaskMode.FULL_MASK:
        _write_full_mask(tree_mask, visible, seq_lens.tolist())
    else:
        packed = _pack_bits(visible)
        tree_mask.view(torch.uint8)[: packed.numel()].copy_(packed)


def _write_full_mask(tree_mask: torch.Tensor, visible: torch.Tensor, seq_lens: list[int]) -> None:
    num_nodes = visible.shape[1]
    start = 0
    for row, seq_len in zip(visible, seq_lens, strict=True):
        end = start + num_nodes * (seq_len + num_nodes)
        tree_mask[start:end].view(num_nodes, seq_len + num_nodes)[:, seq_len:] = row
        start = end


def _pack_bits(visible: torch.Tensor) -> torch.Tensor:
    """Little-endian words, returned as bytes. ``[bs * n * word_bytes]`` uint8."""
    batch_size, num_nodes, _ = visible.shape
    if num_nodes > 32:
        raise ValueError(f"a packed tree mask holds at most 32 nodes, got {num_nodes}")
    word_bytes = 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4
    bits = torch.zeros(batch_size, num_nodes, word_bytes * 8, dtype=torch.int64)
    bits[:, :, :num_nodes] = visible
    weights = 1 << torch.arange(8)
    return (bits.view(batch_size, num_nodes, word_bytes, 8) * weights).sum(-1).to(torch.uint8).flatten()


def verify_tree_greedy(
    predicts: torch.Tensor,  # [bs * n] int32, out: the target's token at every accepted node
    accept_index: torch.Tensor,  # [bs, max_path] int32, out: accepted nodes from the root, rest kept at -1
    accept_token_num: torch.Tensor,  # [bs] int32, out: accepted drafts, the bonus token not counted
    candidates: torch.Tensor,  # [bs, n] int64 drafted tokens, column 0 = last committed token
    retrive_index: torch.Tensor,  # [bs, n] int64; these three names are the host's keyword arguments
    retrive_next_token: torch.Tensor,  # [bs, n] int64
    retrive_next_sibling: torch.Tensor,  # [bs, n] int64
    target_predict: torch.Tensor,  # [bs, n] int64, the target's argmax after every node
) -> None:
    """Follow the target's argmax through each tree until no child carries it.

    ``predicts`` is written at the flat index of each accepted node, the last one included: its token
    is the bonus token. Cells of nodes that were not accepted keep what the caller put there.
    """
    tokens, targets = candidates.tolist(), target_predict.flatten().tolist()
    flat, child, sibling = retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist()
    max_path = accept_index.shape[1]
    accepted: list[int] = []
    for row in range(candidates.shape[0]):
        path = _greedy_path(tokens[row], targets, flat[row], child[row], sibling[row], max_path)
        accept_index[row, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        accepted += path
    index = torch.tensor(accepted, dtype=torch.int64)
    predicts[index] = target_predict.flatten()[index].to(predicts.dtype)


def _greedy_path(
    tokens: list[int], targets: list[int], flat: list[int], child: list[int], sibling: list[int], limit: int
) -> list[int]:
    """Flat indices of the accepted nodes of one tree, root first, at most ``limit`` of them."""
    node, path = 0, [flat[0]]
    while len(path) < limit:
        wanted = targets[path[-1]]
        node = child[node]
        while node != NO_NODE and tokens[node] != wanted:
            node = sibling[node]
        if node == NO_NODE:
            break
        path.append(flat[node])
    return path
