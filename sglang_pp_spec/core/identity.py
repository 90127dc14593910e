"""Who a row belongs to: a request id alone is not enough, since ids are reused and state is rebuilt."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple


@lru_cache(maxsize=65536)
def rid_digest(rid: str) -> int:
    """A 63-bit digest of a request id, equal in every process (unlike ``hash``)."""
    raw = hashlib.blake2b(rid.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1


class RowIdentity(NamedTuple):
    """A request in one life: ``incarnation`` moves on at admission, retraction, resume and id reuse.

    A tuple, because identities are hashed and compared for every row of every step.
    """

    rid: str
    incarnation: int

    @property
    def words(self) -> tuple[int, int]:
        """What travels for this identity: (rid digest, incarnation)."""
        return rid_digest(self.rid), self.incarnation

    def __str__(self) -> str:
        return f"{self.rid}#{self.incarnation}"
