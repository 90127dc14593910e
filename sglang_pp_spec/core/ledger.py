"""What a stage has launched and not yet accounted for, and who every request is right now.

Every stage keeps its own ledger; they stay equal because all stages launch the same steps in the same order, and a
stage that did not is found at its next frame, whose header and row identities come from the last stage's ledger.

The life of a step: ``launch`` (identities fixed, fences taken) -> ``adopt`` (the next round may start from its frame
on the device) -> ``settle`` (its tokens reached the requests). Two fences bound how far a request runs ahead: it
never has a second step under way whose frame was not adopted, since that would be speculation on speculation; and it
has at most ``max_unaccounted`` steps the host has not accounted for, for which its KV was reserved.
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
    """Launched steps per slot, fences and incarnation per request; ``max_unaccounted`` is 2 with overlap."""

    def __init__(self, *, epoch: int, num_slots: int, max_unaccounted: int = 1) -> None:
        self.epoch = epoch
        self.max_unaccounted = max_unaccounted
        self._launched: list[list[Launch]] = [[] for _ in range(num_slots)]  # unsettled, oldest first
        self._adopted: set[int] = set()  # steps, of the launched ones
        self._in_flight: dict[RowIdentity, int] = {}  # steps launched, not adopted
        self._unaccounted: dict[RowIdentity, int] = {}  # steps launched, not settled
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
        """Note a step as launched and take the fences of every row it decides tokens of."""
        self._require_room(slot)
        header = FrameHeader(self.epoch, step, slot, kind, len(identities))
        launch = Launch(header, tuple(identities), tuple(samples))
        rows = launch.output_rows
        if len(set(rows)) != len(rows):
            raise FenceViolation(f"step {step} slot {slot}: a request is in this batch twice: {_names(rows)}")
        if not self._unaccounted.keys().isdisjoint(rows):  # whoever is in flight is not accounted for
            self._require_fences(launch)
        _add(self._in_flight, rows)
        _add(self._unaccounted, rows)
        self._launched[slot].append(launch)
        return launch

    def _require_fences(self, launch: Launch) -> None:
        where = f"step {launch.header.step} slot {launch.header.slot}"
        for identity in launch.output_rows:
            if self._in_flight.get(identity):
                raise FenceViolation(f"{where}: {identity} already has 1 frame(s) in flight")
            if self._unaccounted.get(identity, 0) >= self.max_unaccounted:
                raise FenceViolation(f"{where}: {identity} has {self.max_unaccounted} step(s) to be accounted for")

    def _require_room(self, slot: int) -> None:
        held = self._launched[slot]
        if held and held[-1].header.step not in self._adopted:
            raise LedgerFault(f"slot {slot} still holds step {held[-1].header.step}")
        if len(held) >= self.max_unaccounted:
            raise LedgerFault(f"slot {slot} still holds step {held[0].header.step}, not accounted for")

    def expected(self, slot: int) -> Launch | None:
        """The oldest step of the slot that is not settled."""
        return self._launched[slot][0] if self._launched[slot] else None

    def adopt(self, launch: Launch) -> None:
        """The stage took over what the frame of ``launch`` says: its rows may be launched again."""
        held = any(launch is other for other in self._launched[launch.header.slot])
        if not held or launch.header.step in self._adopted:
            raise LedgerFault(f"step {launch.header.step} is not to be adopted in slot {launch.header.slot}")
        self._adopted.add(launch.header.step)
        _subtract(self._in_flight, launch.output_rows)

    def settle(self, launch: Launch) -> None:
        """The tokens of ``launch`` reached their requests: give its share back."""
        slot, step = launch.header.slot, launch.header.step
        if self.expected(slot) is not launch:
            raise LedgerFault(f"step {step} is not what slot {slot} holds")
        if step not in self._adopted:
            raise LedgerFault(f"step {step} was not adopted")
        self._launched[slot].pop(0)
        self._adopted.discard(step)
        _subtract(self._unaccounted, launch.output_rows)

    @property
    def is_idle(self) -> bool:
        return not any(self._launched)

    def check_integrity(self) -> None:
        """Raise ``LedgerFault`` if shares and launched steps disagree, or a share outlived its step."""
        in_flight: dict[RowIdentity, int] = {}
        unaccounted: dict[RowIdentity, int] = {}
        for launch in (launch for launches in self._launched for launch in launches):
            _add(unaccounted, launch.output_rows)
            if launch.header.step not in self._adopted:
                _add(in_flight, launch.output_rows)
        if in_flight != self._in_flight:
            raise LedgerFault(f"in flight {self._in_flight}, but launched steps say {in_flight}")
        if unaccounted != self._unaccounted:
            raise LedgerFault(f"not accounted for {self._unaccounted}, but launched steps say {unaccounted}")


def _add(shares: dict[RowIdentity, int], rows: Sequence[RowIdentity]) -> None:
    if shares.keys().isdisjoint(rows):
        shares.update(dict.fromkeys(rows, 1))
        return
    for identity in rows:
        shares[identity] = shares.get(identity, 0) + 1


def _subtract(shares: dict[RowIdentity, int], rows: Sequence[RowIdentity]) -> None:
    for identity in rows:
        left = shares.pop(identity) - 1
        if left:
            shares[identity] = left


def _names(rows: Sequence[RowIdentity]) -> list[str]:
    return [str(identity) for identity in rows]
