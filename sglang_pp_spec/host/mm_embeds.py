"""Embeddings of images: from the first stage, which makes them, to the drafter on the last one.

A prompt's image is a run of token ids that no embedding table has; the first stage puts the vision tower's output in
their place. An MTP module reads the same embeddings behind the prompt's forward. They travel with the prompt's hidden
states, under the name that SGLang has for them, [tokens, hidden size] in the target's dtype; rounds have none.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from torch import Tensor

from .overlap import is_pp_spec

KEY = "mm_input_embeds"


def send_with_hidden_states(
    output: Any, input_ids: Tensor | None = None, forward_batch: ForwardBatch | None = None, *_: Any, **__: Any
) -> PPProxyTensors | None:
    """Target:       sglang.srt.managers.mm_utils.general_mm_embed_routine   (AFTER)

    Why:          the host leaves the embeddings on the first stage. The drafter of a multi-modal target asserts that
                  it has them, so the server ends at the first image, which is that of its own warm-up.
    How:          the first stage's output has them too. A copy of it: a CUDA graph's output is used again.
    Upstream:     SGLang's Qwen4Exp model does so itself
    Remove when:  the host relays them for every model.
    """
    embeds = None if forward_batch is None else forward_batch.mm_input_embeds
    if embeds is None or not isinstance(output, PPProxyTensors) or not is_pp_spec():
        return None
    return PPProxyTensors({**output.tensors, KEY: embeds})


def give_to_drafter(
    result: GenerationBatchResult,
    worker: Any,
    batch: Any,
    forward_batch: Any = None,
    pp_proxy_tensors: PPProxyTensors | None = None,
    *_: Any,
    **__: Any,
) -> None:
    """Target:       sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation   (AFTER)

    Why:          the drafter reads the embeddings off the target's result, where one stage has its own.
    How:          the received ones, behind the forward.
    Upstream:     none
    Remove when:  see ``send_with_hidden_states``.
    """
    received = embeds_in(pp_proxy_tensors)
    if received and result.logits_output is not None:
        result.logits_output.mm_input_embeds = received[KEY]


def embeds_in(proxy: PPProxyTensors | None) -> dict[str, Tensor]:
    """The embeddings in a proxy, under their name; empty if it has none."""
    return {} if proxy is None or KEY not in proxy.tensors else {KEY: proxy.tensors[KEY]}
