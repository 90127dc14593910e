"""The order of one slot's turn on every stage, as data.

All stages walk the same slots in the same order, so the order of their point-to-point operations depends on the
stage number and the mode alone, never on a local condition. Requests and hidden states (the proxy) go from a stage
to the next; frames go from the last stage to every earlier one, on channels of their own.

The modes differ only in how much of the host's work on the frame of the slot's previous step comes before the slot's
next launch, and how much runs behind it while the devices are busy::

    Overlap.OFF          READ ADOPT ACCOUNT   TAKE_REQUESTS SCHEDULE LAUNCH ...
    Overlap.ACCOUNTING   READ ADOPT           TAKE_REQUESTS SCHEDULE LAUNCH ...        ACCOUNT
    Overlap.ON                ADOPT           TAKE_REQUESTS SCHEDULE LAUNCH ...   READ ACCOUNT

With ON a round is launched from the device values of a frame nobody has read. Where a launch needs lengths on the
host, as attention backends do that plan there, the frame is read first, and only its accounting is left for later.
What must be the same on every stage is what lies between two schedulings, and that is so in all modes.

Three orders matter:

- Between reading a frame and the next scheduling requests are taken in. What a stage decides when it reads one (a
  refused frame aborts requests) then reaches every stage before anything is scheduled.
- Hidden states are sent before the frame's receive is posted. The frame cannot come before the last stage had the
  hidden states, so where both wait in one queue (one communicator, or one hardware queue under
  CUDA_DEVICE_MAX_CONNECTIONS=1) the other order hangs. Alternating by the parity of the stage hangs there too.
- With ON, all sends of a turn precede its READ: no stage makes another wait for what its host does with a frame.
  (A batch with a grammar is the exception, on the last stage: see ``StageLoop.take_turn``.)
"""

from __future__ import annotations

from enum import Enum, IntEnum


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


class Overlap(IntEnum):
    """What of the host's work on a frame comes behind the launch of the slot's next round; more is larger."""

    OFF = 0  # nothing
    ACCOUNTING = 1
    ON = 2  # reading and accounting


_FRAME = (Operation.READ_FRAME, Operation.ADOPT_FRAME, Operation.ACCOUNT_FRAME)
_BEFORE = {Overlap.OFF: _FRAME, Overlap.ACCOUNTING: _FRAME[:2], Overlap.ON: (Operation.ADOPT_FRAME,)}
_ALWAYS = (Operation.TAKE_REQUESTS, Operation.SCHEDULE)  # happen for an empty slot as well


def turn_operations(stage: int, num_stages: int, *, overlap: Overlap = Overlap.OFF) -> tuple[Operation, ...]:
    """The operations of one turn on ``stage`` (0 .. num_stages - 1), in order."""
    if not 0 <= stage < num_stages or num_stages < 2:
        raise ValueError(f"no stage {stage} in a pipeline of {num_stages}")
    before = _BEFORE[overlap]
    behind = tuple(operation for operation in _FRAME if operation not in before)
    return (*before, *_ALWAYS, *_step_operations(stage, num_stages), *behind)


def _step_operations(stage: int, num_stages: int) -> tuple[Operation, ...]:
    receive = () if stage == 0 else (Operation.RECEIVE_PROXY,)
    if stage == num_stages - 1:
        return (*receive, Operation.LAUNCH, Operation.SEND_FRAME)
    return (*receive, Operation.LAUNCH, Operation.SEND_PROXY, Operation.POST_FRAME)
