"""What an earlier stage keeps of a verified round: recurrent states and a tree's KV, of the rows still owned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.core.frame import FrameRows
from sglang_pp_spec.core.layout import FrameLayout, TreeShape
from sglang_pp_spec.host import commit, turn

CHAIN, TREE = TreeShape(2, 1, 3), TreeShape(2, 2, 4)
PATHS = {CHAIN: [[0, 1, -1], [0, -1, -1], [0, 1, 2]], TREE: [[0, 2, -1], [0, -1, -1], [0, 1, 3]]}
COUNTS = [2, 1, 3]


class Snapshot(SimpleNamespace):
    """A copy loses the cache, as SGLang's does."""

    def copy(self) -> Snapshot:
        return Snapshot(**vars(self) | {"tree_cache": None})


@pytest.fixture
def commits(monkeypatch):
    """Calls of SGLang's two functions: (name, rows, node numbers, counts), for states also where checkpoints go."""
    seen = []

    def states(worker, batch, accept_lens, accept_index, num_draft_tokens):
        assert worker == "the worker" and accept_lens.dtype == accept_index.dtype == torch.int32
        assert batch.tree_cache == "the cache"
        checkpoints = None if batch.mamba_track_indices is None else batch.mamba_track_indices.tolist()
        rows = batch.req_pool_indices.tolist()
        seen.append(
            ("states", rows, accept_index.tolist(), accept_lens.tolist(), batch.seq_lens.tolist(), checkpoints)
        )

    def kv(batch, accept_index, num_correct_drafts, allocator):
        seen.append(("kv", batch.out_cache_loc.tolist(), accept_index.tolist(), num_correct_drafts.tolist()))

    monkeypatch.setattr(commit, "commit_mamba_states_after_verify", states)
    monkeypatch.setattr(commit, "move_accept_tokens_to_target_kvcache", kv)
    return seen


def committed(monkeypatch, shape, owned, *, recurrent, last_stage=False, checkpoints=None):
    """Adopt a frame of three rows at one stage."""
    monkeypatch.setattr(commit, "mambaish_config", lambda config: "a config" if recurrent else None)
    slots = torch.arange(3 * shape.num_draft_tokens) + 100
    record = SimpleNamespace(
        reqs=["a", "b", "c"],
        seq_lens=torch.tensor([10, 20, 30]),
        snapshot=Snapshot(
            req_pool_indices=torch.tensor([7, 5, 6]), tree_cache="the cache", mamba_track_indices=checkpoints
        ),
        result=SimpleNamespace(spec_verify_out_cache_loc=slots),
    )
    monkeypatch.setattr(commit, "record_of", lambda turn: record)
    scheduler = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=last_stage),
        model_config=None,
        tp_worker="the worker",
        token_to_kv_pool_allocator=None,
    )
    paths = torch.tensor(PATHS[shape])
    rows = SimpleNamespace(num_accepted=torch.tensor(COUNTS), accept_index=None if shape.is_chain else paths)
    assert {"num_accepted", "accept_index"} <= set(FrameRows.__annotations__)
    commit.SchedulerState(scheduler, FrameLayout(shape, capacity=4)).commit_cache(SimpleNamespace(), rows, owned)


def test_a_chain_with_recurrent_states_takes_the_first_nodes_numbered_through_the_batch(monkeypatch, commits):
    committed(monkeypatch, CHAIN, [0, 1, 2], recurrent=True)
    assert commits == [("states", [7, 5, 6], [[0, 1, -1], [3, -1, -1], [6, 7, 8]], COUNTS, [10, 20, 30], None)]


def test_a_tree_takes_its_path_for_states_and_kv(monkeypatch, commits):
    committed(monkeypatch, TREE, [0, 1, 2], recurrent=True, checkpoints=torch.tensor([40, 41, 42]))
    nodes = [[0, 2, -1], [4, -1, -1], [8, 9, 11]]
    assert commits == [
        ("states", [7, 5, 6], nodes, COUNTS, [10, 20, 30], [40, 41, 42]),
        ("kv", list(range(100, 112)), nodes, [1, 0, 2]),
    ]


def test_the_state_of_a_request_that_has_ended_is_left_alone(monkeypatch, commits):
    """Its row of the pool may be another request's by then, whose prompt has just been computed into it."""
    committed(monkeypatch, TREE, [0, 2], recurrent=True, checkpoints=torch.tensor([40, 41, 42]))
    nodes = [[0, 2, -1], [4, 5, 7]]
    assert commits == [
        ("states", [7, 6], nodes, [2, 3], [10, 30], [40, 42]),
        ("kv", [100, 101, 102, 103, 108, 109, 110, 111], nodes, [1, 2]),
    ]


@pytest.mark.parametrize(
    ("shape", "owned", "options", "expected"),
    [
        (CHAIN, [0, 1, 2], {"recurrent": False}, []),
        (TREE, [0, 1, 2], {"recurrent": False}, ["kv"]),
        (TREE, [], {"recurrent": True}, []),
        (TREE, [0, 1, 2], {"recurrent": True, "last_stage": True}, []),
    ],
    ids=["a chain without states", "a tree without states", "nobody is left", "the last stage did it in verify"],
)
def test_nothing_is_taken_that_is_not_there_or_was_taken(monkeypatch, commits, shape, owned, options, expected):
    committed(monkeypatch, shape, owned, **options)
    assert [name for name, *_ in commits] == expected


def test_where_a_checkpoint_went_stays_with_its_request_when_others_have_ended() -> None:
    """SGLang notes it by the row of the result, and took another request's."""
    snapshot = Snapshot(
        reqs=["a", "b", "c"],
        req_pool_indices_cpu=torch.tensor([7, 5, 6]),
        mamba_track_buffer_indices=[0, 1, 0],
        mamba_lazy_spec_track_positions_cpu=None,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
    )
    smaller = commit.narrowed(snapshot, [1, 2])
    assert smaller.mamba_track_buffer_indices == [1, 0] and smaller.mamba_lazy_spec_track_positions_cpu is None


@pytest.mark.parametrize("decodes", [True, False])
def test_a_round_remembers_where_its_checkpoints_go_and_a_prefill_keeps_its_own_note(monkeypatch, decodes) -> None:
    """Isolation undoes what the forward noted, and the built-in's earlier stages wrote no checkpoint."""
    noted = []
    monkeypatch.setattr(turn, "prepare_mamba_track_for_verify", noted.append)
    batch = Snapshot(
        req_pool_indices=torch.tensor([1]),
        tree_cache="the cache",
        forward_mode=SimpleNamespace(is_decode=lambda: decodes),
    )
    record = turn.ForwardRecord([], [], None, None, batch, None, None)
    record.after(batch, "the result", "the event")
    assert noted == ([record.snapshot] if decodes else []) and record.snapshot.tree_cache == "the cache"
