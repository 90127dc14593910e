"""The host functions and classes this plugin relies on, checked before anything is installed.

A row is (path, parameters that must be accepted, why). The check is by signature; the version is only reported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from dataclasses import dataclass

PINNED_VERSION = "0.5.23"
_SRT = "sglang.srt."


@dataclass(frozen=True)
class HostSymbol:
    """One thing of the host we override, call or read."""

    path: str
    use: str  # override | hook | call | class
    parameters: tuple[str, ...]
    why: str


def _row(path: str, use: str, parameters: str, why: str) -> HostSymbol:
    return HostSymbol(_SRT + path, use, tuple(parameters.split()), why)


_SCHEDULER = "managers.scheduler.Scheduler."
SYMBOLS = (
    _row("managers.scheduler.Scheduler", "class", "server_args port_args", "replaced by our subclass"),
    _row(_SCHEDULER + "event_loop_pp", "override", "self", "our loop"),
    _row(_SCHEDULER + "init_model_config", "override", "self", "targets that are refused"),
    _row("configs.hybrid_arch.mambaish_config", "call", "model_config", "recurrent targets"),
    _row(
        "speculative.spec_utils.commit_mamba_states_after_verify",
        "call",
        "target_worker batch accept_lens accept_index draft_token_num",
        "recurrent states of earlier stages",
    ),
    _row(
        "speculative.spec_utils.prepare_mamba_track_for_verify",
        "call",
        "batch",
        "checkpoints of recurrent states for the prefix cache",
    ),
    _row("configs.model_config.is_deepseek_v4", "call", "config", "targets that are refused"),
    _row(_SCHEDULER + "init_batch_result_processor", "override", "self", "rows of requests that have ended"),
    _row(_SCHEDULER + "_pp_microbatches_drained", "override", "self", "requests between prefill and decode"),
    _row(_SCHEDULER + "_collect_inflight_batches", "override", "self", "requests between prefill and decode"),
    _row(_SCHEDULER + "_record_scheduler_state_for_paused_engine", "call", "self", "idle work while paused"),
    _row(_SCHEDULER + "maybe_init_draft_worker", "override", "self", "drafter on the last stage"),
    _row(_SCHEDULER + "get_num_allocatable_reqs", "override", "self running_bs", "requests spread over slots"),
    _row(_SCHEDULER + "get_new_batch_prefill", "override", "self running_batch", "last chunks spread over slots"),
    _row(_SCHEDULER + "_reqs_finishing_inflight", "override", "self batch", "no round for a request that ends"),
    _row("mem_cache.allocation_sizing.get_req_to_token_extra_context_len", "hook", "", "room for the reserve"),
    _row(_SCHEDULER + "abort_request", "override", "self recv_req", "the end of a refused request"),
    _row(_SCHEDULER + "_release_aborted_request", "call", "self req", "the end of a refused request"),
    _row(_SCHEDULER + "send_abort_output", "call", "self abort_req req", "the end of a refused request"),
    _row(
        "disaggregation.utils.prepare_abort", "call", "req error_message status_code", "the end of a refused request"
    ),
    _row("mem_cache.common.release_kv_cache", "call", "req tree_cache checkpoint", "the end of a refused request"),
    _row(_SCHEDULER + "pause_generation", "override", "self recv_req", "retract in every slot"),
    _row(_SCHEDULER + "_pp_spec_rebuild_verify_input", "override", "self batch", "trees from our rows"),
    _row(_SCHEDULER + "init_pp_loop_state", "call", "self", "slots"),
    _row(_SCHEDULER + "ingest_requests", "call", "self", "requests in"),
    _row(_SCHEDULER + "get_next_batch_to_run", "call", "self running_batch last_batch", "scheduling"),
    _row(_SCHEDULER + "run_batch", "call", "self batch pp_proxy_tensors", "the forward"),
    _row(_SCHEDULER + "process_batch_result", "call", "self batch result", "accounting"),
    _row(_SCHEDULER + "on_idle", "call", "self", "idle work"),
    _row(_SCHEDULER + "_pp_send_pyobj_to_next_stage", "call", "self data async_send", "requests on"),
    _row(_SCHEDULER + "_pp_commit_comm_work", "call", "self work", "sends done"),
    _row(_SCHEDULER + "_pp_recv_proxy_tensors", "call", "self", "hidden states in"),
    _row(
        _SCHEDULER + "_pp_send_dict_to_next_stage",
        "call",
        "self tensor_dict async_send msg_type ready_event",
        "hidden states on",
    ),
    _row(_SCHEDULER + "_pp_wait_forward_dependencies", "call", "self", "stream order"),
    _row("managers.schedule_batch.ScheduleBatch.copy", "call", "self", "forward-time snapshot"),
    _row("managers.schedule_batch.ScheduleBatch.filter_batch", "call", "self keep_indices", "rows drafted for"),
    _row("managers.schedule_batch.ScheduleBatch.check_decode_mem", "call", "self selected_indices", "reserve"),
    _row(
        "managers.schedule_batch.Req.next_output_finishes_by_length",
        "call",
        "self",
        "no round for a request that ends",
    ),
    _row(
        "managers.scheduler_components.logprob_result_processor.SchedulerLogprobResultProcessor.calculate_num_input_logprobs",
        "call",
        "self req extend_input_len extend_logprob_start_len",
        "extras",
    ),
    _row("distributed.parallel_state.P2PWork", "class", "work payload", "hidden states on"),
    _row("managers.utils.allocate_distinct_stream", "call", "device_module avoid_streams", "hidden states in and on"),
    _row("managers.utils.get_logprob_dict_from_result", "call", "result", "extras"),
    _row("managers.utils.get_logprob_from_pp_outputs", "call", "next_pp_outputs", "extras"),
    _row("managers.overlap_utils.decide_needs_cpu_seq_lens", "call", "attn_backends", "planning"),
    _row("mem_cache.allocation.alloc_for_spec_decode", "call", "tree_cache req_to_token_pool reqs batch", "reserve"),
    _row("mem_cache.allocation_sizing.get_alloc_len_per_decode", "call", "", "reserve"),
    _row("mem_cache.allocation_sizing.get_alloc_reserve_per_decode", "hook", "", "reserve of a third step"),
    _row("mem_cache.allocation_sizing.page_aligned_decode_alloc_lens", "call", "reqs reserve page_size", "reserve"),
    _row("speculative.eagle_worker_v2.EAGLEWorkerV2", "class", "server_args gpu_id target_worker", "drafter"),
    _row(
        "speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation",
        "override",
        "self batch on_publish grammar_barrier pp_proxy_tensors",
        "tail draft",
    ),
    _row(
        "speculative.eagle_worker_v2.EAGLEWorkerV2.verify",
        "call",
        "self batch pp_proxy_tensors grammar_barrier",
        "tail draft",
    ),
    _row("speculative.eagle_worker_v2.EagleDraftWorker.draft", "call", "self batch with_topology", "tail draft"),
    _row(
        "speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode",
        "call",
        "self batch batch_result kv_loc_plan",
        "tail draft",
    ),
    _row(
        "speculative.eagle_utils.build_tree_kernel_efficient",
        "call",
        "bonus_tokens parent_list top_scores_index draft_tokens seq_lens seq_lens_sum topk spec_steps "
        "num_verify_tokens tree_mask_mode tree_mask_buf fill_prefix_mask",
        "verify trees",
    ),
    _row("speculative.eagle_utils.default_tree_mask_mode", "call", "", "verify trees"),
    _row(
        "speculative.spec_utils.move_accept_tokens_to_target_kvcache",
        "call",
        "batch accept_index num_correct_drafts token_to_kv_pool_allocator",
        "KV of the accepted path",
    ),
    _row("speculative.spec_info.SpecInput", "class", "spec_input_type", "PPSpecRelayInput"),
    _row("utils.point_to_point_pyobj", "call", "data rank group src dst async_send", "extras"),
    _row(
        "model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture",
        "hook",
        "model eagle_use_aux_hidden_state",
        "EAGLE3",
    ),
    _row(
        "managers.tp_worker.TpModelWorker.forward_batch_generation",
        "hook",
        "self batch forward_batch pp_proxy_tensors",
        "EAGLE3, images",
    ),
    _row("managers.mm_utils.general_mm_embed_routine", "hook", "input_ids forward_batch", "images"),
    _row(
        "speculative.eagle_worker_v2.EagleDraftWorker._resolve_shared_embed_and_head",
        "hook",
        "self",
        "heads of another width",
    ),
    _row(
        "speculative.pp_draft_embedding.resolve_target_embed_and_head",
        "call",
        "target_model",
        "heads of another width",
    ),
    _row(
        "layers.attention.flashinfer_backend.fast_prefill_plan",
        "hook",
        "self qo_indptr_host kv_indptr_host kv_lens_host",
        "plans on the host",
    ),
    _row("layers.aux_hidden_states.AuxHiddenStateList.capture", "call", "self hidden", "EAGLE3"),
    _row("layers.aux_hidden_states.pack_aux_hidden_states", "call", "aux_hidden_states", "EAGLE3"),
    _row("arg_groups.validation_hook.check_pipeline_parallel_compat", "override", "cfg", "refusals"),
)


def host_version() -> str:
    """The installed SGLang's version, or a word that says there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check_host(symbols: tuple[HostSymbol, ...] = SYMBOLS) -> list[str]:
    """One line per symbol that is missing or has other parameters, or per import that fails; empty when all fits."""
    return list(dict.fromkeys(problem for symbol in symbols if (problem := _check(symbol))))


def _check(symbol: HostSymbol) -> str | None:
    found = f"sglang {host_version()}"
    try:
        target = pkgutil.resolve_name(symbol.path)
    except (ImportError, AttributeError) as error:
        if broken := _broken_import(symbol.path):
            return f"{found} cannot be imported on this machine: {broken}"
        return f"{symbol.path} is missing in {found} ({error}); install sglang=={PINNED_VERSION}"
    parameters = inspect.signature(target).parameters
    missing = [name for name in symbol.parameters if name not in parameters]
    if missing and not (symbol.use == "class" and missing == ["self"]):
        return (
            f"{symbol.path} of {found} has no parameter {', '.join(missing)} "
            f"({symbol.why}); install sglang=={PINNED_VERSION}"
        )
    return None


def _broken_import(path: str) -> str | None:
    """Why a module on ``path`` that is there fails to import, None if none does; no other version would help then."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        try:
            importlib.import_module(module)
        except ImportError as error:
            is_no_module = isinstance(error, ModuleNotFoundError) and error.name == module
            return None if is_no_module else f"{type(error).__name__}: {error}"
    return None
