"""SGLANG_PP_SPEC_ON_MISMATCH=abort: the requests a wrong frame was wrong for are ended, and the engine goes on.

Only stage 0 can do that: it takes requests in right after it applied the frame, so the order to end a request reaches
every stage in this turn, before the slot is scheduled again. A refusal on any other stage stops the engine.
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
from .turn import StageTurn

logger = logging.getLogger(__name__)

MARK = "sglang_pp_spec: a frame was refused for this request"


def order_aborts(scheduler, turn: StageTurn, rows: Sequence[int], reason: FrameRefused) -> bool:
    """On stage 0 under the abort policy: queue the end of the affected requests; False stops the engine."""
    if scheduler.settings.on_mismatch != "abort" or not scheduler.pp_group.is_first_rank:
        return False
    rids = [turn.launch.identities[row].rid for row in rows]
    logger.error("%s; aborting %s", reason, rids)
    scheduler._deferred_input_requests.extend(AbortReq(rid=rid, abort_message=MARK) for rid in rids)
    return True


def end_refused(scheduler, order: AbortReq) -> None:
    """End the request at once, on every stage in the same turn; its tokens are not kept in the prefix cache.

    The request belongs to the slot whose turn it is, and its frame has just been applied, so nothing of it is in
    flight. It may have finished already where the frame was right.
    """
    for req in _distinct(scheduler.running_batch, scheduler.last_batch):
        if req.rid == order.rid and not req.finished() and req.kv.holds_kv:
            prepare_abort(req, MARK, HTTPStatus.INTERNAL_SERVER_ERROR)
            scheduler._release_aborted_request(req)
            release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
            finished = req.finished_reason.to_json()
            scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=finished), req)


def _distinct(*batches) -> Iterable[Req]:
    return {id(req): req for batch in batches if batch is not None for req in batch.reqs}.values()
