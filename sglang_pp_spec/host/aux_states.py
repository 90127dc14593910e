"""EAGLE3's aux hidden states: from the stages whose layers have them to the drafter on the last one.

An EAGLE3 head drafts from the target's residual stream before a few of its layers, and most of those are on earlier
stages. A stage adds what its own layers had to the hidden states that it sends on, under a key of its own; what it
received it passes on as it is. The last stage puts all of it in front of its own. It is the host's own capture at
every layer, so it is the same tensor that one stage would have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList, pack_aux_hidden_states
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.pp_draft_embedding import resolve_target_embed_and_head
from torch import Tensor, nn

from ..core.errors import PPSpecError

KEY = "aux_hidden_states.stage"
TAKES_LIST, TAKES_FUNCTION = "captured_last_layer_outputs", "capture_output"


def capture_on_every_stage(_: None, *, model: nn.Module, eagle_use_aux_hidden_state: bool, **__: Any) -> None:
    """Target:       ...model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture   (AFTER)

    Why:          the host tells the last stage alone which layers to capture, and that one silently lacks the layers
                  of others, or fails to unpack what it did not capture.
    How:          the last stage, whose model knows what the draft's layer numbers mean, tells the others, before
                  CUDA graphs are captured. Module hooks hand the host's capture argument to the layers and add what
                  came of it to the stage's output. Collective over the pipeline's stages.
    Upstream:     none
    Remove when:  the host relays aux hidden states.
    """
    if not eagle_use_aux_hidden_state or get_parallel().pp_size == 1 or get_spec().speculative_algorithm is None:
        return
    group = get_parallel().pp_group
    stack = _layer_stack(model)
    mine = sorted(set(stack.layers_to_capture)) if group.is_last_rank else None
    layers = group.broadcast_object(mine, src=group.world_size - 1)
    _check_layers(layers, stack)
    _capture_argument(stack.layers[stack.start_layer])  # on every stage, so that all of them say so
    end = stack.end_layer + group.is_last_rank  # some targets also capture what comes after their last layer
    own = [layer for layer in layers if stack.start_layer <= layer < end]
    _capture_only(model, stack, own if group.is_last_rank else [])
    if own and not group.is_last_rank:
        hand_out(stack, own, f"{KEY}{group.rank_in_group}")


def complete_on_last_stage(
    result: GenerationBatchResult,
    worker: Any,
    batch: Any,
    forward_batch: Any = None,
    pp_proxy_tensors: PPProxyTensors | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Target:       sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation   (AFTER)

    Why:          the drafter reads the aux hidden states off the target's result, and those of earlier stages are
                  not among them.
    How:          received ones in front, in the order of layers; behind the forward, so CUDA graphs need no input.
    Upstream:     none
    Remove when:  see ``capture_on_every_stage``.
    """
    received = of_earlier_stages(pp_proxy_tensors)
    output = result.logits_output
    if not received or output is None or output.hidden_states is None:
        return
    captures = bool(_layer_stack(worker.model_runner.model).layers_to_capture)
    output.hidden_states = joined(received.values(), output.hidden_states, captures)


def keep_own_embedding(original: Callable[[Any], tuple[Tensor, Tensor]], worker: Any) -> tuple[Tensor, Tensor]:
    """Target:       sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._resolve_shared_embed_and_head   (AROUND)

    Why:          where the target's embedding is on another stage, the host loads the target's from the checkpoint
                  into the head, which fails for a head of another width; on one stage such a head keeps its own.
    How:          its own embedding, and the target's head as the host finds it.
    Upstream:     none
    Remove when:  the host asks ``set_embed``'s question before it loads.
    """
    head_model = worker.draft_runner.model
    width = head_model.config.hidden_size
    if get_parallel().pp_size == 1 or getattr(head_model.config, "target_hidden_size", width) == width:
        return original(worker)
    _, lm_head = resolve_target_embed_and_head(worker.target_worker.model_runner.model)
    return head_model.get_embed(), lm_head


def of_earlier_stages(proxy: PPProxyTensors | None) -> dict[str, Tensor]:
    """The aux hidden states in a proxy, [tokens, layers of the stage x hidden size] each, in the order of stages."""
    if proxy is None:
        return {}
    names = [name for name in proxy.tensors if name.startswith(KEY)]
    return {name: proxy.tensors[name] for name in sorted(names, key=lambda name: int(name.removeprefix(KEY)))}


def joined(received: Iterable[Tensor], own: Tensor, captures: bool) -> Tensor:
    """[tokens, all layers x hidden size]; without ``captures`` ``own`` is the final hidden state and left out.

    ``PPSpecError`` if stages have another number of tokens.
    """
    parts = [*received, *([own] if captures else [])]
    if {part.shape[0] for part in parts} != {own.shape[0]}:
        counts = [part.shape[0] for part in parts]
        raise PPSpecError(f"aux hidden states of {counts} tokens from the stages, for {own.shape[0]} here")
    return torch.cat(parts, dim=-1)


def hand_out(stack: nn.Module, layers: Iterable[int], name: str) -> None:
    """``stack``'s output, a ``PPProxyTensors``, has the inputs of ``layers`` under ``name`` from now on."""
    layers, captured = list(layers), AuxHiddenStateList()
    for index in layers:
        layer = stack.layers[index]
        layer.register_forward_pre_hook(_capturing(layer, captured), with_kwargs=True)

    def start(_module: nn.Module, _args: object) -> None:
        captured.clear()  # a forward that failed may have left some

    def finish(_module: nn.Module, _args: object, output: PPProxyTensors) -> None:
        if len(captured) != len(layers):
            raise PPSpecError(
                f"{len(captured)} of {len(layers)} aux hidden states were captured: a CUDA graph without them runs "
                "here; leave the prefill's CUDA graph off with EAGLE3"
            )
        output.tensors[name] = pack_aux_hidden_states(list(captured))
        captured.clear()

    stack.register_forward_pre_hook(start)
    stack.register_forward_hook(finish)


def _capturing(layer: nn.Module, captured: AuxHiddenStateList) -> Callable[..., tuple[tuple, dict[str, Any]]]:
    """A hook that gives ``layer`` the argument by which the host has its input captured."""
    name = _capture_argument(layer)
    argument = captured if name == TAKES_LIST else captured.capture
    return lambda _module, args, kwargs: (args, {**kwargs, name: argument})


def _capture_argument(layer: nn.Module) -> str:
    """The name of that argument; SGLang's layers have the one or the other."""
    accepted = inspect.signature(layer.forward).parameters
    for name in (TAKES_LIST, TAKES_FUNCTION):
        if name in accepted:
            return name
    raise SystemExit(
        f"sglang_pp_spec refuses: EAGLE3 over pipeline stages with a target of {type(layer).__name__}s, which have "
        "no way to hand out their input"
    )


def _layer_stack(model: nn.Module) -> Any:
    """The module that runs the layers and knows which of them to capture."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("layers", "layers_to_capture", "start_layer", "end_layer")):
            return module
    raise SystemExit(
        f"sglang_pp_spec refuses: EAGLE3 over pipeline stages with {type(model).__name__}, whose layers to capture "
        "cannot be found"
    )


def _check_layers(layers: list[int], stack: Any) -> None:
    num_layers = len(stack.layers)  # those of other stages have their places in it
    if not layers or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise SystemExit(
            f"sglang_pp_spec: the EAGLE3 draft asks for the inputs of layers {layers}, the target has {num_layers}; "
            "is it the draft of another target?"
        )


def _capture_only(model: nn.Module, stack: Any, own: list[int]) -> None:
    """``model`` captures ``own`` for its own output and expects no others; none: it returns hidden states alone."""
    stack.layers_to_capture = own
    for module in model.modules():
        if getattr(module, "capture_aux_hidden_states", False):
            module.capture_aux_hidden_states = bool(own)
