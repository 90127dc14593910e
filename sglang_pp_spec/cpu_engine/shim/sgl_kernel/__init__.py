"""Pure-torch stand-in for the CPU build of ``sgl_kernel``, which no package registry carries.

Put the directory that holds this package first on ``PYTHONPATH``
(``sglang_pp_spec.cpu_engine.environment.cpu_environment`` does). It offers exactly what SGLang asks for
on a CPU without AMX to serve a Llama-like model with or without EAGLE; any other name is an
``ImportError`` or ``AttributeError``, as it would be in a build that lacks it.
"""

from sglang_pp_spec.cpu_engine.kv_slots import copy_kv_rows as copy_all_layer_kv_cache_cpu
from sglang_pp_spec.cpu_engine.kv_slots import draft_slot_table as build_draft_decode_metadata_cpu
from sglang_pp_spec.cpu_engine.kv_slots import fill_bonus_tokens as fill_bonus_tokens_cpu
from sglang_pp_spec.cpu_engine.kv_slots import pack_accepted_slots as fill_accept_out_cache_loc_cpu
from sglang_pp_spec.cpu_engine.kv_slots import read_draft_slots as assign_draft_cache_locs_contiguous_cpu
from sglang_pp_spec.cpu_engine.kv_slots import read_slots as assign_extend_cache_locs_cpu
from sglang_pp_spec.cpu_engine.kv_slots import rotate_input_ids as rotate_input_ids_cpu
from sglang_pp_spec.cpu_engine.kv_slots import write_slots as assign_req_to_token_pool_cpu
from sglang_pp_spec.cpu_engine.operators import register_operators
from sglang_pp_spec.cpu_engine.tree import build_tree as build_tree_kernel_efficient_cpu
from sglang_pp_spec.cpu_engine.tree import verify_tree_greedy as verify_tree_greedy_cpu

_library = register_operators()

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
