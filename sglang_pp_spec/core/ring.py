"""The order of one slot's turn on every stage, as data.

All stages walk the same slots in the same order, so the order of their point-to-point operations depends on the
stage number and the mode alone, never on a local condition. Requests and hidden states (the proxy) go from a stage
to the next; frames go from the last stage to every earlier one, on channels of their own.

The two modes differ only in when the host reads the frame of the slot's previous step::

    without overlap   READ ADOPT ACCOUNT   TAKE_REQUESTS SCHEDULE LAUNCH ...
    with overlap           ADOPT           TAKE_REQUESTS SCHEDULE LAUNCH ...   READ ACCOUNT

With overlap the next round is launched from the device values of a frame nobody has read; the host's work on the
frame then runs while the devices are busy. What must be the same on every stage is only what lies between two
schedulings, and that is the same in both modes.

Three orders matter:

- A frame is accounted for before requests are taken in the next time. What a stage decides while accounting (a
  refused frame aborts requests) then reaches every stage before anything is scheduled.
- Hidden states are sent before the frame's receive is posted. The frame cannot come before the last stage had the
  hidden states, so where both wait in one queue (one communicator, or one hardware queue under
  CUDA_DEVICE_MAX_CONNECTIONS=1) the other order hangs. Alternating by the parity of the stage hangs there too.
- With overlap, all sends of a turn precede its READ: no stage makes another wait for what its host does with a frame.
  (A batch with a grammar is the exception, on the last stage: see ``StageLoop.take_turn``.)
"""

from __future__ import annotations

from enum import Enum


class Operation(Enum):
    """What a stage does in a slot's turn. Frame operations concern the slot's previous step."""

    READ_FRAME = "wait until the host has the frame; refuse it or not"
    ADOPT_FRAME = "take lengths and trees over from the frame, on the device"
    ACCOUNT_FRAME = "give the frame's tokens to their requests"
    TAKE_REQUESTS = "take requests in and pass them on"
    SCHEDULE = "decide the slot's next batch"
    RECEIVE_PROXY = "receive hidden states from the previous stage"
    LAUNCH = "run this stage's layers (on the last stage also verify, draft extend, draft)"
    SEND_PROXY = "send hidden states to the next stage"
    SEND_FRAME = "send the frame to every earlier stage"
    POST_FRAME = "post the receive of the frame"


_ALWAYS = (Operation.TAKE_REQUESTS, Operation.SCHEDULE)  # happen for an empty slot as well


def turn_operations(stage: int, num_stages: int, *, overlap: bool = False) -> tuple[Operation, ...]:
    """The operations of one turn on ``stage`` (0 .. num_stages - 1), in order."""
    if not 0 <= stage < num_stages or num_stages < 2:
        raise ValueError(f"no stage {stage} in a pipeline of {num_stages}")
    step = _step_operations(stage, num_stages)
    if overlap:
        return (Operation.ADOPT_FRAME, *_ALWAYS, *step, Operation.READ_FRAME, Operation.ACCOUNT_FRAME)
    return (Operation.READ_FRAME, Operation.ADOPT_FRAME, Operation.ACCOUNT_FRAME, *_ALWAYS, *step)


def _step_operations(stage: int, num_stages: int) -> tuple[Operation, ...]:
    receive = () if stage == 0 else (Operation.RECEIVE_PROXY,)
    if stage == num_stages - 1:
        return (*receive, Operation.LAUNCH, Operation.SEND_FRAME)
    return (*receive, Operation.LAUNCH, Operation.SEND_PROXY, Operation.POST_FRAME)
