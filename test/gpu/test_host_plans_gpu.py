"""Two slots' verifies planned into one flashinfer wrapper while the device is held up, as SGLang's graphs have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

WIDTH = 4  # queries per row: the tokens of a round
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 128
MAX_LEN = 8192
LONG, SHORT = (6000, 4100), (40, 30)  # rows' lengths in two slots, with the round's tokens
HELD_UP_CYCLES = 200_000_000  # some 0.1 s

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Slot:
    """A slot's verify: what its plan and its attention are given, on the device before anything is held up."""

    def __init__(self, lens: tuple[int, ...], seed: int) -> None:
        ends = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.q = torch.randn(
            len(lens) * WIDTH, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator
        )
        causal = [torch.ones(WIDTH, length, dtype=torch.bool).tril(length - WIDTH).flatten() for length in lens]
        qo_indptr = torch.arange(len(lens) + 1, dtype=torch.int32) * WIDTH
        self.args = (
            qo_indptr.cuda(),
            ends.cuda(),
            torch.arange(sum(lens), dtype=torch.int32, device="cuda"),
            torch.ones(len(lens), dtype=torch.int32, device="cuda"),
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            1,
        )
        self.options = {
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
            "custom_mask": torch.cat(causal).cuda(),
        }
        self.on_host = {
            "qo_indptr_host": qo_indptr,
            "kv_indptr_host": ends,
            "kv_lens_host": torch.tensor(lens, dtype=torch.int32),
            "max_q_len": WIDTH,
            "max_kv_len": max(lens),
            "uniform_verify_width": WIDTH,
        }


@pytest.fixture(scope="module")
def wrapper():
    """As SGLang captures it; its first plan is flashinfer's own."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    def numbers(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device="cuda")

    rows = len(LONG)
    made = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        qo_indptr_buf=numbers(rows + 1),
        paged_kv_indptr_buf=numbers(rows + 1),
        paged_kv_indices_buf=numbers(rows * MAX_LEN),
        paged_kv_last_page_len_buf=numbers(rows) + 1,
        custom_mask_buf=torch.zeros(rows * WIDTH * MAX_LEN, dtype=torch.uint8, device="cuda"),
        mask_indptr_buf=numbers(rows + 1),
    )
    first = Slot(LONG, seed=0)
    made.begin_forward(*first.args, **first.options, non_blocking=True)
    return made


@pytest.fixture(scope="module")
def kv() -> tuple[Tensor, Tensor]:
    shape = (2 * MAX_LEN, 1, KV_HEADS, HEAD_DIM)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return made[0], made[1]


def both_slots(plan: Callable, wrapper, kv, *, held_up: bool) -> list[Tensor]:
    """Attention of the two slots; held up, the device has begun neither when the host plans the second."""
    slots = [Slot(LONG, seed=1), Slot(SHORT, seed=2)]
    torch.cuda.synchronize()
    if held_up:
        torch.cuda._sleep(HELD_UP_CYCLES)
    out = []
    for slot in slots:
        plan(wrapper, *slot.args, **slot.options, **slot.on_host)
        out.append(wrapper.run(slot.q, kv))
        if not held_up:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return out


@pytest.fixture(scope="module")
def one_at_a_time(wrapper, kv) -> list[Tensor]:
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    return both_slots(fast_prefill_plan, wrapper, kv, held_up=False)


def test_a_slot_s_attention_is_its_own_plan_s_though_the_next_slot_is_planned_before_it_begins(
    wrapper, kv, one_at_a_time: list[Tensor]
) -> None:
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    from sglang_pp_spec.host.host_plans import plan_behind_copy

    held_up = both_slots(partial(plan_behind_copy, fast_prefill_plan), wrapper, kv, held_up=True)
    assert all(torch.equal(a, b) for a, b in zip(held_up, one_at_a_time, strict=True))


def test_the_host_s_own_plans_of_two_slots_need_that_wait(wrapper, kv, one_at_a_time: list[Tensor]) -> None:
    """If this fails, a plan owns its buffer by now, or the host took longer than the device was held up for."""
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    held_up = both_slots(fast_prefill_plan, wrapper, kv, held_up=True)
    assert not torch.equal(held_up[0], one_at_a_time[0]), "the first slot ran its own plan"
    assert torch.equal(held_up[1], one_at_a_time[1])
