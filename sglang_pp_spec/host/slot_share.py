"""How requests are spread over slots: a slot that takes all of them leaves the other stages idle."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.runtime_context import get_parallel


class SlotShare:
    """A fair share of the requests for every slot, the same on every stage: it follows from what all of them know."""

    def __init__(self, scheduler) -> None:
        self.scheduler = scheduler
        self._slot = 0
        self._share: int | None = None  # of this turn, once it was asked for: most turns admit nobody
        self._full_at: dict[int, int] = {}  # slot -> the share that it was full by when it turned requests away

    def begin_turn(self, slot: int, running_batch: ScheduleBatch) -> None:
        """A slot that was full by a smaller share than this turn's is open again.

        A slot that the host closed for want of KV stays closed until the host opens it.
        """
        self._slot, self._share = slot, None
        if slot in self._full_at and self.share > self._full_at[slot]:
            del self._full_at[slot]
            running_batch.batch_is_full = False

    @property
    def share(self) -> int:
        """How many requests a slot may hold in this turn."""
        if self._share is None:
            self._share = self.fair_share()
        return self._share

    def allocatable(self, allowed: int, running_bs: int) -> int:
        """What is left of ``allowed`` further requests, the host's own limit, for a slot that runs ``running_bs``."""
        if self.scheduler.enable_priority_preemption:
            return allowed  # the host would make room in this slot, at the cost of a request that runs
        room = self.share - running_bs
        if room <= 0 < allowed:
            self._full_at[self._slot] = self.share
        return min(allowed, room)

    def would_overfill(self, running_batch: ScheduleBatch) -> bool:
        """Whether the last chunk of a prompt would bring more requests into this slot than its share.

        Never true of all slots at once: the share counts the chunked request, which none of them runs.
        """
        req = self.scheduler.chunked_req
        if req is None or req.seqlen - req.prefix_len > self.scheduler.chunked_prefill_size:
            return False
        return len(running_batch.reqs) >= min(self.share, get_parallel().pp_max_micro_batch_size)

    def fair_share(self) -> int:
        """Requests per slot if all that run or wait were spread over as many slots as there are stages.

        SGLANG_PP_SPEC_SLOT_FILL may ask for fuller slots: where a step costs much the same for few rows as for many
        (reading the weights, or the host's work), two half-full slots take longer than a full one.
        """
        scheduler = self.scheduler
        # A prefill in flight is in ``mbs`` alone; one whose frame was just applied, in ``last_mbs``; a prompt between
        # two of its chunks may be in none of them.
        batches = (*scheduler.running_mbs, *scheduler.mbs, *scheduler.last_mbs)
        live = {req for batch in batches if batch is not None for req in batch.reqs if not req.finished()}
        if scheduler.chunked_req is not None and not scheduler.chunked_req.finished():
            live.add(scheduler.chunked_req)
        spread = -(-(len(live) + len(scheduler.waiting_queue)) // scheduler.pp_group.world_size)
        return max(scheduler.settings.slot_fill, spread)
