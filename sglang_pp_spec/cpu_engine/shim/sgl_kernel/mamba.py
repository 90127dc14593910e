"""What SGLang takes from ``sgl_kernel.mamba`` on a CPU for targets with a gated delta rule, as it calls it."""

from sglang_pp_spec.cpu_engine import recurrent


def causal_conv1d_fn_cpu(
    x, weight, bias=None, *, conv_states, query_start_loc, cache_indices, has_initial_state, activation, seq_lens_cpu
):
    """Prefill: ``x`` [dim, num_tokens]."""
    return recurrent.convolve_extend(
        x, weight, bias, activation, conv_states, has_initial_state, cache_indices, query_start_loc
    )


def causal_conv1d_update_cpu(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    *,
    conv_state_indices,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
):
    """A token per request, ``x`` [bs, dim], or nodes, [bs, dim, num_nodes]; fills ``retrieve_parent_token``."""
    if retrieve_parent_token is not None and retrieve_next_token is not None:
        parents = recurrent.parents_of_nodes(retrieve_next_token, retrieve_next_sibling)
        retrieve_parent_token.copy_(parents)
    nodes = x if x.dim() == 3 else x.unsqueeze(-1)
    out = recurrent.convolve_nodes(
        nodes, conv_state, weight, bias, activation, conv_state_indices, intermediate_conv_window,
        intermediate_state_indices, retrieve_parent_token,
    )  # fmt: skip
    return out if x.dim() == 3 else out.squeeze(-1)


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, *, initial_state, initial_state_indices, cu_seqlens, head_first, use_qk_l2norm_in_kernel
):
    """Prefill: (output, None, states before chunks); the slots' states are updated in place."""
    out, before_chunks = recurrent.delta_rule_extend(
        q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens
    )
    return out, None, before_chunks
