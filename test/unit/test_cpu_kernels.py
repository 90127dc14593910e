"""The other CPU kernels against plain references, and what a launcher sets to get them."""

import math
import os
import random
from types import SimpleNamespace

import pytest
import torch

from sglang_pp_spec.cpu_engine import attention, environment, hooks, kv_slots, layers, operators

HEADS, KV_HEADS, DIM = 4, 2, 8


def reference_row(q, keys, values, visible, rule):
    """Attention of one request, head by head. q [q_len, HEADS, DIM], keys [num_keys, KV_HEADS, DIM]."""
    out = torch.empty(q.shape[0], HEADS, values.shape[-1])
    for head in range(HEADS):
        own = head * KV_HEADS // HEADS
        scores = q[:, head] @ keys[:, own].T * rule.scale
        if rule.logit_cap:
            scores = rule.logit_cap * torch.tanh(scores / rule.logit_cap)
        weights = torch.where(visible, scores.exp(), 0.0)
        total = weights.sum(-1, keepdim=True)
        if rule.sinks is not None:
            total = total + rule.sinks[head].exp()
        out[:, head] = weights @ values[:, own] / total
    return out


def rule_of(**changes):
    defaults = {"scale": DIM**-0.5, "logit_cap": 0.0, "window": 0, "sinks": None, "causal": True}
    return attention.AttentionRule(**(defaults | changes))


RULES = {
    "plain": rule_of(),
    "capped": rule_of(logit_cap=2.0),
    "windowed": rule_of(window=3),
    "sinks": rule_of(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": rule_of(logit_cap=3.0, window=4, sinks=torch.ones(HEADS)),
}


class Batch:
    """Requests with random slots; free slots hold NaN, so reading one shows."""

    def __init__(self, prefix_lens, q_lens, seed=0):
        torch.manual_seed(seed)
        self.prefix, self.q_lens = prefix_lens, q_lens
        self.seq = [p + q for p, q in zip(prefix_lens, q_lens, strict=True)]
        slots = torch.randperm(sum(self.seq)) + 1
        self.k = torch.full((sum(self.seq) + 20, KV_HEADS, DIM), math.nan)
        self.v = self.k.clone()
        self.k[0] = self.v[0] = 0.0  # the host's padding slot
        self.k[slots], self.v[slots] = torch.randn(2, len(slots), KV_HEADS, DIM)
        self.table = torch.full((len(self.seq) + 2, max(self.seq) + 4), len(slots) + 5, dtype=torch.int32)
        self.rows = torch.randperm(len(self.seq) + 2)[: len(self.seq)]
        for row, part in zip(self.rows, slots.split(self.seq), strict=True):
            self.table[row, : len(part)] = part.int()
        self.q = torch.randn(sum(q_lens), HEADS, DIM)
        self.start = torch.tensor([0, *q_lens[:-1]]).cumsum(0)

    def slots(self, i):
        return self.table[self.rows[i], : self.seq[i]].long()

    def expected(self, rule, own_masks=None):
        parts = []
        for i, (prefix, q_len) in enumerate(zip(self.prefix, self.q_lens, strict=True)):
            own = torch.ones(q_len, q_len).tril().bool() if own_masks is None else own_masks[i]
            visible = torch.cat((torch.ones(q_len, prefix, dtype=torch.bool), own), dim=1)
            if rule.window:
                distance = (prefix + torch.arange(q_len))[:, None] - torch.arange(prefix + q_len)
                visible &= distance < rule.window
            q = self.q[self.start[i] : self.start[i] + q_len]
            parts.append(reference_row(q, self.k[self.slots(i)], self.v[self.slots(i)], visible, rule))
        return torch.cat(parts)

    def extend(self, rule, tree_mask=None, with_kv=False):
        out = torch.empty_like(self.q)
        own = torch.cat([self.slots(i)[p:] for i, p in enumerate(self.prefix)])
        k, v = (self.k[own], self.v[own]) if with_kv else (None, None)
        attention.extend_attention(
            self.q, k, v, out, self.k, self.v, self.table, self.rows, torch.tensor(self.seq),
            torch.tensor(self.q_lens, dtype=torch.int32), self.start, rule, tree_mask,
        )  # fmt: skip
        return out


# Float32 sums in another order (padded batch, fused softmax): a few ulp of values around 1.
CLOSE = {"atol": 2e-6, "rtol": 2e-5}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("with_kv", [False, True])
def test_extend_attention_matches_the_reference_for_mixed_lengths(rule, with_kv):
    batch = Batch(prefix_lens=[0, 7, 3, 12], q_lens=[5, 1, 5, 2])
    torch.testing.assert_close(batch.extend(rule, with_kv=with_kv), batch.expected(rule), **CLOSE)


def test_a_tree_mask_hides_draft_tokens_but_not_the_prefix():
    batch = Batch(prefix_lens=[4, 0, 9], q_lens=[6, 6, 6])
    masks = torch.rand(3, 6, 6) < 0.5
    masks |= torch.eye(6, dtype=torch.bool)
    padded = torch.cat((masks.flatten(), torch.ones(40, dtype=torch.bool)))
    got = batch.extend(RULES["plain"], tree_mask=padded)
    torch.testing.assert_close(got, batch.expected(RULES["plain"], masks), **CLOSE)


def test_an_encoder_sees_its_whole_own_part():
    batch = Batch(prefix_lens=[0, 0], q_lens=[4, 3])
    full = [torch.ones(q, q, dtype=torch.bool) for q in batch.q_lens]
    rule = rule_of(causal=False)
    torch.testing.assert_close(batch.extend(rule), batch.expected(rule, full), **CLOSE)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_decode_attention_stores_the_new_token_and_attends_to_it(rule):
    batch = Batch(prefix_lens=[0, 7, 3], q_lens=[1, 1, 1])
    want = batch.expected(rule)
    loc = torch.tensor([int(batch.slots(i)[-1]) for i in range(3)])
    k_new, v_new = batch.k[loc].clone(), batch.v[loc].clone()
    batch.k[loc] = batch.v[loc] = math.nan
    out = torch.empty_like(batch.q)
    attention.decode_attention(
        batch.q, batch.k, batch.v, out, k_new.flatten(1), v_new, loc, batch.table, batch.rows,
        torch.tensor(batch.seq), rule,
    )  # fmt: skip
    torch.testing.assert_close(out, want, **CLOSE)
    assert torch.equal(batch.k[loc], k_new) and torch.equal(batch.v[loc], v_new)


def call_extend_operator(batch, k_scale=1.0, is_cross_attn=False):
    """The call as the host's attention backend makes it, positionally."""
    out = torch.empty_like(batch.q)
    q_lens = torch.tensor(batch.q_lens, dtype=torch.int32)
    torch.ops.sgl_kernel.extend_attention_cpu(
        batch.q, None, None, out, batch.k, batch.v, k_scale, 1.0, batch.table, batch.rows,
        torch.tensor(batch.seq), q_lens, batch.start, max(batch.q_lens), DIM**-0.5, 0.0, is_cross_attn, 0,
        None, None, None, True,
    )  # fmt: skip
    return out


LIBRARIES = []  # operators live as long as the library object that registered them


@pytest.fixture
def registered():
    """The operators, unless a stand-in package has registered them in this process already."""
    if not hasattr(torch.ops.sgl_kernel, "extend_attention_cpu"):
        LIBRARIES.append(operators.register_operators())
    assert all(hasattr(torch.ops.sgl_kernel, name) for name in operators.SCHEMAS)


def test_an_operator_computes_what_the_host_passes_positionally(registered):
    batch = Batch(prefix_lens=[2, 5], q_lens=[3, 3])
    torch.testing.assert_close(call_extend_operator(batch), batch.expected(RULES["plain"]), **CLOSE)


def test_an_operator_refuses_by_name_what_it_does_not_compute(registered):
    batch = Batch(prefix_lens=[2], q_lens=[3])
    with pytest.raises(NotImplementedError, match="cross attention"):
        call_extend_operator(batch, is_cross_attn=True)
    with pytest.raises(NotImplementedError, match="scaled KV cache"):
        call_extend_operator(batch, k_scale=0.5)


def draw_segments(seed):
    rng = random.Random(seed)
    table = torch.arange(1, 6 * 16 + 1, dtype=torch.int32).view(6, 16)
    rows = rng.sample(range(6), 4)
    starts = [rng.randint(0, 8) for _ in rows]
    ends = [start + rng.randint(0, 7) for start in starts]
    return table, rows, starts, ends


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_read_and_written_segment_by_segment(seed):
    table, rows, starts, ends = draw_segments(seed)
    want = [int(table[r, c]) for r, s, e in zip(rows, starts, ends, strict=True) for c in range(s, e)]
    out = torch.full((len(want) + 3,), -5)
    index = torch.tensor(rows), table, torch.tensor(starts, dtype=torch.int32), torch.tensor(ends)
    kv_slots.read_slots(*index, out, 16)
    assert out.tolist() == want + [-5] * 3
    copy = torch.zeros_like(table)
    kv_slots.write_slots(index[0], copy, *index[2:], out, 16)
    assert copy[copy > 0].tolist() == sorted(want)
    assert torch.equal(torch.where(copy > 0, copy, table), table)


def test_each_beam_has_its_own_draft_slots_behind_the_prefix():
    table = torch.arange(4 * 20, dtype=torch.int32).view(4, 20)
    rows, seq, topk, steps = torch.tensor([3, 1]), torch.tensor([5, 2]), 2, 3
    flat = torch.empty(2 * topk * steps, dtype=torch.int64)
    kv_slots.read_draft_slots(rows, table, seq, flat, 20, topk, steps)
    beams = kv_slots.draft_slot_table(table, rows, seq, topk, steps, 20)
    assert beams.dtype == table.dtype and beams.shape[0] == 4
    for request in range(2):
        for beam in range(topk):
            row, length = beams[request * topk + beam], int(seq[request])
            assert row[:length].tolist() == table[rows[request], :length].tolist()
            own = flat.view(2, topk, steps)[request, beam]
            assert row[length : length + steps].tolist() == own.tolist()


def test_accepted_slots_and_bonus_tokens_are_packed():
    accept_index = torch.tensor([[0, 2, -1], [4, -1, -1], [8, 9, 11]], dtype=torch.int32)
    slots, packed = torch.arange(100, 112), torch.full((9,), -5)
    kv_slots.pack_accepted_slots(accept_index, slots, packed)
    assert packed.tolist() == [100, 102, 104, 108, 109, 111, -5, -5, -5]
    tokens = torch.arange(9, dtype=torch.int32)
    bonus = torch.empty(3, dtype=torch.int32)
    kv_slots.fill_bonus_tokens(tokens, torch.tensor([2, 1, 3]), bonus, 3)
    assert bonus.tolist() == [1, 3, 8]


def test_input_ids_rotate_left_and_take_the_new_token_last():
    ids = torch.arange(10)
    start, length, new = torch.tensor([0, 4, 4]), torch.tensor([4, 0, 6]), torch.tensor([[50], [51], [52]])
    kv_slots.rotate_input_ids(ids, start, length, new)
    assert ids.tolist() == [1, 2, 3, 50, 5, 6, 7, 8, 9, 52]
    kv_slots.rotate_input_ids(ids, start, length, new.flatten(), torch.tensor([1, 0, 5]))
    assert ids.tolist() == [2, 50, 50, 50, 6, 52, 8, 9, 52, 52]


def test_kv_rows_move_as_if_all_were_read_before_any_is_written():
    buffers = [torch.randn(8, KV_HEADS, DIM) for _ in range(4)]
    before = [buffer.clone() for buffer in buffers]
    source, target = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1])
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer.stride(0) * 4 for buffer in buffers])
    kv_slots.copy_kv_rows(pointers, strides, target, source)
    for old, buffer in zip(before, buffers, strict=True):
        assert torch.equal(buffer[target], old[source])
        assert torch.equal(buffer[[0, 4, 5, 6, 7]], old[[0, 4, 5, 6, 7]])


def test_rmsnorm_agrees_with_torch_and_the_fused_form_works_in_place():
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    want = torch.nn.functional.rms_norm(x, (16,), weight, eps=1e-5)
    torch.testing.assert_close(layers.rmsnorm(x, weight, 1e-5), want, **CLOSE)
    total = x + residual
    layers.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, torch.nn.functional.rms_norm(total, (16,), weight, eps=1e-5), **CLOSE)


def test_silu_and_mul_gates_the_second_half():
    x = torch.randn(3, 12)
    torch.testing.assert_close(layers.silu_and_mul(x), x[:, :6] * torch.sigmoid(x[:, :6]) * x[:, 6:], **CLOSE)


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_embedding_turns_each_pair_by_its_angle(is_neox):
    rotary_dim, positions = 4, torch.tensor([3, 0, 7])
    angles = torch.arange(10)[:, None] * torch.tensor([1.0, 0.1])
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    query, key = torch.randn(3, HEADS * DIM), torch.randn(3, KV_HEADS, DIM)
    for given, got in zip(
        (query, key), layers.rotary_embedding(positions, query, key, DIM, cache, is_neox), strict=True
    ):
        assert got.shape == given.shape
        heads, turned = given.reshape(3, -1, DIM), got.reshape(3, -1, DIM)
        for i in range(rotary_dim // 2):
            a, b = (i, i + rotary_dim // 2) if is_neox else (2 * i, 2 * i + 1)
            plane = torch.view_as_complex(torch.stack((heads[..., a], heads[..., b]), -1))
            spin = torch.polar(torch.ones(3), angles[positions, i])[:, None]
            want = torch.view_as_real(plane * spin)
            torch.testing.assert_close(torch.stack((turned[..., a], turned[..., b]), -1), want, **CLOSE)
        assert torch.equal(turned[..., rotary_dim:], heads[..., rotary_dim:])


def test_the_environment_puts_the_stand_in_first_and_keeps_the_users_settings():
    base = {"PYTHONPATH": "/some/where", "OMP_NUM_THREADS": "3", "HOME": "/home/x"}
    env = environment.cpu_environment(3, base)
    path = env["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(environment.SHIM_DIR), "/some/where"]
    assert (environment.SHIM_DIR / "sgl_kernel" / "__init__.py").is_file()
    assert env["OMP_NUM_THREADS"] == "3" and env["HOME"] == "/home/x"
    assert env["SGLANG_USE_CPU_ENGINE"] == env["TORCHDYNAMO_DISABLE"] == "1"
    assert base == {"PYTHONPATH": "/some/where", "OMP_NUM_THREADS": "3", "HOME": "/home/x"}
    assert environment.cpu_environment(3, env) == env, "a second launcher inside the first changes nothing"


def test_every_rank_is_bound_to_a_core_this_process_may_use():
    cores = environment.cpu_environment(5, {})["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(cores) == 5 and {int(core) for core in cores} <= os.sched_getaffinity(0)


def test_flags_the_user_gave_are_not_repeated():
    given = ["--max-total-tokens=512", "--device", "cpu"]
    added = environment.cpu_server_args(given)
    assert "--max-total-tokens" not in added and "--device" not in added
    assert added[added.index("--attention-backend") + 1] == "intel_amx"


def test_a_later_stages_pool_names_its_first_layer_only_while_the_backend_starts():
    """Layer 0 is a negative index on a later stage: an IndexError from the third stage on."""
    runner = SimpleNamespace(token_to_kv_pool=SimpleNamespace(start_layer=6))

    def constructor(self, model_runner):
        self.first_layer = next(iter(model_runner.token_to_kv_pool.full_attention_layer_id_mapping))

    backend = SimpleNamespace()
    hooks.init_with_first_local_layer(constructor, backend, runner)
    assert backend.first_layer == 6
    assert vars(runner.token_to_kv_pool) == {"start_layer": 6}


def test_only_the_cpu_keeps_the_amx_backend_and_only_gloo_groups_lose_pynccl():
    view = SimpleNamespace(attention_backend="intel_amx", device="cpu")
    assert hooks.keep_intel_amx_backend(lambda view: {"attention_backend": "torch_native"}, view) == {}
    view.device = "xpu"
    assert hooks.keep_intel_amx_backend(lambda view: {"page_size": 128}, view) == {"page_size": 128}
    seen = {}

    def factory(group_ranks, local_rank, backend, **kwargs):
        seen[backend] = kwargs

    for backend in ("gloo", "nccl"):
        hooks.build_group_without_pynccl(factory, [[0, 1]], 0, backend, use_pynccl=True, group_name="pp")
    assert seen == {
        "gloo": {"use_pynccl": False, "group_name": "pp"},
        "nccl": {"use_pynccl": True, "group_name": "pp"},
    }


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.around.__name__)
def test_every_hook_has_a_ledger_entry_that_names_its_target(hook):
    fields = ("Target:", "Why:", "How:", "Upstream:", "Remove when:")
    text = hook.around.__doc__
    assert [text.index(field) for field in fields] == sorted(text.index(field) for field in fields)
    assert hook.target in text
