"""The loop: its order, what it refuses, and rounds launched before a frame is read."""

from __future__ import annotations

from mutant import CHUNKS, CORE, ENDS, LEDGER, RECOMPOSED, TOY, Mutant, in_ledger, in_loop

PROXY_THEN_FRAME = "Operation.LAUNCH, Operation.SEND_PROXY, Operation.POST_FRAME)"

RING = [
    Mutant(
        "ring",
        "post first on every stage",
        "14",
        CORE + "ring.py",
        PROXY_THEN_FRAME,
        "Operation.LAUNCH, Operation.POST_FRAME, Operation.SEND_PROXY)",
        "test/ring/test_zero_capacity.py -k no_pattern",
    ),
    Mutant(
        "ring",
        "order by the parity of the stage",
        "14",
        CORE + "ring.py",
        PROXY_THEN_FRAME,
        "Operation.LAUNCH, *(Operation.SEND_PROXY, Operation.POST_FRAME)[:: -1 if stage % 2 else 1])",
        "test/ring/test_zero_capacity.py -k no_pattern",
    ),
    Mutant(
        "ring",
        "take requests before the frame is read",
        "21",
        CORE + "ring.py",
        "Operation.READ_FRAME, Operation.ADOPT_FRAME, Operation.ACCOUNT_FRAME, *_ALWAYS, *step)",
        "_ALWAYS[0], Operation.READ_FRAME, Operation.ADOPT_FRAME, Operation.ACCOUNT_FRAME, _ALWAYS[1], *step)",
        "test/ring/test_abort_policy.py -k wrong_row",
    ),
    in_loop(
        "ring",
        "local mask decides participation",
        "14",
        "                self.transport.send(slot, frame)\n",
        "                if frame[1, 2]:\n                    self.transport.send(slot, frame)\n",
        f"{CHUNKS} -k consecutive",
    ),
    in_loop(
        "ring",
        "skip predicate differs between ends",
        "14",
        "                self.transport.post(slot)\n",
        "                if turn is not None and any(turn.launch.samples):\n"
        "                    self.transport.post(slot)\n",
        f"{CHUNKS} -k consecutive",
    ),
    in_loop(
        "ring",
        "wait for another slot's frame before the launch",
        "schedule",
        "                self._adopt(previous)\n            elif",
        "                self._adopt(previous)\n"
        "                self._adopt(self.turns[(slot + 1) % self.num_slots])\n"
        "            elif",
        "test/ring/test_utilisation.py -k as_many_slots",
    ),
]

REFUSAL = [
    in_loop(
        "refusal",
        "a refused row is delivered",
        "1",
        "            turn.refused_rows = rows\n",
        "            turn.refused_rows = ()\n",
        "test/ring/test_abort_policy.py -k wrong_row",
    ),
    Mutant(
        "refusal",
        "a wrong header concerns nobody",
        "1",
        CORE + "refusal.py",
        "!= launch.header.words(layout):\n        return tuple(range(num_rows))",
        "!= launch.header.words(layout):\n        return ()",
        "test/unit/test_refusal.py -k wrong_header",
    ),
    Mutant(
        "refusal",
        "a wrong count concerns nobody",
        "15",
        CORE + "refusal.py",
        "if tuple(words) != identity.words or count_problem(*counts[row], launch.header.kind, layout)",
        "if tuple(words) != identity.words",
        "test/unit/test_refusal.py -k alone",
    ),
]

OVERLAP = [
    in_loop(
        "overlap",
        "a frame nobody has read is used as it is",
        "1, 4",
        "            frame = guarded(frame, turn.launch, self.layout)\n",
        "            pass\n",
        "test/ring/test_abort_policy.py -k wrong_row",
    ),
    Mutant(
        "overlap",
        "the device does not look at the header",
        "1",
        CORE + "guard.py",
        "right = same_header & same_rows",
        "right = same_rows",
        "test/unit/test_guard.py",
    ),
    Mutant(
        "overlap",
        "the device does not look at the rows",
        "2",
        CORE + "guard.py",
        "right = same_header & same_rows",
        "right = same_header",
        "test/unit/test_guard.py",
    ),
    Mutant(
        "overlap",
        "the device accepts any count",
        "15",
        CORE + "guard.py",
        "& _counts_are_possible(frame, safe, launch, layout)",
        "",
        "test/unit/test_guard.py",
    ),
    Mutant(
        "overlap",
        "the frame is read before the launch",
        "overlap",
        CORE + "ring.py",
        "return (Operation.ADOPT_FRAME, *_ALWAYS, *step, Operation.READ_FRAME,",
        "return (Operation.ADOPT_FRAME, Operation.READ_FRAME, *_ALWAYS, *step,",
        "test/ring/test_atomic_apply.py -k launched_before",
    ),
    Mutant(
        "overlap",
        "frames are accounted for before the launch on the last stage alone",
        "21",
        CORE + "ring.py",
        "    if overlap:\n",
        "    if overlap and stage < num_stages - 1:\n",
        "test/unit/test_turn_order.py -k do_the_same",
    ),
    in_loop(
        "overlap",
        "a grammar's mask does not wait for the round before",
        "20",
        "                if self.engine.needs_account(turn.batch):\n",
        "                if False:\n",
        f"{RECOMPOSED} -k grammar",
    ),
    in_loop(
        "overlap",
        "a frame is accounted for twice",
        "5",
        "        if turn is None or turn.is_settled:\n",
        "        if turn is None:\n",
        f"{RECOMPOSED} -k grammar",
    ),
    in_ledger(
        "overlap",
        "a round more than KV was reserved for",
        "10",
        "if self._unread.get(identity, 0) >= self.max_unread:",
        "if self._unread.get(identity, 0) > self.max_unread:",
        f"{LEDGER} -k no_further",
    ),
    in_ledger(
        "overlap",
        "speculation on speculation",
        "7",
        "        if held and held[-1].header.step not in self._adopted:\n",
        "        if held and len(held) >= self.max_unread and held[-1].header.step not in self._adopted:\n",
        f"{LEDGER} -k beside_the_newest",
    ),
    in_ledger(
        "overlap",
        "a step may be settled that was not adopted",
        "4",
        "        if step not in self._adopted:\n",
        "        if False:\n",
        f"{LEDGER} -k adopted_once",
    ),
    Mutant(
        "overlap",
        "KV is reserved for a host that has read everything",
        "10",
        "test/ring/toy_scheduling.py",
        "        return self.shape.num_draft_tokens * self.loop.ledger.max_unread\n",
        "        return self.shape.num_draft_tokens\n",
        f"{RECOMPOSED} -k accepted",
    ),
    Mutant(
        "overlap",
        "the surplus round of a finished request moves KV",
        "10, 19",
        TOY,
        "            is_finished=req.finished,\n",
        "            is_finished=False,\n",
        f"{ENDS} -k surplus",
    ),
]
