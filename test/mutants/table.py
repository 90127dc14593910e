"""The mutants: one wrong line each, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass

CORE = "sglang_pp_spec/core/"
TOY = "test/ring/toy_engine.py"


@dataclass(frozen=True)
class Mutant:
    """``old`` (exactly once in ``file``) becomes ``new``; ``tests`` are arguments of pytest."""

    group: str
    name: str
    invariant: str  # numbers of the contract
    file: str
    old: str
    new: str
    tests: str


def _frame(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "frame.py", old, new, tests)


def _ledger(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "ledger.py", old, new, tests)


def _loop(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "stage_loop.py", old, new, tests)


def _apply(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "apply.py", old, new, tests)


def _trees(group: str, name: str, invariant: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(group, name, invariant, CORE + "tree_rows.py", old, new, tests)


FRAME = "test/unit/test_frame.py"
LEDGER = "test/unit/test_ledger.py"
TREES = "test/unit/test_tree_rows.py"
APPLY = "test/unit/test_apply.py"
REFUSED = "test/ring/test_refused_frames.py"
ENDS = "test/ring/test_end_of_requests.py"
RECOMPOSED = "test/ring/test_recomposition.py"
CHUNKS = "test/ring/test_chunks.py"

HEADER_CHECK = "    if header != wanted:\n"
ADVANCED = "    advanced = at_launch + num_accepted\n"
OUTPUT_ROWS = "        return [i for i, samples in zip(self.identities, self.samples, strict=True) if samples]\n"
CHECK = """            check_frame(frame, launch.header, launch.identities, self.layout, samples=launch.samples)
"""
COMMIT = "        state.commit_cache(turn, rows, owned_rows(state, turn))\n"
FOLD = """        position = {identity: own + i for i, identity in enumerate(newer.identities)}
        take = [position.get(identity, i) for i, identity in enumerate(self.identities)]
"""
PROXY_THEN_FRAME = "Operation.LAUNCH, Operation.SEND_PROXY, Operation.POST_FRAME)"
LATEST = "max((t for t in self.loop.turns if t), key=lambda t: t.launch.header.step).forward"

IDENTITY = [
    _frame(
        "identity",
        "drop the step check",
        "1",
        HEADER_CHECK,
        "    header[2] = wanted[2]\n" + HEADER_CHECK,
        f"{FRAME} -k neighbouring_step",
    ),
    _frame(
        "identity",
        "drop the step check, in the ring",
        "1",
        HEADER_CHECK,
        "    header[2] = wanted[2]\n" + HEADER_CHECK,
        f"{REFUSED} -k duplicated",
    ),
    _frame(
        "identity",
        "drop the slot check",
        "1",
        HEADER_CHECK,
        "    header[3] = wanted[3]\n" + HEADER_CHECK,
        f"{FRAME} -k another_slot",
    ),
    _frame(
        "identity",
        "accept a duplicate of an earlier step",
        "1",
        HEADER_CHECK,
        "    header[2] = max(header[2], wanted[2])\n" + HEADER_CHECK,
        f"{REFUSED} -k duplicated",
    ),
    _frame(
        "identity",
        "compare rid only",
        "2, 12",
        "(body[:, :NUM_ACCEPTED] == _identity_block(tuple(identities)))",
        "(body[:, :1] == _identity_block(tuple(identities))[:, :1])",
        f"{REFUSED} -k older_incarnation",
    ),
    _apply(
        "identity",
        "label rows in the receiver's order",
        "2, 3",
        "TreeRows.of_frame(rows, layout.shape, turn.launch.identities)",
        "TreeRows.of_frame(rows, layout.shape, live if len(live) == header.num_rows else turn.launch.identities)",
        f"{RECOMPOSED} -k permuted",
    ),
    _loop(
        "identity",
        "account before validating",
        "1, 4",
        CHECK,
        "            turn.on_host = frame\n            self._account(turn)\n" + CHECK,
        f"{REFUSED} -k out_of_range",
    ),
    _trees(
        "identity",
        "adopt an older incarnation",
        "2, 11",
        FOLD,
        FOLD.replace("{identity: own", "{identity.rid: own").replace("get(identity,", "get(identity.rid,"),
        f"{TREES} -k older_incarnation",
    ),
    _ledger(
        "identity",
        "a retraction is no new incarnation",
        "2, 11",
        "life is None or life.rebuilds != rebuilds or",
        "life is None or",
        f"{LEDGER} -k retraction_makes",
    ),
    _ledger(
        "identity",
        "a new request under an old id is no new incarnation",
        "12",
        " or life.owner() is not owner:",
        ":",
        f"{LEDGER} -k old_id",
    ),
    _ledger(
        "identity",
        "the ledger keeps requests alive",
        "9",
        "_Life(weakref.ref(owner, lambda _: self.retire(identity)), rebuilds, identity)",
        "_Life(lambda: owner, rebuilds, identity)",
        f"{LEDGER} -k outside_a_step",
    ),
    _loop(
        "identity",
        "finished requests are not retired",
        "9, 12",
        "            if is_over:\n",
        "            if is_over and self.step < 0:\n",
        f"{ENDS} -k right_after",
    ),
    _loop(
        "identity",
        "applying a late frame begins a life",
        "9",
        "self.engine.rows(turn.batch), begin=False)",
        "self.engine.rows(turn.batch), begin=True)",
        f"{ENDS} -k aborted_at_any_point",
    ),
]

FENCE = [
    _ledger(
        "fence",
        "release at launch",
        "7, 9",
        "        _add(self._in_flight, rows)\n",
        "        _add({}, rows)\n",
        "test/ring/test_disagreement.py -k launches_a_request_again",
    ),
    _ledger(
        "fence",
        "release an unknown step's rows",
        "9",
        "        if self.expected(slot) is not launch:\n",
        "        if self.expected(slot) is not launch and slot < 0:\n",
        f"{LEDGER} -k only_once",
    ),
    _ledger(
        "fence",
        "fence middle chunks",
        "8",
        OUTPUT_ROWS,
        "        return list(self.identities)\n",
        f"{CHUNKS} -k consecutive",
    ),
    _ledger(
        "fence",
        "forget to fence the final chunk",
        "7",
        OUTPUT_ROWS,
        OUTPUT_ROWS.replace("if samples]", "if samples and self.header.kind is FrameKind.VERIFY]"),
        f"{LEDGER} -k last_chunk",
    ),
    _ledger(
        "fence",
        "release another frame's share",
        "9, 12",
        "        _subtract(self._in_flight, launch.output_rows)\n",
        "        rids = {i.rid for i in launch.output_rows}\n"
        "        _subtract(self._in_flight, [i for i in self._in_flight if i.rid in rids])\n",
        f"{LEDGER} -k reused_id",
    ),
    _ledger(
        "fence",
        "a zero-token row gives back a share",
        "8, 9",
        "        _subtract(self._in_flight, launch.output_rows)\n",
        "        _subtract(self._in_flight, [i for i in launch.identities if i in self._in_flight])\n",
        f"{LEDGER} -k gives_back_nothing",
    ),
    _ledger(
        "fence",
        "one frame too many",
        "7",
        "            if self._in_flight.get(identity):\n",
        "            if self._in_flight.get(identity, 0) > 1:\n",
        f"{LEDGER} -k is_not_launched_again",
    ),
    _ledger(
        "fence",
        "a request may be in a batch twice",
        "7",
        "if len(set(rows)) != len(rows):",
        "if len(set(rows)) > len(rows):",
        "test/ring/test_disagreement.py -k twice",
    ),
]

CHUNK = [
    _loop(
        "chunk / retract",
        "commit the placeholder",
        "8, 11",
        "num_accepted=[int(samples) for samples in launch.samples]",
        "num_accepted=[1 for samples in launch.samples]",
        f"{CHUNKS} -k beside",
    ),
    _frame(
        "chunk / retract",
        "accept a placeholder as a token",
        "8, 15",
        "elif kind is FrameKind.MIDDLE or samples is False:",
        "elif kind is FrameKind.MIDDLE:",
        f"{FRAME} -k where_it_goes_on",
    ),
    _apply(
        "chunk / retract",
        "do not drain the chunk counter of an aborted request",
        "10, 11",
        "    return not is_finished or chunks_in_flight > 0\n",
        "    return not is_finished\n",
        f"{ENDS} -k aborted_at_any_point",
    ),
    _apply(
        "chunk / retract",
        "a frame from before the retraction still counts",
        "10, 11",
        "    if rebuilds != launched_rebuilds or is_retracted:\n",
        "    if is_retracted:\n",
        f"{ENDS} -k retracted_at_any_point",
    ),
    _apply(
        "chunk / retract",
        "a retracted request still owns its row",
        "11",
        "    if rebuilds != launched_rebuilds or is_retracted:\n",
        "    if False:\n",
        f"{ENDS} -k two_retractions",
    ),
    _apply(
        "chunk / retract",
        "a frame of a finished request is applied",
        "10",
        "    return not is_finished or chunks_in_flight > 0\n",
        "    return True\n",
        f"{APPLY} -k owns",
    ),
    _loop(
        "chunk / retract",
        "pause retracts without draining",
        "11",
        "            self._adopt(turn)\n            self._account(turn)\n\n",
        "            self._adopt(turn)\n\n",
        f"{ENDS} -k pause",
    ),
]

ACCOUNTING = [
    _apply(
        "accounting",
        "keep the optimistic advance",
        "6",
        ADVANCED,
        "    advanced = at_launch + torch.full_like(num_accepted, 3)\n",
        f"{RECOMPOSED} -k accepted",
    ),
    _apply(
        "accounting",
        "advance twice",
        "6",
        ADVANCED,
        "    advanced = at_launch + 2 * num_accepted\n",
        f"{RECOMPOSED} -k accepted",
    ),
    _apply(
        "accounting",
        "advance live lengths",
        "3, 6",
        ADVANCED,
        "    advanced = current[: len(num_accepted)] + num_accepted\n",
        f"{RECOMPOSED} -k accepted",
    ),
    _apply(
        "accounting",
        "advance by row instead of by request",
        "2, 6",
        "if identity in position]\n",
        "if identity in position]\n    pairs = [(i, i) for i, _ in pairs]\n",
        f"{RECOMPOSED} -k permuted",
    ),
]

STATE = [
    Mutant(
        "state",
        "recurrent commit at live lengths",
        "18",
        TOY,
        "            req.chain = record.states[row][path[-1]]\n",
        "            req.chain = record.states[row][len(req.tokens_on_device) - 1 - int(record.lengths[row])]\n",
        f"{RECOMPOSED} -k committed_after",
    ),
    Mutant(
        "state",
        "scratch indexed by batch row, shared by slots",
        "18",
        TOY,
        "            req.chain = record.states[row][path[-1]]\n",
        f"            req.chain = {LATEST}.states[row][path[-1]]\n",
        f"{RECOMPOSED} -k committed_after",
    ),
    _loop(
        "state",
        "slot off by one",
        "1",
        "self.transport.post(slot)",
        "self.transport.post((slot + 1) % self.num_slots)",
        f"{RECOMPOSED} -k committed_after",
    ),
    _apply(
        "state",
        "commit the cache after lengths advanced",
        "19",
        COMMIT + "        state.advance(turn, rows, on_host, live)\n",
        "        state.advance(turn, rows, on_host, live)\n" + COMMIT,
        f"{APPLY} -k before_they_advance",
    ),
    Mutant(
        "state",
        "commit the cache on the last stage only",
        "19",
        TOY,
        "        for row in owned:\n            path",
        "        for row in owned if self.is_last_stage else ():\n            path",
        f"{RECOMPOSED} -k committed_after",
    ),
    _apply(
        "state",
        "commit the cache of rows that lost their request",
        "10, 19",
        COMMIT,
        "        state.commit_cache(turn, rows, range(header.num_rows))\n",
        f"{ENDS} -k retracted_at_any_point",
    ),
    _apply(
        "state",
        "nodes numbered with another stride",
        "19",
        "shape.num_draft_tokens\n    return torch.where",
        "shape.max_accepted\n    return torch.where",
        f"{APPLY} -k compaction",
    ),
]

PAYLOAD = [
    _trees(
        "payload",
        "zeros as drafts",
        "16",
        "num_drafts=rows.num_drafts.clone(),",
        "num_drafts=torch.full_like(rows.num_drafts, shape.num_drafts),",
        f"{RECOMPOSED} -k empty_draft_column",
    ),
    _frame(
        "payload",
        "clip or spill a width silently",
        "15",
        "    _check_widths(layout.shape, payload)\n    body",
        "    body",
        f"{FRAME} -k another_width",
    ),
    _frame(
        "payload",
        "padding as data",
        "15",
        "        body = frame[1 : 1 + num_rows]\n",
        "        body = frame[1:]\n",
        f"{FRAME} -k padding_rows",
    ),
    _frame(
        "payload",
        "any count is good",
        "15",
        "    if not smallest <= accepted <= largest:\n",
        "    if not 0 <= accepted <= layout.shape.max_accepted:\n",
        f"{FRAME} -k at_most_a_path",
    ),
    _trees(
        "payload",
        "new tokens with old topology",
        "17",
        "            self.tokens, self.parents, self.selected = newer.tokens, newer.parents, newer.selected\n",
        "            self.tokens = newer.tokens\n",
        f"{RECOMPOSED} -k committed_after",
    ),
    _trees(
        "payload",
        "topology stays when rows move",
        "17",
        "            self.parents, self.selected = self.parents[index], self.selected[index]",
        "            self.parents, self.selected = self.parents[: len(index)], self.selected[: len(index)]",
        f"{RECOMPOSED} -k permuted",
    ),
    _trees(
        "payload",
        "buffer shared without a copy",
        "23",
        "rows.parents.clone()",
        "rows.parents",
        f"{TREES} -k buffer",
    ),
    _trees(
        "payload",
        "the first accepted token as bonus",
        "3, 5",
        "        last = (rows.num_accepted - 1).clamp(min=0)\n",
        "        last = rows.num_accepted * 0\n",
        f"{RECOMPOSED} -k accepted",
    ),
]

GRAMMAR_AND_DRAFTER = [
    Mutant(
        "grammar",
        "fail open",
        "20",
        "test/ring/toy_sampling.py",
        "            value = self.oracle.unmasked(req.rid, req.life, position, False)\n",
        "            value = value if ahead else self.oracle.unmasked(req.rid, req.life, position, False)\n",
        f"{RECOMPOSED} -k grammar",
    ),
    Mutant(
        "grammar",
        "FSM advanced only on the last stage",
        "20",
        TOY,
        "            if req.grammar:\n                req.grammar_position += 1\n",
        "            if req.grammar and self.is_last_stage:\n                req.grammar_position += 1\n",
        f"{RECOMPOSED} -k grammar",
    ),
    Mutant(
        "drafter",
        "drafter on every stage",
        "24",
        CORE + "placement.py",
        "    if stage != num_stages - 1:\n",
        "    if stage < 0:\n",
        "test/unit/test_placement.py",
    ),
    Mutant(
        "drafter",
        "an unsupported algorithm is built",
        "24",
        CORE + "placement.py",
        "    if name not in SUPPORTED_ALGORITHMS:\n",
        "    if not name:\n",
        "test/unit/test_placement.py",
    ),
]

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
    _loop(
        "ring",
        "local mask decides participation",
        "14",
        "                self.transport.send(slot, frame)\n",
        "                if frame[1, 2]:\n                    self.transport.send(slot, frame)\n",
        f"{CHUNKS} -k consecutive",
    ),
    _loop(
        "ring",
        "skip predicate differs between ends",
        "14",
        "                self.transport.post(slot)\n",
        "                if turn is not None and any(turn.launch.samples):\n"
        "                    self.transport.post(slot)\n",
        f"{CHUNKS} -k consecutive",
    ),
    _loop(
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
    _loop(
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
    _loop(
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
    _loop(
        "overlap",
        "a grammar's mask does not wait for the round before",
        "20",
        "                if self.engine.needs_account(turn.batch):\n",
        "                if False:\n",
        f"{RECOMPOSED} -k grammar",
    ),
    _loop(
        "overlap",
        "a frame is accounted for twice",
        "5",
        "        if turn is None or turn.is_settled:\n",
        "        if turn is None:\n",
        f"{RECOMPOSED} -k grammar",
    ),
    _ledger(
        "overlap",
        "a round more than KV was reserved for",
        "10",
        "if self._unread.get(identity, 0) >= self.max_unread:",
        "if self._unread.get(identity, 0) > self.max_unread:",
        f"{LEDGER} -k no_further",
    ),
    _ledger(
        "overlap",
        "speculation on speculation",
        "7",
        "        if held and held[-1].header.step not in self._adopted:\n",
        "        if held and len(held) >= self.max_unread and held[-1].header.step not in self._adopted:\n",
        f"{LEDGER} -k beside_the_newest",
    ),
    _ledger(
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

MUTANTS = [*IDENTITY, *FENCE, *CHUNK, *ACCOUNTING, *STATE, *PAYLOAD, *GRAMMAR_AND_DRAFTER, *RING, *REFUSAL, *OVERLAP]
