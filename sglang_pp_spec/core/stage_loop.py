"""The loop of one pipeline stage, engine-free: one slot's turn after the other, in the order of ``core.ring``.

A turn, on stage s of P::

    apply the frame of the slot's previous step     the only wait: this slot cannot go on without it
    take requests in, pass them on
    decide the slot's next batch                    the same decision on every stage
    receive hidden states                           not on stage 0
    launch                                          trees rebuilt, layers run; last stage: verify, extend, draft
    send hidden states on at once                   last stage: send the frame to every earlier stage
    post the receive of the frame

Nothing else waits for a frame, so P slots keep P stages busy. The loop owns identity, order and the refusal of
frames; an ``Engine`` owns requests, batches and the forward; a ``Transport`` moves frames. The server and the ring
simulator of the tests run this same loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from .errors import FrameRefused
from .frame import FrameKind, FramePayload, begin_frame, check_frame
from .identity import RowIdentity
from .layout import FrameLayout
from .ledger import Launch, Ledger
from .refusal import affected_rows, degenerate
from .ring import Operation, turn_operations

Batch = TypeVar("Batch")


class BatchRow(NamedTuple):
    """One request of a batch as the engine sees it."""

    rid: str
    owner: object  # the engine's request object, weakly held: another one under the same rid is another request
    rebuilds: int  # how often its state was rebuilt (retractions)
    samples: bool  # False for a middle prefill chunk


@dataclass
class Turn(Generic[Batch]):
    """A launched batch until its frame is applied."""

    launch: Launch
    batch: Batch
    forward: object = None  # what the engine must remember of the forward, as it was at launch
    refused_rows: tuple[int, ...] = ()  # rows the frame was wrong for: no token of them reaches a request


@dataclass(frozen=True)
class ArrivedFrame:
    """A frame of [1 + capacity, width] int64: on the stage's device, and its complete host copy."""

    device: Tensor
    host: Tensor


class Transport(Protocol):
    """Moves frames from the last stage to all others; a slot has at most one frame under way."""

    def send(self, slot: int, frame: Tensor) -> None:
        """Last stage: start sending; keeps the frame until the slot's next one."""

    def post(self, slot: int) -> None:
        """Earlier stages: post the receive of the slot's frame."""

    def fetch(self, slot: int) -> ArrivedFrame:
        """Wait for the slot's frame; on the last stage it is the one sent."""


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

    def apply(self, turn: Turn[Batch], frame: ArrivedFrame, live: Sequence[RowIdentity]) -> None:
        """Apply a checked frame; ``live`` names the batch's requests now."""

    def settle(self, slot: int, turn: Turn[Batch]) -> Sequence[bool]:
        """The turn is over: release what it held. Per launched row, whether its request is finished."""

    def idle(self) -> None:
        """A whole round of slots had nothing to do."""


class RefusalPolicy(Protocol[Batch]):
    """An engine may offer this besides ``Engine``; without it a refused frame stops the stage."""

    def refused(self, turn: Turn[Batch], rows: Sequence[int], reason: FrameRefused) -> bool:
        """The frame of ``turn`` is wrong for ``rows``: True to go on, after seeing to the end of their requests.

        They must be over on every stage before the slot is scheduled in this turn: elsewhere the frame may have
        ended them. Only stage 0 can promise that, with the requests it is about to take in and pass on.
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
    ) -> None:
        self.engine = engine
        self.transport = transport
        self.layout = layout
        self.num_slots = num_slots
        self.operations = turn_operations(stage, num_stages)
        self.ledger = Ledger(epoch=epoch, num_slots=num_slots)
        self.turns: list[Turn[Batch] | None] = [None] * num_slots
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
        turn: Turn[Batch] | None = None
        proxy: object = None
        frame: Tensor | None = None
        for operation in self.operations:
            if operation is Operation.APPLY_FRAME:
                self.apply(slot)
            elif operation is Operation.TAKE_REQUESTS:
                self.engine.enter(slot)  # requests are handled against the slot as applying left it
                self.engine.take_requests()
            elif operation is Operation.SCHEDULE:
                turn = self._open_turn(slot)
                if turn is None:
                    break
            elif operation is Operation.RECEIVE_PROXY:
                proxy = self.engine.receive_proxy()
            elif operation is Operation.LAUNCH:
                assert turn is not None
                frame = self._launch(turn, proxy)
            elif operation is Operation.SEND_PROXY:
                assert turn is not None
                self.engine.send_proxy(turn)
            elif operation is Operation.SEND_FRAME:
                assert frame is not None
                self.transport.send(slot, frame)
            elif operation is Operation.POST_FRAME:
                self.transport.post(slot)
        self.step += 1
        return turn is not None

    def apply(self, slot: int) -> None:
        """Wait for the frame of the slot's step, refuse or apply it; at once if the slot launched nothing."""
        turn = self.turns[slot]
        if turn is None:
            return
        frame = self._checked(turn, self.transport.fetch(slot))
        live = self._identities(self.engine.rows(turn.batch), begin=False)
        self.engine.apply(turn, frame, live)
        self.ledger.settle(turn.launch)
        self.turns[slot] = None
        for identity, finished in zip(turn.launch.identities, self.engine.settle(slot, turn), strict=True):
            if finished:
                self.ledger.retire(identity)

    def _checked(self, turn: Turn[Batch], frame: ArrivedFrame) -> ArrivedFrame:
        """``frame`` if it is the turn's; else what the engine's policy allows in its place, or ``FrameRefused``."""
        launch = turn.launch
        try:
            check_frame(frame.host, launch.header, launch.identities, self.layout, samples=launch.samples)
        except FrameRefused as refused:
            policy = getattr(self.engine, "refused", None)
            rows = affected_rows(frame.host, launch, self.layout)
            if policy is None or not policy(turn, rows, refused):
                raise
            turn.refused_rows = rows
            return ArrivedFrame(
                device=degenerate(frame.device, launch, self.layout, rows),
                host=degenerate(frame.host, launch, self.layout, rows),
            )
        return frame

    def drain(self) -> None:
        """Apply every frame in flight, oldest step first: afterwards nothing is in flight."""
        waiting = [turn.launch.header for turn in self.turns if turn is not None]
        for header in sorted(waiting, key=lambda header: header.step):
            self.engine.enter(header.slot)
            self.apply(header.slot)

    def identify(self, batch: Batch) -> list[RowIdentity]:
        """Who the requests of ``batch`` are now, in order."""
        return self._identities(self.engine.rows(batch))

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
        turn = self.turns[slot] = Turn(launch, batch)
        return turn

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
