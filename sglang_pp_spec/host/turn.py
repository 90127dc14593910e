"""What a stage must remember of a forward until its frame is applied: everything as it was at launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_utils import prepare_mamba_track_for_verify
from torch import Tensor

from ..core.stage_loop import Turn


@dataclass
class ForwardRecord:
    """Forward-time state of one step; also keeps alive what is still being sent."""

    reqs: list[Req]  # what ran, in the order of the launch's identities
    rebuilds: list[int]  # per row: the request's retraction count at launch
    seq_lens: Tensor  # [rows] int64, device, before this step's accepted tokens
    seq_lens_cpu: Tensor | None  # [rows] int64, the same on the host
    snapshot: ScheduleBatch  # ``ScheduleBatch.copy()`` right after the forward was launched
    result: GenerationBatchResult
    launched: object  # event at the end of the forward
    extras: dict | None = None  # logprobs, on the last stage
    passes_on: dict[str, Tensor] = field(default_factory=dict)  # for the last stage's drafter, from earlier stages
    sends: list[list] = field(default_factory=list)  # sends in progress, waited for when the turn ends

    @classmethod
    def before(cls, batch: ScheduleBatch) -> ForwardRecord:
        """Take down what the forward may change."""
        return cls(
            reqs=list(batch.reqs),
            rebuilds=[req.retraction_count for req in batch.reqs],
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            snapshot=batch,
            result=GenerationBatchResult(),
            launched=None,
        )

    def after(self, batch: ScheduleBatch, result: GenerationBatchResult, launched) -> None:
        """Take down what the forward set; the live batch may be recomposed from now on."""
        self.snapshot = batch.copy()
        self.snapshot.req_pool_indices = batch.req_pool_indices.clone()
        self.snapshot.tree_cache = batch.tree_cache
        if batch.forward_mode.is_decode():  # the forward's own note of checkpoints was undone with its isolation
            prepare_mamba_track_for_verify(self.snapshot)
        self.result, self.launched = result, launched


StageTurn = Turn[ScheduleBatch]


def record_of(turn: StageTurn) -> ForwardRecord:
    """The forward record of a launched turn."""
    assert isinstance(turn.forward, ForwardRecord)
    return turn.forward
