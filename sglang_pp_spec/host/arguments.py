"""Refusals: every combination that is not supported, with its reason, before any model loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import UnsupportedCombination
from ..core.placement import Action, Placement, decide
from ..core.settings import Settings


@dataclass(frozen=True)
class Refusal:
    """One unsupported combination."""

    name: str
    applies: Callable[[Any], bool]
    reason: str


def _given(*fields: str) -> Callable[[Any], bool]:
    return lambda args: any(getattr(args, field, None) for field in fields)


def is_eagle3(args: Any) -> bool:
    """Whether the drafter is fed with hidden states of several of the target's layers."""
    return str(args.speculative_algorithm).upper() == "EAGLE3"


REFUSALS = (
    Refusal(
        "pd-disaggregation",
        lambda args: args.disaggregation_mode != "null",
        "--disaggregation-mode: the relay serves one engine; run PD without SGLANG_ENABLE_PP_SPEC",
    ),
    Refusal(
        "adaptive",
        _given("speculative_adaptive"),
        "--speculative-adaptive changes the tree's width at run time, and frames have a fixed layout",
    ),
    Refusal(
        "attention-dp",
        lambda args: (
            (getattr(args, "attn_dp_size", None) or 1) > 1 or bool(getattr(args, "enable_dp_attention", False))
        ),
        "attention DP splits the batch per DP rank; every stage must see the same batch",
    ),
    Refusal(
        "multi-layer-eagle",
        _given("enable_multi_layer_eagle"),
        "--enable-multi-layer-eagle drafts with another worker, which does not tail-draft",
    ),
    Refusal(
        "mixed-chunk",
        _given("enable_mixed_chunk"),
        "--enable-mixed-chunk runs decode rows inside a prefill step and loses their trees",
    ),
    Refusal(
        "rejection-sampling",
        _given("speculative_use_rejection_sampling"),
        "--speculative-use-rejection-sampling needs the draft's probabilities, which frames do not carry",
    ),
    Refusal(
        "return-hidden-states",
        _given("enable_return_hidden_states"),
        "--enable-return-hidden-states: hidden states are not relayed to the stage that answers",
    ),
    Refusal("hisparse", _given("enable_hisparse"), "--enable-hisparse commits tokens on the last stage only"),
    Refusal("two-batch-overlap", _given("enable_two_batch_overlap"), "--enable-two-batch-overlap splits batches"),
    Refusal("lora", _given("enable_lora"), "--enable-lora is not verified with a drafter on the last stage"),
    Refusal("pdmux", _given("enable_pdmux"), "--enable-pdmux runs a loop of its own"),
    Refusal(
        "eagle3-prefill-graph",
        lambda args: is_eagle3(args) and args.cuda_graph_backend_prefill in ("breakable", "full"),
        "--cuda-graph-backend-prefill with EAGLE3: such a graph leaves out the aux hidden states of earlier stages",
    ),
    Refusal(
        "eagle3-torch-compile",
        lambda args: is_eagle3(args) and bool(args.enable_torch_compile),
        "--enable-torch-compile with EAGLE3 is not verified: aux hidden states are captured by module hooks",
    ),
    Refusal(
        "int8-states",
        _given("enable_int8_mamba_checkpoint"),
        "--enable-int8-mamba-checkpoint quantises a request's own state when its prompt is cached, and the chunk "
        "that writes it may not have run by then",
    ),
    Refusal(
        "streaming-sessions",
        _given("enable_streaming_session"),
        "--enable-streaming-session: a session takes over what a request leaves while a round of it is in flight; "
        "not verified, and with recurrent states wrong",
    ),
    Refusal(
        "min-free-slots",
        lambda args: getattr(args, "min_free_slots_delay", None) is not None,
        "--min-free-slots-delay: slots per microbatch are bounded, so the threshold may never be reached",
    ),
)

ABORT_WITH_PREFIXES = (
    "SGLANG_PP_SPEC_ON_MISMATCH=abort without --disable-radix-cache: a stage whose frame was right keeps the prefix "
    "of the request, the others do not, and the next request that shares it would run differently on them"
)
ABORT_WITH_TP = (
    "SGLANG_PP_SPEC_ON_MISMATCH=abort with --tp-size: the ranks of a stage read frames of their own, and one that "
    "refuses its frame cannot tell the others in time; leave it at stop"
)

#: Targets with recurrent layers that are served; the names are those of SGLang's models.
WITH_STATES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
RECURRENT = (
    f"of targets with recurrent layers only those of Qwen3.5 are served ({', '.join(WITH_STATES)}): others are "
    "not verified, and of Mamba layers SGLang writes what a verify leaves by the batch's rows and reads it by the "
    "requests'"
)
IMAGES = "EAGLE3 with a multi-modal target: that its head reads the embeddings of images right is not verified"
COMPRESSED = "DeepSeek-V4's compressed KV takes rejected drafts back on the last stage only"
SHARED_PLANS = (
    "--attention-backend flashinfer with an MLA target: its plans of two slots are copied from the same pinned "
    "buffers, and a later one would be written over one that was not copied; use another backend"
)


def check_arguments(args: Any, settings: Settings | None = None) -> None:
    """Raise ``UnsupportedCombination`` naming the reason if ``args`` ask for PP x spec in a way we refuse."""
    if args.pp_size <= 1 or args.speculative_algorithm is None:
        return
    decision = decide(args.speculative_algorithm, Placement.LAST_STAGE_LOCAL, args.pp_size, args.pp_size - 1)
    if decision.action is Action.REFUSE:
        raise UnsupportedCombination(f"sglang_pp_spec refuses: {decision.reason}")
    reasons = [refusal.reason for refusal in REFUSALS if refusal.applies(args)]
    if settings is not None and settings.on_mismatch == "abort":
        reasons += [ABORT_WITH_TP] if args.tp_size > 1 else []
        reasons += [] if args.disable_radix_cache else [ABORT_WITH_PREFIXES]
    if reasons:
        raise UnsupportedCombination("sglang_pp_spec refuses: " + "; ".join(reasons))


def check_target(model_config: Any, *, eagle3: bool = False, flashinfer: bool = False) -> None:
    """Raise ``UnsupportedCombination`` for a target that does not work with us, or not with one of these.

    One that keeps more of a request than attention's KV: SGLang moves such state to the accepted path inside verify,
    which runs on the last stage. Earlier stages would go on from a wrong state, and only the text would show it. Of
    ``WITH_STATES`` they take the accepted state themselves (``SchedulerState.commit_cache``).
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_v4

    if mambaish_config(model_config) is not None and model_config.hf_config.architectures[0] not in WITH_STATES:
        raise UnsupportedCombination(f"sglang_pp_spec refuses: {RECURRENT}")
    if is_deepseek_v4(model_config.hf_config):
        raise UnsupportedCombination(f"sglang_pp_spec refuses: {COMPRESSED}")
    if eagle3 and model_config.is_multimodal:
        raise UnsupportedCombination(f"sglang_pp_spec refuses: {IMAGES}")
    if flashinfer and model_config.attention_arch == AttentionArch.MLA:
        raise UnsupportedCombination(f"sglang_pp_spec refuses: {SHARED_PLANS}")


def check_before_host(cfg: Any, *, settings: Settings) -> tuple[tuple[Any], dict[str, Any]] | None:
    """Target:       sglang.srt.arg_groups.validation_hook.check_pipeline_parallel_compat   (BEFORE)

    Why:          the host accepts combinations under PP x spec that crash later or are silently wrong, and refuses
                  EAGLE3, whose hidden states of earlier stages it does not relay and we do (``aux_states.py``).
    How:          our refusals first, each with its reason; the host's own check runs afterwards, and takes EAGLE3
                  for EAGLE.
    Upstream:     none: specific to this plugin
    Remove when:  never; it is the list of what this plugin does not support.
    """
    check_arguments(cfg, settings)
    if cfg.pp_size > 1 and is_eagle3(cfg):
        return (_AsEagle(cfg),), {}
    return None


class _AsEagle:
    """Arguments of which the algorithm reads EAGLE."""

    speculative_algorithm = "EAGLE"

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cfg, name)
