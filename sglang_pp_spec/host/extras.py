"""The large and rare part of a step's output: logprobs and sampling masks, only when a request asked for them.

They are no part of the frame. Whether a step has extras is read from the batch, so all stages agree; the last stage
pickles them once and sends them over the host's CPU group, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import (
    GenerationBatchResult,
    get_logprob_dict_from_result,
    get_logprob_from_pp_outputs,
)
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.utils import point_to_point_pyobj

from .turn import ForwardRecord


def wants_extras(batch: ScheduleBatch) -> bool:
    """Whether a request of this batch asked for logprobs or a sampling mask."""
    return batch.return_logprob or any(req.return_sampling_mask for req in batch.reqs)


def collect_extras(batch: ScheduleBatch, result: GenerationBatchResult) -> dict | None:
    """Last stage, at launch: what the result holds beyond tokens, as host data."""
    return _to_host(get_logprob_dict_from_result(result)) if wants_extras(batch) else None


def send_extras(scheduler, extras: dict) -> list:
    """Start sending ``extras`` to every earlier stage; the returned work must be kept until it is done."""
    ranks = scheduler.pp_group.ranks
    me, group = ranks[-1], scheduler.world_group.cpu_group
    return [
        work for rank in ranks[:-1] for work in point_to_point_pyobj([extras], me, group, me, rank, async_send=True)
    ]


def attach_extras(scheduler, record: ForwardRecord, result: GenerationBatchResult, owned: Sequence[int]) -> None:
    """At apply: put the step's logprobs on ``result``, received first where the last stage is somebody else.

    They are those of all launched rows. SGLang reads them by a row's place, and those of prompts one after the other,
    passing over rows that are over: what rows other than ``owned`` have there is left out.
    """
    result.extend_input_len_per_req = record.result.extend_input_len_per_req
    result.extend_logprob_start_len_per_req = record.result.extend_logprob_start_len_per_req
    if not wants_extras(record.snapshot):
        return
    extras = record.extras
    if extras is None:
        ranks = scheduler.pp_group.ranks
        me = ranks[scheduler.pp_group.rank_in_group]
        (extras,) = point_to_point_pyobj([], me, scheduler.world_group.cpu_group, ranks[-1], me)
    (
        result.logits_output,
        result.extend_input_len_per_req,
        result.extend_logprob_start_len_per_req,
    ) = get_logprob_from_pp_outputs(PPProxyTensors(extras))
    if result.logits_output.input_token_logprobs is not None and len(owned) < len(record.reqs):
        of_owned = _prompt_tokens_of(scheduler, record.reqs, result, owned)
        result.logits_output.input_token_logprobs = result.logits_output.input_token_logprobs[of_owned]


def _prompt_tokens_of(scheduler, reqs: Sequence[Req], result: GenerationBatchResult, owned: Sequence[int]):
    """Which of a prefill's input logprobs belong to the ``owned`` rows; [tokens] bool."""
    count = scheduler.batch_result_processor.logprob_result_processor.calculate_num_input_logprobs
    lengths, starts = result.extend_input_len_per_req, result.extend_logprob_start_len_per_req
    counts = [count(req, length, start) for req, length, start in zip(reqs, lengths, starts, strict=True)]
    is_owned = torch.zeros(len(reqs), dtype=torch.bool)
    is_owned[list(owned)] = True
    return is_owned.repeat_interleave(torch.tensor(counts))


def _to_host(value):
    """A copy of nested ``value`` with every tensor on the host."""
    if torch.is_tensor(value):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(item) for item in value)
    return value
