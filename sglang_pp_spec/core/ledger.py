"""What a stage has launched and not yet applied, and who every request is right now.

Every stage keeps its own ledger; they stay equal because all stages launch the same steps in the same order, and a
stage that did not is found at its next frame, whose header and row identities come from the last stage's ledger.

The life of a step: ``launch`` (identities fixed, fence taken) -> frame arrives and is checked against the
``Launch`` -> state is changed -> ``settle`` (fence given back). ``discard`` ends a step without applying it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .errors import FenceViolation, LedgerFault
from .frame import FrameHeader, FrameKind
from .identity import RowIdentity


@dataclass(frozen=True)
class Launch:
    """One launched step as this stage knows it."""

    header: FrameHeader
    identities: tuple[RowIdentity, ...]
    samples: tuple[bool, ...]  # per row: does this step decide tokens of it (False: a middle prefill chunk)

    @cached_property
    def output_rows(self) -> list[RowIdentity]:
        return [i for i, samples in zip(self.identities, self.samples, strict=True) if samples]


@dataclass(slots=True)
class _Life:
    """The current incarnation of a request id: whose object it is and how often its state was rebuilt.

    The owner is not kept alive: a request that ends outside any step (aborted while it waits) is never retired.
    """

    owner: weakref.ref[object]
    rebuilds: int
    identity: RowIdentity


class Ledger:
    """Launched steps per slot, in-flight share per request, incarnation per request id."""

    def __init__(self, *, epoch: int, num_slots: int, max_in_flight: int = 1) -> None:
        self.epoch = epoch
        self.max_in_flight = max_in_flight
        self._launched: list[Launch | None] = [None] * num_slots
        self._in_flight: dict[RowIdentity, int] = {}
        self._lives: dict[str, _Life] = {}
        self._next_incarnation = 1

    def identify(self, rid: str, *, owner: object, rebuilds: int, begin: bool = True) -> RowIdentity:
        """The identity of a request now; a new owner or another rebuild count starts a new incarnation.

        Without ``begin`` no life starts: a request that has none is ``rid#0``, which no launched row ever is.
        """
        life = self._lives.get(rid)
        if life is None or life.rebuilds != rebuilds or life.owner() is not owner:
            if not begin:
                return RowIdentity(rid, 0)
            life = self._begin_life(rid, owner, rebuilds)
        return life.identity

    def _begin_life(self, rid: str, owner: object, rebuilds: int) -> _Life:
        identity = RowIdentity(rid, self._next_incarnation)
        self._next_incarnation += 1
        # The entry goes with its owner; ``retire`` does nothing where another life has begun meanwhile.
        life = _Life(weakref.ref(owner, lambda _: self.retire(identity)), rebuilds, identity)
        self._lives[rid] = life
        return life

    def is_current(self, identity: RowIdentity) -> bool:
        life = self._lives.get(identity.rid)
        return life is not None and life.identity == identity

    def retire(self, identity: RowIdentity) -> None:
        """The request is over; a later request of the same id starts anew."""
        if self.is_current(identity):
            del self._lives[identity.rid]

    def launch(
        self, *, step: int, slot: int, kind: FrameKind, identities: Sequence[RowIdentity], samples: Sequence[bool]
    ) -> Launch:
        """Note a step as launched and take the fence of every row it decides tokens of."""
        held = self._launched[slot]
        if held is not None:
            raise LedgerFault(f"slot {slot} still holds step {held.header.step}")
        header = FrameHeader(self.epoch, step, slot, kind, len(identities))
        launch = Launch(header, tuple(identities), tuple(samples))
        rows = launch.output_rows
        shares = {identity: self._in_flight.get(identity, 0) + 1 for identity in rows}
        if len(shares) != len(rows):
            raise FenceViolation(f"step {step} slot {slot}: a request is in this batch twice: {_names(rows)}")
        for identity, share in shares.items():
            if share > self.max_in_flight:
                raise FenceViolation(
                    f"step {step} slot {slot}: {identity} already has {self.max_in_flight} frame(s) in flight"
                )
        self._in_flight.update(shares)
        self._launched[slot] = launch
        return launch

    def expected(self, slot: int) -> Launch | None:
        """The step whose frame this slot waits for."""
        return self._launched[slot]

    def settle(self, launch: Launch) -> None:
        """The frame of ``launch`` was applied or discarded: give its in-flight share back."""
        slot = launch.header.slot
        if self._launched[slot] is not launch:
            raise LedgerFault(f"step {launch.header.step} is not what slot {slot} holds")
        self._launched[slot] = None
        for identity in launch.output_rows:
            left = self._in_flight[identity] - 1
            if left:
                self._in_flight[identity] = left
            else:
                del self._in_flight[identity]

    @property
    def is_idle(self) -> bool:
        return all(launch is None for launch in self._launched)

    def check_integrity(self) -> None:
        """Raise ``LedgerFault`` if in-flight shares and launched steps disagree, or a share outlived its step."""
        counted: dict[RowIdentity, int] = {}
        for launch in self._launched:
            for identity in launch.output_rows if launch else ():
                counted[identity] = counted.get(identity, 0) + 1
        if counted != self._in_flight:
            raise LedgerFault(f"in flight {self._in_flight}, but launched steps say {counted}")


def _names(rows: Sequence[RowIdentity]) -> list[str]:
    return [str(identity) for identity in rows]
