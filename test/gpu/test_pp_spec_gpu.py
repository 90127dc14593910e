"""PP x EAGLE and EAGLE3 through the plugin on GPUs: CUDA graphs, with overlap and without, against one GPU.

Stages that have no GPU of their own all share the first one (SGLANG_PP_SPEC_COLOCATED); three and four stages show
slot errors that two cannot. The GPU kernels take no float32, and in bfloat16 another batch shape may flip a tie
between two tokens: every reply that differs is judged by the target's own margin there, and where that is more than a
tie, by whether rounding the target's layers at random chooses both tokens (``benchmark.rounding``). Acceptance is
compared over the replies that are the same. All figures are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "pp"))
from conftest import CHAIN, EAGLE3, EAGLE3_TREE, TREE, on_gpus, poisoned, without_overlap
from wide_heads import widened
from workloads import WORKLOADS, accept_length, ask_all, rounds

from benchmark.rounding import RoundedTarget, unexplained
from benchmark.ties import Difference, differences
from sglang_pp_spec.server import Reply, Server, started_together

MOST_UNSETTLED = 3  # replies that part by more than a tie; five of the prompts are few-shot, two parted in any run
WORKLOADS_HERE = ("questions", "long_prompts", "staggered", "unequal_mix")
#: Plans from lengths on the host, so frames are read first; SGLang's default on most GPUs. Wants wide heads.
FLASHINFER = "flashinfer"
PLUGIN_CHAIN, PLUGIN_TREE = replace(CHAIN, mode="plugin"), replace(TREE, mode="plugin")
CASES = {
    "chain": replace(PLUGIN_CHAIN, pp=2),
    "tree": replace(PLUGIN_TREE, pp=2),
    "chain_pp4": replace(PLUGIN_CHAIN, pp=4),
    "tree_pp3_poisoned": poisoned(replace(PLUGIN_TREE, pp=3)),
    "chain_flashinfer": replace(
        PLUGIN_CHAIN, pp=2, extra_args=(*PLUGIN_CHAIN.extra_args, "--attention-backend", FLASHINFER)
    ),
    "eagle3_chain": replace(EAGLE3, mode="plugin", pp=2),
    "eagle3_tree_pp3": replace(EAGLE3_TREE, mode="plugin", pp=3),
}

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; with one for every stage they talk through NCCL"
)


@dataclass(frozen=True)
class Compared:
    """Both modes' replies to all workloads, in one row, beside plain EAGLE's."""

    plain: list[Reply]
    ours: dict[str, list[Reply]]
    differences: dict[str, list[Difference]]
    faults: dict[str, list[Difference]]  # those that rounding does not explain


@pytest.fixture(scope="module", params=CASES)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    """Two servers with the plugin and a plain one, which judges."""
    overlap = on_gpus(CASES[request.param])
    if FLASHINFER in overlap.extra_args:
        folder = tmp_path_factory.mktemp("wide")
        target, draft = (str(widened(Path(of), folder / Path(of).name)) for of in (overlap.model, overlap.draft))
        overlap = replace(overlap, model=target, draft=draft)
    sync = without_overlap(overlap)
    plain = replace(overlap, mode="plain", pp=1, extra_env={})
    asked = [(name, ask) for name in WORKLOADS_HERE for ask in WORKLOADS[name]()]
    prompts = [list(ask.prompt.encode()) for _, ask in asked]  # the tiny model's tokens are bytes
    servers = {mode: Server(spec) for mode, spec in (("overlap", overlap), ("sync", sync), ("plain", plain))}
    with started_together(*servers.values()):
        expected_log = "overlap of accounting alone" if FLASHINFER in overlap.extra_args else "overlap on"
        assert expected_log in servers["overlap"].log() and "overlap off" in servers["sync"].log()
        ours = {mode: all_replies(server) for mode, server in servers.items()}
        expected = ours.pop("plain")
        found = {mode: differences(servers["plain"], prompts, expected, replies) for mode, replies in ours.items()}
    target = RoundedTarget()  # of wide heads, too: but for the rounding of their queries they compute the same
    faults = {mode: unexplained(ones, prompts, expected, target) for mode, ones in found.items()}
    yield Compared(expected, ours, found, faults)


def all_replies(server: Server) -> list[Reply]:
    """The replies to every workload, one workload after the other."""
    return [reply for name in WORKLOADS_HERE for reply in ask_all(server, WORKLOADS[name]())]


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_a_reply_equals_plain_speculation_s_on_one_gpu_or_parts_from_it_by_rounding(compared, mode: str) -> None:
    found = compared.differences[mode]
    print(f"{mode}: {len(compared.plain) - len(found)} of {len(compared.plain)} replies identical; {found}")
    assert not compared.faults[mode]
    assert sum(not difference.is_tie() for difference in found) <= MOST_UNSETTLED
    assert len(found) <= 0.15 * len(compared.plain)


@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_identical_replies_take_as_many_rounds(compared, mode: str) -> None:
    different = {difference.request for difference in compared.differences[mode]}
    plain, ours = (
        [reply for i, reply in enumerate(replies) if i not in different]
        for replies in (compared.plain, compared.ours[mode])
    )
    print(
        f"{mode}: acceptance {accept_length(plain):.4f} plain, {accept_length(ours):.4f} plugin; "
        f"rounds {rounds(plain)} and {rounds(ours)}"
    )
    assert rounds(plain) > 500
    assert accept_length(ours) == pytest.approx(accept_length(plain), rel=0.01)
