"""Is the order of a turn free of deadlocks? Exhaustive over which slots are empty, with links that hold nothing.

The model: every stage's host walks ``turn_operations`` in order. Sends and posted receives enter a device queue
without blocking the host; of a queue only the head can run, and a send and its receive complete together, when both
are at the head of their queues (capacity 0). The host waits where the server's does: for requests, for hidden
states, for the frame it reads; on the CPU engine already for the frame it adopts. What is enabled stays enabled until
it happens, so the order in which enabled things happen cannot decide about a deadlock and one run per pattern is
enough.

Three assignments of operations to queues:

- own: requests, hidden states and frames each have a queue per pair of stages or per group; the server has this;
- pair: all traffic of a pair of stages shares one queue;
- stage: everything a stage does on its device is one queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
"""

from functools import partial
from itertools import product

import pytest

from sglang_pp_spec.core.ring import Operation, turn_operations

SHAPES = [(num_stages, num_stages + depth) for num_stages in (2, 3, 4, 5) for depth in (0, 1, 2)]


NEED_A_BATCH = {
    Operation.RECEIVE_PROXY,
    Operation.LAUNCH,
    Operation.SEND_PROXY,
    Operation.SEND_FRAME,
    Operation.POST_FRAME,
}


class Model:
    """Runs all hosts and queues as far as they go."""

    waits_to_adopt = True  # as on the CPU; on a GPU the device waits

    def __init__(self, num_stages, num_slots, full, queue_of, operations):
        self.num_stages, self.num_slots, self.full = num_stages, num_slots, full
        self.queue_of = queue_of
        self.programs = [self.program(stage, operations(stage, num_stages)) for stage in range(num_stages)]
        self.position = [0] * num_stages
        self.queues = {}
        self.done = set()

    def program(self, stage, operations):
        """[(verb, kind, sender, receiver, step)]: ``start`` enqueues, ``wait`` blocks the host."""
        steps = []
        for turn, is_full in enumerate(self.full):
            for operation in operations:
                if is_full or operation not in NEED_A_BATCH:
                    steps += self.host_steps(stage, turn, operation)
        return steps

    def host_steps(self, stage, turn, operation):
        last = self.num_stages - 1
        previous = turn - self.num_slots
        proxy, request, frame = ("proxy", stage - 1, stage), ("requests", stage - 1, stage), ("frame", last, stage)
        if operation is Operation.TAKE_REQUESTS:
            take = [("start", *request, turn), ("wait", *request, turn)] if stage else []
            return take + ([("start", "requests", stage, stage + 1, turn)] if stage < last else [])
        if operation is Operation.READ_FRAME or (operation is Operation.ADOPT_FRAME and self.waits_to_adopt):
            return [("wait", *frame, previous)] if stage < last and previous >= 0 and self.full[previous] else []
        if operation is Operation.RECEIVE_PROXY:
            return [("start", *proxy, turn), ("wait", *proxy, turn)]
        if operation is Operation.SEND_PROXY:
            return [("start", "proxy", stage, stage + 1, turn)]
        if operation is Operation.SEND_FRAME:
            return [("start", "frame", last, other, turn) for other in range(last)]
        return [("start", *frame, turn)] if operation is Operation.POST_FRAME else []

    def run(self):
        """What is left when nothing can happen any more: {} if everything was done."""
        while sum(self.advance(stage) for stage in range(self.num_stages)) or self.transfer():
            pass
        left = {s: p[i] for s, (p, i) in enumerate(zip(self.programs, self.position, strict=True)) if i < len(p)}
        return left or {key: queue[0] for key, queue in self.queues.items() if queue}

    def advance(self, stage):
        program, start = self.programs[stage], self.position[stage]
        while self.position[stage] < len(program):
            verb, *message = program[self.position[stage]]
            message = tuple(message)
            if verb == "wait" and message not in self.done:
                break
            if verb == "start":
                self.queues.setdefault(self.queue_of(stage, message), []).append(message)
            self.position[stage] += 1
        return self.position[stage] > start

    def transfer(self):
        """Complete one message that heads the queues of both its ends."""
        for queue in self.queues.values():
            if not queue:
                continue
            message = queue[0]
            ends = [self.queues.get(self.queue_of(stage, message)) for stage in message[1:3]]
            if all(end and end[0] == message for end in ends):
                for end in ends:
                    end.pop(0)
                self.done.add(message)
                return True
        return False


def own_per_pair(stage, message):
    return (stage, *message[:3])


def own_per_group(stage, message):
    return (stage, message[0], message[1:3] if message[0] != "frame" else ())


def shared_by_pair(stage, message):
    """Requests travel between hosts and stay apart."""
    return (stage, "requests", *message[1:3]) if message[0] == "requests" else (stage, frozenset(message[1:3]))


def one_per_stage(stage, message):
    return (stage, "requests", *message[1:3]) if message[0] == "requests" else (stage,)


QUEUES = [own_per_pair, own_per_group, shared_by_pair, one_per_stage]


def patterns(num_slots):
    """Which turns launch something, for every slot's first turn and two more turns."""
    return product([True, False], repeat=num_slots + 2)


class DeviceWaits(Model):
    """The host goes on while the device waits for the frame it adopts."""

    waits_to_adopt = False


def orders(overlap):
    return partial(turn_operations, overlap=overlap)


def hanging(num_stages, num_slots, queue_of, operations, model=Model):
    """(how many patterns hang, how many there are)."""
    results = [model(num_stages, num_slots, full, queue_of, operations).run() for full in patterns(num_slots)]
    return sum(bool(left) for left in results), len(results)


@pytest.mark.parametrize("queue_of", QUEUES, ids=lambda queue: queue.__name__)
@pytest.mark.parametrize(("num_stages", "num_slots"), SHAPES)
@pytest.mark.parametrize("model", [Model, DeviceWaits])
def test_no_pattern_of_empty_slots_hangs(num_stages, num_slots, queue_of, model, overlap):
    stuck, total = hanging(num_stages, num_slots, queue_of, orders(overlap), model)
    assert total == 2 ** (num_slots + 2)
    assert stuck == 0


@pytest.mark.parametrize("queue_of", QUEUES, ids=lambda queue: queue.__name__)
def test_a_long_run_of_full_slots_goes_through(queue_of, overlap):
    for num_stages, num_slots in SHAPES:
        assert Model(num_stages, num_slots, [True] * (3 * num_slots), queue_of, orders(overlap)).run() == {}


def post_first(stage, num_stages, overlap):
    """The other order: post the frame's receive, then send hidden states."""
    operations = list(turn_operations(stage, num_stages, overlap=overlap))
    if Operation.POST_FRAME in operations:
        operations.remove(Operation.POST_FRAME)
        operations.insert(operations.index(Operation.SEND_PROXY), Operation.POST_FRAME)
    return tuple(operations)


def by_parity(stage, num_stages, overlap):
    """Even stages send first, odd stages post first."""
    return post_first(stage, num_stages, overlap) if stage % 2 else orders(overlap)(stage, num_stages)


def test_posting_first_or_by_parity_is_harmless_with_own_queues_and_hangs_with_shared_ones(overlap):
    """Where frames have queues of their own any order works; the order was chosen for where they do not."""
    first, parity = partial(post_first, overlap=overlap), partial(by_parity, overlap=overlap)
    for num_stages in (2, 3, 4, 5):
        for queue_of in (own_per_pair, own_per_group):
            assert hanging(num_stages, num_stages, queue_of, first)[0] == 0
            assert hanging(num_stages, num_stages, queue_of, parity)[0] == 0
        assert hanging(num_stages, num_stages, shared_by_pair, first)[0] > 0
    assert hanging(2, 2, shared_by_pair, parity)[0] == 0, "at P=2 no odd stage posts: parity looks right"
    assert hanging(3, 3, shared_by_pair, parity)[0] > 0, "at P=3 stage 1 waits for the frame of unsent states"
    assert hanging(5, 5, shared_by_pair, parity)[0] > 0


def test_a_shared_queue_is_safe_but_serialises_the_pair(overlap):
    """Honest cost: hidden states of the next slot stand behind the frame of this one."""
    shared = Model(2, 3, [True] * 3, one_per_stage, orders(overlap))
    shared.position[1] = len(shared.programs[1])  # the last stage does nothing at all
    shared.advance(0)
    assert [message[0] for message in shared.queues[(0,)]] == ["proxy", "frame"] * 3
    own = Model(2, 3, [True] * 3, own_per_pair, orders(overlap))
    own.position[1] = len(own.programs[1])
    own.advance(0)
    assert [message[0] for message in own.queues[(0, "proxy", 0, 1)]] == ["proxy"] * 3


def test_the_model_finds_a_frame_that_is_waited_for_before_the_hidden_states_are_sent(overlap):
    """The model is able to hang: a stage that waits for a step's frame before its own part was sent never gets it."""

    class Impatient(Model):
        def host_steps(self, stage, turn, operation):
            if operation is Operation.LAUNCH and stage < self.num_stages - 1:
                frame = ("frame", self.num_stages - 1, stage, turn)
                return [("start", *frame), ("wait", *frame)]
            return [] if operation is Operation.POST_FRAME else super().host_steps(stage, turn, operation)

    assert Impatient(3, 3, [True] * 3, own_per_pair, orders(overlap)).run() != {}
