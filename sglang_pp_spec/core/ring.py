"""The order of one slot's turn on every stage, as data.

All stages walk the same slots in the same order, so the order of their point-to-point operations depends on the
stage number alone, never on a local condition. Requests and hidden states (the proxy) go from a stage to the next;
frames go from the last stage to every earlier one, on channels of their own.

Two orders matter:

- The frame is applied before requests are taken in. What a stage decides while applying (a refused frame aborts
  requests) then reaches every stage before it schedules the slot.
- Hidden states are sent before the frame's receive is posted. The frame cannot come before the last stage had the
  hidden states, so where both wait in one queue (one communicator, or one hardware queue under
  CUDA_DEVICE_MAX_CONNECTIONS=1) the other order hangs. Alternating by the parity of the stage hangs there too.
"""

from __future__ import annotations

from enum import Enum


class Operation(Enum):
    """What a stage does in a slot's turn; the first three happen for an empty slot as well."""

    APPLY_FRAME = "apply the frame of the slot's previous step"
    TAKE_REQUESTS = "take requests in and pass them on"
    SCHEDULE = "decide the slot's next batch"
    RECEIVE_PROXY = "receive hidden states from the previous stage"
    LAUNCH = "run this stage's layers (on the last stage also verify, draft extend, draft)"
    SEND_PROXY = "send hidden states to the next stage"
    SEND_FRAME = "send the frame to every earlier stage"
    POST_FRAME = "post the receive of the frame"


def turn_operations(stage: int, num_stages: int) -> tuple[Operation, ...]:
    """The operations of one turn on ``stage`` (0 .. num_stages - 1), in order."""
    if not 0 <= stage < num_stages or num_stages < 2:
        raise ValueError(f"no stage {stage} in a pipeline of {num_stages}")
    always = (Operation.APPLY_FRAME, Operation.TAKE_REQUESTS, Operation.SCHEDULE)
    receive = () if stage == 0 else (Operation.RECEIVE_PROXY,)
    if stage == num_stages - 1:
        return (*always, *receive, Operation.LAUNCH, Operation.SEND_FRAME)
    return (*always, *receive, Operation.LAUNCH, Operation.SEND_PROXY, Operation.POST_FRAME)
