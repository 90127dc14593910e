"""PP x EAGLE through the plugin on GPUs: CUDA graphs, with overlap and without, against plain EAGLE on one GPU.

On one GPU both stages share it (SGLANG_PP_SPEC_COLOCATED). The GPU kernels take no float32, and in bfloat16 another
batch shape may flip a tie between two tokens: replies are compared by share, acceptance within 1 %, and both figures
are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "pp"))
from conftest import CHAIN, TREE
from workloads import WORKLOADS, accept_length, ask_all, rounds

from sglang_pp_spec.core.settings import COLOCATED
from sglang_pp_spec.server import Reply, Server

WORKLOADS_HERE = ("questions", "long_prompts", "staggered", "unequal_mix")
STAGES = 2

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; with two of them the stages talk through NCCL"
)


@pytest.fixture(scope="module", params=["chain", "tree"])
def replies(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, list[Reply]]]]:
    """arm -> workload -> replies, one server after the other."""
    spec = CHAIN if request.param == "chain" else TREE
    colocated = {COLOCATED: "1"} if torch.cuda.device_count() < STAGES else {}
    plugin = replace(spec, pp=STAGES, mode="plugin", extra_env=colocated)
    sync = replace(plugin, extra_args=(*plugin.extra_args, "--disable-overlap-schedule"))
    arms = {"plain": spec, "overlap": plugin, "sync": sync}
    found = {}
    for name, arm in arms.items():
        with Server(arm) as server:
            found[name] = {workload: ask_all(server, WORKLOADS[workload]()) for workload in WORKLOADS_HERE}
    yield found


@pytest.mark.parametrize("workload", WORKLOADS_HERE)
@pytest.mark.parametrize("mode", ["overlap", "sync"])
def test_replies_and_acceptance_equal_plain_speculation_on_one_gpu(replies, mode: str, workload: str) -> None:
    plain, ours = replies["plain"][workload], replies[mode][workload]
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, ours, strict=True))
    print(
        f"{workload}: {same} of {len(plain)} identical; acceptance {accept_length(plain):.4f} plain, "
        f"{accept_length(ours):.4f} plugin; rounds {rounds(plain)} and {rounds(ours)}"
    )
    assert same >= 0.9 * len(plain)
    assert accept_length(ours) == pytest.approx(accept_length(plain), rel=0.01)
