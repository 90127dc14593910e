"""SGLANG_PP_SPEC_ON_MISMATCH=abort: the requests a wrong frame was wrong for are ended, and the engine goes on.

Only stage 0 can do that: it takes requests in before anything is scheduled again, so the order to end a request
reaches every stage in time. A refusal on any other stage stops the engine. With tensor parallelism inside a stage the
policy is refused at start: each rank reads a frame of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from http import HTTPStatus

from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import release_kv_cache

from ..core.errors import FrameRefused
from .turn import StageTurn, record_of

logger = logging.getLogger(__name__)

MARK = "sglang_pp_spec: a frame was refused for this request"


def order_aborts(scheduler, turn: StageTurn, rows: Sequence[int], reason: FrameRefused) -> bool:
    """On stage 0 under the abort policy: queue the end of the affected requests; False stops the engine."""
    if scheduler.settings.on_mismatch != "abort" or not scheduler.pp_group.is_first_rank:
        return False
    reqs = {req.rid: req for req in (record_of(turn).reqs[row] for row in rows)}
    logger.error("%s; aborting %s", reason, list(reqs))
    scheduler.refused_requests.update(reqs)
    scheduler._deferred_input_requests.extend(AbortReq(rid=rid, abort_message=MARK) for rid in reqs)
    return True


def end_refused(scheduler, order: AbortReq) -> None:
    """End the request at once, on every stage in the same turn; its tokens are not kept in the prefix cache.

    It may have finished already where the frame was right, or wait for its resume after a pause that read the frame.
    A step of it may be in flight, a chunk of its prompt or the next round: that step finds no owner for its row, and
    what is written to the row from now on comes behind it.
    """
    refused = scheduler.refused_requests.pop(order.rid, None)
    for req in _distinct(scheduler) if refused is None else (refused,):
        if req.rid == order.rid and not req.finished() and (req.kv.holds_kv or req.is_retracted):
            scheduler.stage_loop.engine.wait_for_launched()
            _end(scheduler, req)


def _end(scheduler, req: Req) -> None:
    prepare_abort(req, MARK, HTTPStatus.INTERNAL_SERVER_ERROR)
    scheduler._release_aborted_request(req)
    if req.kv.holds_kv:
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    if scheduler.chunked_req is req:
        scheduler.chunked_req = None  # else its next chunk would be launched
    if req in scheduler.waiting_queue:
        scheduler.waiting_queue.remove(req)
    scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=req.finished_reason.to_json()), req)


def _distinct(scheduler) -> Iterable[Req]:
    """All requests that are not new: in batches, or retracted ones that wait."""
    batches = (*scheduler.running_mbs, *scheduler.last_mbs, *scheduler.mbs)
    found = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
    found |= {id(req): req for req in scheduler.waiting_queue if req.is_retracted}
    return found.values()
