"""SGLang's scheduler as the ``Engine`` of our loop: each operation of a turn in the host's own terms."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from torch import Tensor

from ..core.apply import account_frame, adopt_frame
from ..core.errors import FrameRefused
from ..core.faults import Fault
from ..core.frame import FrameKind, FramePayload, fill_rows
from ..core.identity import RowIdentity
from ..core.layout import FrameLayout
from ..core.poison import poison_free_memory
from ..core.stage_loop import BatchRow
from ..core.upload import on_device
from ..observe.timeline import Timeline
from .aux_states import of_earlier_stages
from .commit import SchedulerState
from .extras import collect_extras, send_extras
from .mm_embeds import embeds_in
from .payload import frame_payload
from .proxy import ProxyLink
from .refused import order_aborts
from .reserve import reserve_draft_slots
from .rows import kind_of, sampling_rows
from .streams import keep_until_read, uses_streams
from .turn import ForwardRecord, StageTurn, record_of


class SchedulerEngine:
    """One stage's scheduler, seen by ``core.stage_loop``."""

    def __init__(self, scheduler, layout: FrameLayout, timeline: Timeline) -> None:
        self.scheduler = scheduler
        self.layout = layout
        self.timeline = timeline
        self.state = SchedulerState(scheduler, layout)
        self.proxy_link = ProxyLink(scheduler, layout.shape.num_draft_tokens)
        self._request_sends: deque[list] = deque()
        self._scheduled: ScheduleBatch | None = None
        fault = Fault.parse(scheduler.settings.fault) if scheduler.settings.fault else None
        self._fault = fault if fault and fault.kind == "diverge" and scheduler.pp_group.is_first_rank else None
        self._num_scheduled = 0
        self._has_streams = uses_streams(scheduler)
        self._reading: list = []  # events: steps that still read the KV tables are done

    def enter(self, slot: int) -> None:
        """SGLang's loops keep the batch of the current turn on the scheduler; requests are handled against it."""
        self.timeline.slot = slot
        self.scheduler.running_batch = self.scheduler.running_mbs[slot]
        self.scheduler.last_batch = self.scheduler.last_mbs[slot]

    def take_requests(self) -> None:
        """Requests reach every stage in the turn of the same number."""
        scheduler = self.scheduler
        self.wait_for_tables()
        if scheduler.settings.poison:
            self._poison()
        with self.timeline.span("requests"):
            requests = scheduler.ingest_requests()
            if scheduler.pp_group.is_last_rank:
                return
            self._request_sends.append(scheduler._pp_send_pyobj_to_next_stage(requests, async_send=True))
            if len(self._request_sends) > scheduler.pp_loop_size:
                scheduler._pp_commit_comm_work(self._request_sends.popleft())

    def _poison(self) -> None:
        """Now the host has let go of turns whose work the device may still have before it."""
        scheduler = self.scheduler
        streams = (scheduler.forward_stream, scheduler.copy_stream) if self._has_streams else ()
        poison_free_memory(scheduler.device, streams)

    def schedule(self, slot: int) -> ScheduleBatch | None:
        """The host's own scheduling; nothing while the engine is paused. Reserves KV for the drafts of prompts."""
        scheduler = self.scheduler
        self.enter(slot)
        self._scheduled = scheduler.mbs[slot] = scheduler.cur_batch_for_debug = None
        if scheduler._engine_paused:
            return None
        if scheduler.chunked_req is not None and self.state.is_recurrent:
            self.wait_for_launched()  # the state its last chunk leaves may be copied for the prefix cache
        with self.timeline.span("schedule"):
            scheduler.slot_share.begin_turn(slot, scheduler.running_batch)
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = scheduler.running_mbs[slot] = plan.running_batch
            batch = plan.batch_to_run or None
            if batch is None:
                scheduler.last_mbs[slot] = None
            elif batch.forward_mode.is_extend():
                reserve_draft_slots(batch)
        if batch is not None and self._fault is not None:
            self._diverge(batch)
        self._scheduled = scheduler.mbs[slot] = scheduler.cur_batch_for_debug = batch
        return batch

    def _diverge(self, batch: ScheduleBatch) -> None:
        """The fault ``diverge@N``, for tests: once, at the N-th batch or later, stage 0 drops a request by itself."""
        self._num_scheduled += 1
        if self._num_scheduled >= self._fault.frame and batch.forward_mode.is_decode() and len(batch.reqs) > 1:
            batch.filter_batch(keep_indices=list(range(len(batch.reqs) - 1)))
            self._fault = None

    def rows(self, batch: ScheduleBatch) -> list[BatchRow]:
        """A retraction rebuilds a request's state and so makes it another incarnation."""
        return [
            BatchRow(req.rid, owner=req, rebuilds=req.retraction_count, samples=samples)
            for req, samples in zip(batch.reqs, sampling_rows(batch), strict=True)
        ]

    def kind(self, batch: ScheduleBatch) -> FrameKind:
        return kind_of(batch)

    def receive_proxy(self) -> object:
        """Hidden states of the batch that was just scheduled, from the previous stage."""
        assert self._scheduled is not None
        with self.timeline.span("receive"):
            return self.proxy_link.receive(self._scheduled)

    def run(self, turn: StageTurn, proxy: object) -> tuple[FramePayload, Sequence[int]] | None:
        """The host's ``run_batch`` on the forward stream; it rebuilds the trees through our scheduler's override."""
        scheduler, batch, header = self.scheduler, turn.batch, turn.launch.header
        record = turn.forward = ForwardRecord.before(batch)
        record.passes_on = self._passes_on(proxy)
        scheduler.launching = turn
        outcome = None
        with self.timeline.span(header.kind.name.lower(), header.step), scheduler.forward_stream_ctx:
            scheduler._pp_wait_forward_dependencies()
            result = scheduler.run_batch(batch, proxy)
            if batch.forward_mode.is_extend():
                batch.spec_info = None  # the trees of these requests come with the frame
            if scheduler.pp_group.is_last_rank:
                outcome = frame_payload(turn, result, self.layout.shape)
                record.extras = collect_extras(batch, result)
                result.logits_output = None  # a prefill's holds the hidden states of all its tokens
            launched = scheduler.device_module.Event()
            launched.record(scheduler.device_module.current_stream())
        record.after(batch, result, launched)
        self._let_go(proxy)
        if self.needs_account(batch) and self._has_streams:
            # The step before was accounted for already, so its ended requests' KV rows may be given away before this
            # step has read them: what the schedule stream writes comes behind this step.
            launched.wait()
        if record.extras is not None:
            record.sends.append(send_extras(scheduler, record.extras))
        return outcome

    def _passes_on(self, proxy: object) -> dict[str, Tensor]:
        """What is for the last stage's drafter. That stage has no next one, and keeps none until its turn ends."""
        return {} if self.scheduler.pp_group.is_last_rank else of_earlier_stages(proxy) | embeds_in(proxy)

    def _let_go(self, proxy: object) -> None:
        """A chunk's hidden states are large: their memory is free behind the forward, not when the turn ends."""
        if proxy is not None and self._has_streams:
            for part in proxy.tensors.values():
                if torch.is_tensor(part):  # the host sends a message type along
                    keep_until_read(part, self.scheduler.forward_stream)

    def fill_frame(self, started: Tensor, payload: FramePayload) -> Tensor:
        """Filled on the forward stream: elsewhere the rows would be read before the forward has written them."""
        if not self._has_streams:
            fill_rows(started, self.layout, payload)
            return started
        with self.scheduler.forward_stream_ctx:
            frame = on_device(started, torch.device(self.scheduler.device))
            fill_rows(frame, self.layout, payload)
        return frame

    def send_proxy(self, turn: StageTurn) -> None:
        """At once, behind the forward. Outputs of a CUDA graph are cloned: its next replay writes them again."""
        scheduler, record = self.scheduler, record_of(turn)
        tensors = record.result.pp_hidden_states_proxy_tensors.tensors
        if record.result.can_run_cuda_graph:
            with scheduler.forward_stream_ctx:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
                record.launched.record(scheduler.device_module.current_stream())
        with self.timeline.span("send", turn.launch.header.step):
            record.sends.append(self.proxy_link.send(turn.batch, tensors | record.passes_on, record.launched))

    def needs_account(self, batch: ScheduleBatch) -> bool:
        """A grammar's mask starts from the tokens of the round before; only the last stage masks."""
        return batch.has_grammar and self.scheduler.pp_group.is_last_rank

    def adopt(self, turn: StageTurn, live: Sequence[RowIdentity]) -> None:
        """Commit, advance and fold; see ``host/commit.py``. The launched batch becomes the slot's last batch."""
        header = turn.launch.header
        with self.timeline.span("adopt", header.step):
            adopt_frame(self.state, turn, self.layout, live)
        self.scheduler.last_mbs[header.slot] = self.scheduler.mbs[header.slot]

    def account(self, turn: StageTurn) -> list[bool]:
        """Tokens to their requests; then the step's sends: hidden states have arrived, extras soon will have."""
        record = record_of(turn)
        self._fence_newest(turn)
        if turn.launch.header.kind is not FrameKind.VERIFY:
            self.wait_for_tables()  # a finished prompt's row is rewritten with its cached prefix
        with self.timeline.span("account", turn.launch.header.step):
            account_frame(self.state, turn, self.layout)
        for work in record.sends:
            self.scheduler._pp_commit_comm_work(work)
        return [req.finished() for req in record.reqs]

    def _fence_newest(self, turn: StageTurn) -> None:
        """With overlap the slot's next step is launched, and still reads the KV tables."""
        newest = self.scheduler.stage_loop.turns[turn.launch.header.slot]
        if newest is None or newest is turn or newest.forward is None or not self._has_streams:
            return
        launched = record_of(newest).launched
        if launched is not None:
            self._reading.append(launched)

    def wait_for_tables(self) -> None:
        """What is written to the KV tables from now on comes behind the steps that still read them.

        The schedule stream waits, not the host; SGLang's own overlap loop calls this its WAR barrier. Accounting for
        a verified round lengthens free lists, and where a request ends puts its row into the prefix cache: that may
        write slots of the same KV below its committed length, behind which a surplus round's own slots lie. So the
        next slot's frame is adopted beside the step.
        """
        while self._reading:
            self._reading.pop().wait()

    def wait_for_launched(self) -> None:
        """What the schedule stream does from now on comes behind every launched step."""
        if self._has_streams:
            for turn in self.scheduler.stage_loop.turns:
                if turn is not None and turn.forward is not None and record_of(turn).launched is not None:
                    record_of(turn).launched.wait()

    def refused(self, turn: StageTurn, rows: Sequence[int], reason: FrameRefused) -> bool:
        """The policy for a refused frame; see ``host/refused.py``."""
        return order_aborts(self.scheduler, turn, rows, reason)

    def idle(self) -> None:
        """SGLang's idle work: leak checks, metrics, sleep. Paused is not idle: requests keep their places."""
        if self.scheduler._engine_paused:
            self.scheduler._record_scheduler_state_for_paused_engine()
            return
        self.scheduler._sched_idled = True
        self.scheduler.on_idle()
