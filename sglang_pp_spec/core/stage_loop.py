"""The loop of one pipeline stage, engine-free: one slot's turn after the other, in the order of ``core.ring``.

A turn, on stage s of P::

    adopt the frame of the slot's previous step     lengths and trees, on the device; nothing is read
    take requests in, pass them on
    decide the slot's next batch                    the same decision on every stage
    receive hidden states                           not on stage 0
    launch                                          trees rebuilt, layers run; last stage: verify, extend, draft
    send hidden states on at once                   last stage: send the frame to every earlier stage
    post the receive of the frame
    read the previous step's frame, account for it  the wait of a round; the devices are busy with this step meanwhile

Without overlap the frame is read, adopted and accounted for at the start of the turn; with ``Overlap.ACCOUNTING`` it
is read there and accounted for at the end. Nothing else waits for a frame in any mode, so P slots keep P stages busy.
The loop owns identity, order and the refusal of frames; an ``Engine`` owns requests, batches and the forward; a
``Transport`` moves frames. The server and the ring simulator of the tests run this same loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from .errors import FrameRefused
from .frame import FrameKind, FramePayload, begin_frame, check_frame
from .guard import guarded
from .identity import RowIdentity
from .layout import FrameLayout
from .ledger import Launch, Ledger
from .refusal import affected_rows, degenerate
from .ring import Operation, Overlap, turn_operations

Batch = TypeVar("Batch")


class BatchRow(NamedTuple):
    """One request of a batch as the engine sees it."""

    rid: str
    owner: object  # the engine's request object, weakly held: another one under the same rid is another request
    rebuilds: int  # how often its state was rebuilt (retractions)
    samples: bool  # False for a middle prefill chunk


class ArrivedFrame(Protocol):
    """A frame of [1 + capacity, width] int64 that has arrived as far as the device is concerned."""

    @property
    def device(self) -> Tensor:
        """The frame on the stage's device, valid for work that is queued from now on."""

    def read(self) -> Tensor:
        """Wait for its complete host copy."""


@dataclass
class Turn(Generic[Batch]):
    """A launched batch until its frame was accounted for."""

    launch: Launch
    batch: Batch
    forward: object = None  # what the engine must remember of the forward, as it was at launch
    arrived: ArrivedFrame | None = None
    on_host: Tensor | None = None  # the frame, checked; None until it was read
    adoptable: Tensor | None = None  # the frame on the device as it may be used: checked, guarded or made here
    is_settled: bool = False
    refused_rows: tuple[int, ...] = ()  # rows the frame was wrong for: no token of them reaches a request


class Transport(Protocol):
    """Moves frames from the last stage to all others; a slot has at most one frame under way."""

    def send(self, slot: int, frame: Tensor) -> None:
        """Last stage: start sending; keeps the frame until the slot's next one."""

    def post(self, slot: int) -> None:
        """Earlier stages: post the receive of the slot's frame."""

    def fetch(self, slot: int) -> ArrivedFrame:
        """The slot's frame; on the last stage it is the one sent. On a GPU the host does not wait for it."""


class Engine(Protocol[Batch]):
    """What the loop needs of a serving engine, on one stage."""

    def enter(self, slot: int) -> None:
        """The slot's turn begins."""

    def take_requests(self) -> None:
        """Take requests in and pass them to the next stage."""

    def schedule(self, slot: int) -> Batch | None:
        """The slot's next batch; the same decision on every stage."""

    def rows(self, batch: Batch) -> Sequence[BatchRow]:
        """The requests of a batch now, in order."""

    def kind(self, batch: Batch) -> FrameKind:
        """The kind of step the batch is."""

    def receive_proxy(self) -> object:
        """Hidden states from the previous stage."""

    def run(self, turn: Turn[Batch], proxy: object) -> tuple[FramePayload, Sequence[int]] | None:
        """Run this stage's part. Last stage: the frame's payload and the drafts per row (0 or num_drafts)."""

    def fill_frame(self, started: Tensor, payload: FramePayload) -> Tensor:
        """``started`` (host) on the stage's device with ``payload`` in it (``fill_rows``), in order behind ``run``.

        The payload's tensors are still being computed when this is called: whatever stream ``run`` used, the rows
        must be filled on the same one.
        """

    def send_proxy(self, turn: Turn[Batch]) -> None:
        """Start sending hidden states to the next stage."""

    def needs_account(self, batch: Batch) -> bool:
        """Whether ``batch`` can only be launched here once its previous step is accounted for (a grammar's mask)."""

    def adopt(self, turn: Turn[Batch], live: Sequence[RowIdentity]) -> None:
        """Adopt ``turn.adoptable`` (``core.apply.adopt_frame``); ``live`` names the batch's requests now."""

    def account(self, turn: Turn[Batch]) -> Sequence[bool]:
        """Account for ``turn.on_host`` (``core.apply.account_frame``) and release what the turn held.

        Returns whether its request is finished, per launched row.
        """

    def idle(self) -> None:
        """A whole round of slots had nothing to do."""


class RefusalPolicy(Protocol[Batch]):
    """An engine may offer this besides ``Engine``; without it a refused frame stops the stage."""

    def refused(self, turn: Turn[Batch], rows: Sequence[int], reason: FrameRefused) -> bool:
        """The frame of ``turn`` is wrong for ``rows``: True to go on, after seeing to the end of their requests.

        They must be over on every stage before anything is scheduled after this: elsewhere the frame may have
        ended them. Only stage 0 can promise that, with the requests it takes in and passes on next.
        False stops the stage with ``reason``.
        """


class StageLoop(Generic[Batch]):
    """Runs the turns of one stage."""

    def __init__(
        self,
        engine: Engine[Batch],
        transport: Transport,
        layout: FrameLayout,
        *,
        stage: int,
        num_stages: int,
        num_slots: int,
        epoch: int,
        overlap: Overlap = Overlap.OFF,
    ) -> None:
        self.engine = engine
        self.transport = transport
        self.layout = layout
        self.num_slots = num_slots
        self.operations = turn_operations(stage, num_stages, overlap=overlap)
        self.makes_frames = Operation.SEND_FRAME in self.operations
        self.ledger = Ledger(epoch=epoch, num_slots=num_slots, max_unaccounted=2 if overlap else 1)
        self.turns: list[Turn[Batch] | None] = [None] * num_slots  # the slot's newest step
        self.previous: Turn[Batch] | None = None  # in a turn: the slot's step before this turn's
        self.step = 0

    def run_round(self) -> bool:
        """One turn of every slot; False, after the engine's idle work, if none had anything to launch."""
        busy = [self.take_turn(slot) for slot in range(self.num_slots)]
        if not any(busy):
            self.ledger.check_integrity()
            self.engine.idle()
        return any(busy)

    def take_turn(self, slot: int) -> bool:
        """One slot's turn; False if the slot had nothing to launch."""
        self.engine.enter(slot)
        previous = self.previous = self.turns[slot]
        turn: Turn[Batch] | None = None
        proxy: object = None
        frame: Tensor | None = None
        for operation in self.operations:
            if operation is Operation.READ_FRAME:
                self._read(previous)
            elif operation is Operation.ADOPT_FRAME:
                self._adopt(previous)
            elif operation is Operation.ACCOUNT_FRAME:
                self._account(previous)
            elif operation is Operation.TAKE_REQUESTS:
                self.engine.enter(slot)  # requests are handled against the slot as adopting left it
                self.engine.take_requests()
            elif operation is Operation.SCHEDULE:
                turn = self.turns[slot] = self._open_turn(slot)
            elif turn is None:
                continue  # nothing was scheduled: no forward, no message
            elif operation is Operation.RECEIVE_PROXY:
                proxy = self.engine.receive_proxy()
            elif operation is Operation.LAUNCH:
                if self.engine.needs_account(turn.batch):
                    self._read(previous)
                    self._account(previous)
                frame = self._launch(turn, proxy)
            elif operation is Operation.SEND_PROXY:
                self.engine.send_proxy(turn)
            elif operation is Operation.SEND_FRAME:
                assert frame is not None
                self.transport.send(slot, frame)
            elif operation is Operation.POST_FRAME:
                self.transport.post(slot)
        self.previous = None
        self.step += 1
        return turn is not None

    def _fetch(self, turn: Turn[Batch]) -> ArrivedFrame:
        if turn.arrived is None:
            turn.arrived = self.transport.fetch(turn.launch.header.slot)
        return turn.arrived

    def _read(self, turn: Turn[Batch] | None) -> None:
        """Wait for the frame on the host; ``FrameRefused`` if it is not the turn's and the policy does not help."""
        if turn is None or turn.on_host is not None:
            return
        frame, launch = self._fetch(turn).read(), turn.launch
        try:
            check_frame(frame, launch.header, launch.identities, self.layout, samples=launch.samples)
        except FrameRefused as refused:
            policy = getattr(self.engine, "refused", None)
            rows = affected_rows(frame, launch, self.layout)
            if policy is None or not policy(turn, rows, refused):
                raise
            turn.refused_rows = rows
            frame = degenerate(frame, launch, self.layout, rows)
        turn.on_host = frame

    def _adopt(self, turn: Turn[Batch] | None) -> None:
        """Take the frame over on the device: as it was checked, or guarded if nobody has read it.

        The stage that made the frame has it from itself: there is no other account to compare it with.
        """
        if turn is None or turn.adoptable is not None:
            return
        frame = self._fetch(turn).device
        if turn.on_host is None and not self.makes_frames:
            frame = guarded(frame, turn.launch, self.layout)
        elif turn.refused_rows:
            frame = degenerate(frame, turn.launch, self.layout, turn.refused_rows)
        turn.adoptable = frame
        self.engine.adopt(turn, self._identities(self.engine.rows(turn.batch), begin=False))
        self.ledger.adopt(turn.launch)

    def _account(self, turn: Turn[Batch] | None) -> None:
        """The frame's tokens reach their requests; those that ended have no further life."""
        if turn is None or turn.is_settled:
            return
        finished = self.engine.account(turn)
        self.ledger.settle(turn.launch)
        turn.is_settled = True
        for identity, is_over in zip(turn.launch.identities, finished, strict=True):
            if is_over:
                self.ledger.retire(identity)

    def drain(self) -> None:
        """Adopt and account for every frame in flight, oldest step first: afterwards nothing is."""
        waiting = [turn for turn in self.turns if turn is not None]
        for turn in sorted(waiting, key=lambda turn: turn.launch.header.step):
            self.engine.enter(turn.launch.header.slot)
            self._read(turn)
            self._adopt(turn)
            self._account(turn)

    def _identities(self, rows: Sequence[BatchRow], begin: bool = True) -> list[RowIdentity]:
        identify = self.ledger.identify
        return [identify(row.rid, owner=row.owner, rebuilds=row.rebuilds, begin=begin) for row in rows]

    def _open_turn(self, slot: int) -> Turn[Batch] | None:
        batch = self.engine.schedule(slot)
        if batch is None:
            return None
        rows = self.engine.rows(batch)
        launch = self.ledger.launch(
            step=self.step,
            slot=slot,
            kind=self.engine.kind(batch),
            identities=self._identities(rows),
            samples=[row.samples for row in rows],
        )
        return Turn(launch, batch)

    def _launch(self, turn: Turn[Batch], proxy: object) -> Tensor | None:
        """Run this stage's part; on the last stage, the step's frame."""
        outcome = self.engine.run(turn, proxy)
        if outcome is None:
            return None
        payload, num_drafts = outcome
        launch = turn.launch
        started = begin_frame(
            launch.header,
            launch.identities,
            self.layout,
            num_accepted=[int(samples) for samples in launch.samples],
            num_drafts=num_drafts,
        )
        return self.engine.fill_frame(started, payload)
