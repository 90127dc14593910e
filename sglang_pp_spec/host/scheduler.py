"""Our scheduler: SGLang's, with its own loop, last-stage worker and verify rebuild when PP x spec is on."""

from __future__ import annotations

import logging
from dataclasses import replace

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_device, get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.utils import DynamicGradMode

from ..core.errors import PPSpecError, UnsupportedCombination
from ..core.placement import Action, Placement, decide
from ..core.settings import Settings
from ..core.stage_loop import StageLoop
from ..observe.timeline import Timeline
from .arguments import check_target, is_eagle3
from .engine import SchedulerEngine
from .host_plans import prefer_host_plans, uses_flashinfer
from .overlap import agree_on_overlap
from .refused import MARK, end_refused
from .shape import frame_layout, tree_shape
from .slot_share import SlotShare
from .tail_draft import TailDraftWorker
from .transport import FrameTransport
from .turn import StageTurn, record_of
from .verify import rebuild_verify_input

logger = logging.getLogger(__name__)


class PPSpecScheduler(Scheduler):
    """Scheduler of one stage.

    Target:       sglang.srt.managers.scheduler.Scheduler   (class REPLACE by a subclass)
    Why:          the host's loop receives a round's output before it launches the next forward and carries no
                  identity on the relay.
    How:          overrides below, each a small method of the host; with one stage or without speculation every
                  one of them calls ``super()``.
    Upstream:     sglang #30775 (built-in PP x spec), #40499 (launch order)
    Remove when:  the host launches verify rounds before it exchanges outputs and checks what it applies.
    """

    settings: Settings = Settings()
    stage_loop: StageLoop[ScheduleBatch] | None = None
    launching: StageTurn | None = None  # the turn whose forward is being launched

    @property
    def runs_pp_spec(self) -> bool:
        return get_parallel().pp_size > 1 and not self.spec_algorithm.is_none()

    def init_model_config(self) -> None:
        """Refuse targets that frames carry too little for, before their weights are loaded."""
        super().init_model_config()
        if get_parallel().pp_size > 1 and self.server_args.speculative_algorithm is not None:
            try:
                check_target(self.model_config, eagle3=is_eagle3(self.server_args), flashinfer=uses_flashinfer())
            except UnsupportedCombination as refused:
                raise SystemExit(str(refused)) from refused
            prefer_host_plans(tree_shape())

    def maybe_init_draft_worker(self) -> None:
        """Build the drafter on the last stage only; it sees a pipeline of size 1."""
        if not self.runs_pp_spec:
            return super().maybe_init_draft_worker()
        parallel = get_parallel()
        decision = decide(self.spec_algorithm.name, Placement.LAST_STAGE_LOCAL, parallel.pp_size, parallel.pp_rank)
        if decision.action is Action.REFUSE:
            raise SystemExit(f"sglang_pp_spec: {decision.reason}")
        self.external_corpus_manager = None
        self.draft_worker = None
        if decision.action is Action.BUILD:
            self.draft_worker = TailDraftWorker(
                server_args=self.server_args,
                gpu_id=get_device().gpu_id,
                nccl_port=self.nccl_port,
                target_worker=self.tp_worker,
            )
        logger.info(
            "sglang_pp_spec drafter, stage %d: %s (%s); %.1f MiB of weights here",
            parallel.pp_rank,
            decision.action.value,
            decision.reason,
            (self.draft_worker.preloaded_weights_bytes if self.draft_worker else 0) / 2**20,
        )

    def init_batch_result_processor(self) -> None:
        """Rows of requests that have ended are passed over, as under SGLang's own overlap: our rounds have them."""
        super().init_batch_result_processor()
        if self.runs_pp_spec:
            self.batch_result_processor = replace(self.batch_result_processor, enable_overlap=True)

    @DynamicGradMode()
    def event_loop_pp(self) -> None:
        """Our loop instead of the host's."""
        if not self.runs_pp_spec:
            return super().event_loop_pp()
        self.stage_loop = self._open_stage_loop()
        try:
            while not self.gracefully_exit:
                self.stage_loop.run_round()
        except RuntimeError as error:
            if "gloo" not in str(error):
                raise
            stage = self.pp_group.rank_in_group
            raise PPSpecError(f"stage {stage} lost another stage of the pipeline: {error}") from error

    def _open_stage_loop(self) -> StageLoop[ScheduleBatch]:
        self.init_pp_loop_state()
        self.refused_requests: dict[str, Req] = {}
        self.slot_share = SlotShare(self)
        stage, num_stages = self.pp_group.rank_in_group, self.pp_group.world_size
        layout = frame_layout(capacity=self.req_to_token_pool.size)
        is_first_rank = get_parallel().tp_rank == 0  # one file per stage, whatever its tensor-parallel size
        timeline = Timeline.open(self.settings.timeline if is_first_rank else "", stage)
        transport = FrameTransport(self, layout, timeline)
        transport.channel.open()
        loop = StageLoop(
            SchedulerEngine(self, layout, timeline),
            transport,
            layout,
            stage=stage,
            num_stages=num_stages,
            num_slots=self.pp_loop_size,
            epoch=transport.agree_on_epoch(),
            overlap=agree_on_overlap(self),
        )
        logger.info(
            "sglang_pp_spec: stage %d of %d, %d slots, %s, a frame is %s int64",
            stage,
            num_stages,
            loop.num_slots,
            layout.shape,
            layout.size,
        )
        return loop

    def _pp_spec_rebuild_verify_input(self, batch: ScheduleBatch) -> None:
        """Called by the host's ``run_batch`` on every stage before a verify forward."""
        if not batch.reqs:
            shape = tree_shape()
            batch.spec_info = EagleVerifyInput.create_idle_input(
                topk=shape.topk,
                spec_steps=shape.num_steps,
                num_verify_tokens=shape.num_draft_tokens,
                device=self.device,
            )
            return
        runner = self.tp_worker.model_runner
        batch.spec_info = rebuild_verify_input(
            batch,
            batch.spec_info.rows.aligned(self.launching.launch.identities),
            attn_backend=runner.attn_backend,
            context_len=runner.model_config.context_len,
        )

    def get_num_allocatable_reqs(self, running_bs: int, *args, **kwargs) -> int:
        """Leave requests for the other slots; see ``host/slot_share.py``."""
        allowed = super().get_num_allocatable_reqs(running_bs, *args, **kwargs)
        return allowed if self.stage_loop is None else self.slot_share.allocatable(allowed, running_bs)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        """A prompt whose last chunk would overfill this slot waits for the turn of one that has room.

        A request decodes in the slot that its last chunk ran in, and the host lets a continuing chunk into any slot:
        with prompts of as many chunks as there are slots, all of them would decode in one.
        """
        if self.stage_loop is not None and self.slot_share.would_overfill(running_batch):
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return super().get_new_batch_prefill(running_batch)

    def _pp_microbatches_drained(self) -> bool:
        """A request whose prefill was applied is in its slot's last batch alone until the slot schedules again."""
        drained = super()._pp_microbatches_drained()
        return drained and (self.stage_loop is None or not any(_has_live(batch) for batch in self.last_mbs))

    def _collect_inflight_batches(self) -> list[ScheduleBatch | None]:
        """There too a request can be aborted."""
        batches = super()._collect_inflight_batches()
        return batches if self.stage_loop is None else [*batches, *self.last_mbs]

    def _reqs_finishing_inflight(self, batch: ScheduleBatch) -> list[Req]:
        """With overlap: requests for whose last token by length the host has yet to account need no further round."""
        if self.stage_loop is None:
            return super()._reqs_finishing_inflight(batch)
        previous = self.stage_loop.previous
        if previous is None or previous.is_settled:
            return []
        unaccounted = set(record_of(previous).reqs)
        return [req for req in batch.reqs if req in unaccounted and req.next_output_finishes_by_length()]

    def abort_request(self, recv_req: AbortReq) -> None:
        """Besides the host's aborts: the end of a request that a frame was refused for, at once."""
        if recv_req.abort_message == MARK:
            return end_refused(self, recv_req)
        super().abort_request(recv_req)

    def pause_generation(self, recv_req) -> None:
        """Retract on pause touches every slot, after all frames in flight were applied.

        The host looks at the current slot only and may retract a request whose chunk is still in flight elsewhere.
        """
        if self.stage_loop is None or recv_req.mode != "retract":
            return super().pause_generation(recv_req)
        self.stage_loop.drain()
        self.stage_loop.engine.wait_for_tables()
        for slot in range(self.stage_loop.num_slots):
            self.running_batch, self.last_batch = self.running_mbs[slot], self.last_mbs[slot]
            for batch in (self.running_batch, self.last_batch):
                if batch is not None:  # a chunked prompt was in the last batch of several slots
                    batch.reqs = [req for req in batch.reqs if req.kv.holds_kv]
            super().pause_generation(recv_req)
            self.running_mbs[slot], self.last_mbs[slot], self.mbs[slot] = self.running_batch, None, None


def _has_live(batch: ScheduleBatch | None) -> bool:
    """Whether a request of ``batch`` still holds its place: neither finished nor back in the queue."""
    return batch is not None and any(not req.finished() and not req.is_retracted for req in batch.reqs)
