"""Prompts of several chunks beside rounds of others, again and again, over four stages.

Their hidden states travel on different streams. Where stages share a GPU one message could overtake another
(`docs/LOG.md`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "pp"))
from conftest import CHAIN, on_gpus
from workloads import Ask, ask_all, few_shot

from benchmark.rounding import RoundedTarget, unexplained
from benchmark.ties import Difference, differences
from sglang_pp_spec.server import Server, started_together

LOOPS = 30

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_chunked_prompt_beside_decoding_ones_replies_as_plain_speculation_or_parts_from_it_by_rounding() -> None:
    asks = [Ask(few_shot(5, seed=seed), max_new_tokens=32, ignore_eos=True) for seed in range(8)]
    prompts = [list(ask.prompt.encode()) for ask in asks]
    ours, plain = Server(on_gpus(replace(CHAIN, pp=4, mode="plugin"))), Server(CHAIN)
    with started_together(ours, plain):
        expected = ask_all(plain, asks)
        parted, identical = dict[tuple[int, int, int | None], Difference](), 0
        for loop in range(LOOPS):
            ours.flush_cache(timeout_s=20)  # or the prompts would come from the cache
            replies = ask_all(ours, [replace(ask, after_s=0.01 * i) for i, ask in enumerate(asks)])
            found = differences(plain, prompts, expected, replies)
            identical += len(asks) - len(found)
            for one in found:  # of one way to part, what the judge thought worst
                way = one.request, one.position, one.token
                parted[way] = max(one, parted.get(way, one), key=lambda d: abs(d.margin or 0.0))
            print(f"loop {loop}: {len(found)} of {len(asks)} differ, in {len(parted)} ways so far", flush=True)
    print(list(parted.values()))
    assert not unexplained(parted.values(), prompts, expected, RoundedTarget())
    assert identical > 0.5 * LOOPS * len(asks)
