"""Registers the operators that SGLang calls as ``torch.ops.sgl_kernel.*_cpu``.

Argument order and in-place behaviour are the host's: see the calls in
``sglang.srt.layers.attention.intel_amx_backend``, ``...layers.layernorm``, ``...layers.activation`` and
``...layers.rotary_embedding``; for Qwen3.5 in ``sglang.srt.models.qwen3_5`` and
``...layers.attention.linear``. What no model served here needs is refused by name instead of computed
wrongly: cross attention, a KV cache that carries a scale, decays per channel.
"""

import torch

from sglang_pp_spec.cpu_engine import attention, layers, recurrent

NAMESPACE = "sgl_kernel"

SCHEMAS = {
    "decode_attention_cpu": (
        "(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale,"
        " Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits,"
        " Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap,"
        " bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
    ),
    "extend_attention_cpu": (
        "(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer,"
        " Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices,"
        " Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend,"
        " float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size,"
        " Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool is_causal) -> ()"
    ),
    "rmsnorm_cpu": "(Tensor input, Tensor weight, float eps) -> Tensor",
    "fused_add_rmsnorm_cpu": "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()",
    "silu_and_mul_cpu": "(Tensor input) -> Tensor",
    "rotary_embedding_cpu": (
        "(Tensor positions, Tensor query, Tensor key, int head_size, Tensor cos_sin_cache, bool is_neox)"
        " -> (Tensor, Tensor)"
    ),
    "fused_sigmoid_mul_cpu": "(Tensor(a!) x, Tensor gate) -> ()",
    "fused_qk_gemma_rmsnorm_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> (Tensor, Tensor)"
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": (
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, int num_heads)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": (
        "(Tensor qkvz, Tensor ba, int num_k_heads, int num_v_heads, int k_dim, int v_dim)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "fused_gdn_gating_cpu": "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b,"
        " Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens,"
        " bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold, bool is_kda=False,"
        " bool disable_state_update=False, Tensor(b!)? intermediate_states_buffer=None,"
        " Tensor? intermediate_state_indices=None, int? cache_steps=None, Tensor? retrieve_parent_token=None)"
        " -> Tensor"
    ),
}


def decode_attention_cpu(
    query, k_buffer, v_buffer, k_scale, v_scale, output, key, value, loc, attn_logits, req_to_token,
    req_pool_indices, seq_lens, sm_scale, logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks,
):  # fmt: skip
    """One new token per request. ``attn_logits`` is scratch for a split reduction and stays unused."""
    _refuse_unsupported(is_cross_attn, k_scale, v_scale)
    if seq_lens.numel() == 0:
        return
    rule = attention.AttentionRule(sm_scale, logit_cap, sliding_window_size, sinks, causal=True)
    attention.decode_attention(
        query, k_buffer, v_buffer, output, key, value, loc, req_to_token, req_pool_indices, seq_lens, rule
    )


def extend_attention_cpu(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, k_scale, v_scale, req_to_token,
    req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, max_len_extend, sm_scale, logit_cap,
    is_cross_attn, sliding_window_size, encoder_lens, sinks, tree_mask, is_causal,
):  # fmt: skip
    """Several new tokens per request. The caller has already stored their K and V in the buffers."""
    _refuse_unsupported(is_cross_attn, k_scale, v_scale)
    if seq_lens.numel() == 0:
        return
    rule = attention.AttentionRule(sm_scale, logit_cap, sliding_window_size, sinks, is_causal)
    k_own = None if k_extend is None else k_extend.view(-1, *k_buffer.shape[1:])
    v_own = None if v_extend is None else v_extend.view(-1, *v_buffer.shape[1:])
    attention.extend_attention(
        q_extend, k_own, v_own, o_extend, k_buffer, v_buffer, req_to_token, req_pool_indices, seq_lens,
        extend_seq_lens, extend_start_loc, rule, tree_mask,
    )  # fmt: skip


def delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens,
    use_qk_l2norm_in_kernel, softplus_beta, softplus_threshold, is_kda=False, disable_state_update=False,
    intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None,
    retrieve_parent_token=None,
):  # fmt: skip
    """A new token per request, or the nodes of its tree: then its state stays, and those after nodes are written."""
    if is_kda or not use_qk_l2norm_in_kernel:
        raise NotImplementedError("the CPU engine's delta rule has one decay a head and normalised keys")
    g, beta = recurrent.gating(A_log, a, b, dt_bias)
    rule = (q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens)
    if not disable_state_update:
        return recurrent.delta_rule_extend(*rule)[0]
    return recurrent.delta_rule_verify(
        *rule, intermediate_states_buffer, intermediate_state_indices, retrieve_parent_token
    )


def _refuse_unsupported(is_cross_attn: bool, k_scale: float, v_scale: float) -> None:
    if is_cross_attn:
        raise NotImplementedError("the CPU engine has no cross attention; use a decoder-only model")
    if k_scale != 1.0 or v_scale != 1.0:
        raise NotImplementedError("the CPU engine has no scaled KV cache; use --kv-cache-dtype auto")


IMPLEMENTATIONS = {
    "decode_attention_cpu": decode_attention_cpu,
    "extend_attention_cpu": extend_attention_cpu,
    "rmsnorm_cpu": layers.rmsnorm,
    "fused_add_rmsnorm_cpu": layers.fused_add_rmsnorm,
    "silu_and_mul_cpu": layers.silu_and_mul,
    "rotary_embedding_cpu": layers.rotary_embedding,
    "fused_sigmoid_mul_cpu": layers.sigmoid_mul,
    "fused_qk_gemma_rmsnorm_cpu": layers.qk_norm,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": layers.qk_norm_with_gate,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": layers.split_projections,
    "fused_gdn_gating_cpu": recurrent.gating,
    "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_update_cpu,
}


def register_operators() -> torch.library.Library:
    """Define and implement every operator; the caller keeps the returned library alive."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, IMPLEMENTATIONS[name], "CPU")
    return library
