"""Where the drafter lives, decided as a value: build it here, skip it here, or refuse with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How a speculative algorithm's drafter relates to the pipeline."""

    LAST_STAGE_LOCAL = "last_stage_local"  # a whole drafter beside the last stage, pipeline size 1 for itself
    PARTITIONED = "partitioned"  # a drafter split over the stages like the target
    MODEL_FREE = "model_free"  # no drafter model (n-gram lookup)


class Action(Enum):
    BUILD = "build"
    SKIP = "skip"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str


SUPPORTED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")


def decide(algorithm: str, placement: Placement, num_stages: int, stage: int) -> Decision:
    """What ``stage`` does about the drafter of ``algorithm`` (SGLang's --speculative-algorithm, any case)."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"no stage {stage} in a pipeline of {num_stages}")
    name = algorithm.upper()
    if placement is not Placement.LAST_STAGE_LOCAL:
        return Decision(
            Action.REFUSE, f"{placement.value} drafters are not supported: the relay drafts on the last stage"
        )
    if name not in SUPPORTED_ALGORITHMS:
        return Decision(
            Action.REFUSE, f"{name} is not supported: only trees of {', '.join(SUPPORTED_ALGORITHMS)} are relayed"
        )
    if stage != num_stages - 1:
        return Decision(Action.SKIP, f"the drafter lives on stage {num_stages - 1}, beside the final hidden states")
    return Decision(Action.BUILD, "final hidden states and the head are here; pipeline size 1 for the drafter")
