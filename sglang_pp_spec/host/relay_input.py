"""PPSpecRelayInput: the draft trees of a batch's requests, riding on ``ScheduleBatch.spec_info`` between rounds.

SGLang calls ``filter_batch`` and ``merge_batch`` whenever it recomposes a batch, so a request that finishes, is
retracted or joins from prefill takes its row along. Algorithm-agnostic: what a round is rebuilt from is in
``core.tree_rows``; another algorithm supplies only its own rebuild (``host/verify.py`` is EAGLE's).
"""

from __future__ import annotations

from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from ..core.tree_rows import TreeRows


class PPSpecRelayInput(SpecInput):
    """``TreeRows`` in the form SGLang carries about; row i belongs to ``batch.reqs[i]``."""

    def __init__(self, rows: TreeRows) -> None:
        super().__init__(SpecInputType.PP_SPEC_RELAY)
        self.rows = rows

    def __repr__(self) -> str:
        return f"PPSpecRelayInput({[str(i) for i in self.rows.identities]})"

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the rows ``new_indices`` ([n] int64, device), in that order; ``new_indices_cpu`` is the same list."""
        keep = new_indices_cpu if new_indices_cpu is not None else new_indices.tolist()
        self.rows.filter(keep, new_indices)

    def merge_batch(self, other: PPSpecRelayInput) -> None:
        """Append the rows of requests that join this batch."""
        if not isinstance(other, PPSpecRelayInput):
            raise TypeError(f"requests joined a speculative batch without their trees: {type(other).__name__}")
        self.rows.merge(other.rows)
