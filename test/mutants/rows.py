"""Rows: whose they are, and what may be applied to them."""

from __future__ import annotations

from mutant import CHUNKS, ENDS, FRAME, LEDGER, RECOMPOSED, TREES, in_apply, in_frame, in_ledger, in_loop, in_trees

REFUSED = "test/ring/test_refused_frames.py"
HEADER_CHECK = "    if header != wanted:\n"
OUTPUT_ROWS = "        return [i for i, samples in zip(self.identities, self.samples, strict=True) if samples]\n"
CHECK = """            check_frame(frame, launch.header, launch.identities, self.layout, samples=launch.samples)
"""
FOLD = """        position = {identity: own + i for i, identity in enumerate(newer.identities)}
        take = [position.get(identity, i) for i, identity in enumerate(self.identities)]
"""

IDENTITY = [
    in_frame(
        "identity",
        "drop the step check",
        "1",
        HEADER_CHECK,
        "    header[2] = wanted[2]\n" + HEADER_CHECK,
        f"{FRAME} -k neighbouring_step",
    ),
    in_frame(
        "identity",
        "drop the step check, in the ring",
        "1",
        HEADER_CHECK,
        "    header[2] = wanted[2]\n" + HEADER_CHECK,
        f"{REFUSED} -k duplicated",
    ),
    in_frame(
        "identity",
        "drop the slot check",
        "1",
        HEADER_CHECK,
        "    header[3] = wanted[3]\n" + HEADER_CHECK,
        f"{FRAME} -k another_slot",
    ),
    in_frame(
        "identity",
        "accept a duplicate of an earlier step",
        "1",
        HEADER_CHECK,
        "    header[2] = max(header[2], wanted[2])\n" + HEADER_CHECK,
        f"{REFUSED} -k duplicated",
    ),
    in_frame(
        "identity",
        "compare rid only",
        "2, 12",
        "(body[:, :NUM_ACCEPTED] == _identity_block(tuple(identities)))",
        "(body[:, :1] == _identity_block(tuple(identities))[:, :1])",
        f"{REFUSED} -k older_incarnation",
    ),
    in_apply(
        "identity",
        "label rows in the receiver's order",
        "2, 3",
        "TreeRows.of_frame(rows, layout.shape, turn.launch.identities)",
        "TreeRows.of_frame(rows, layout.shape, live if len(live) == header.num_rows else turn.launch.identities)",
        f"{RECOMPOSED} -k permuted",
    ),
    in_loop(
        "identity",
        "account before validating",
        "1, 4",
        CHECK,
        "            turn.on_host = frame\n            self._account(turn)\n" + CHECK,
        f"{REFUSED} -k out_of_range",
    ),
    in_trees(
        "identity",
        "adopt an older incarnation",
        "2, 11",
        FOLD,
        FOLD.replace("{identity: own", "{identity.rid: own").replace("get(identity,", "get(identity.rid,"),
        f"{TREES} -k older_incarnation",
    ),
    in_ledger(
        "identity",
        "a retraction is no new incarnation",
        "2, 11",
        "life is None or life.rebuilds != rebuilds or",
        "life is None or",
        f"{LEDGER} -k retraction_makes",
    ),
    in_ledger(
        "identity",
        "a new request under an old id is no new incarnation",
        "12",
        " or life.owner() is not owner:",
        ":",
        f"{LEDGER} -k old_id",
    ),
    in_ledger(
        "identity",
        "the ledger keeps requests alive",
        "9",
        "_Life(weakref.ref(owner, lambda _: self.retire(identity)), rebuilds, identity)",
        "_Life(lambda: owner, rebuilds, identity)",
        f"{LEDGER} -k outside_a_step",
    ),
    in_loop(
        "identity",
        "finished requests are not retired",
        "9, 12",
        "            if is_over:\n",
        "            if is_over and self.step < 0:\n",
        f"{ENDS} -k right_after",
    ),
    in_loop(
        "identity",
        "applying a late frame begins a life",
        "9",
        "self.engine.rows(turn.batch), begin=False)",
        "self.engine.rows(turn.batch), begin=True)",
        f"{ENDS} -k aborted_at_any_point",
    ),
]

FENCE = [
    in_ledger(
        "fence",
        "release at launch",
        "7, 9",
        "        _add(self._in_flight, rows)\n",
        "        _add({}, rows)\n",
        "test/ring/test_disagreement.py -k launches_a_request_again",
    ),
    in_ledger(
        "fence",
        "release an unknown step's rows",
        "9",
        "        if self.expected(slot) is not launch:\n",
        "        if self.expected(slot) is not launch and slot < 0:\n",
        f"{LEDGER} -k only_once",
    ),
    in_ledger(
        "fence",
        "fence middle chunks",
        "8",
        OUTPUT_ROWS,
        "        return list(self.identities)\n",
        f"{CHUNKS} -k consecutive",
    ),
    in_ledger(
        "fence",
        "forget to fence the final chunk",
        "7",
        OUTPUT_ROWS,
        OUTPUT_ROWS.replace("if samples]", "if samples and self.header.kind is FrameKind.VERIFY]"),
        f"{LEDGER} -k last_chunk",
    ),
    in_ledger(
        "fence",
        "release another frame's share",
        "9, 12",
        "        _subtract(self._in_flight, launch.output_rows)\n",
        "        rids = {i.rid for i in launch.output_rows}\n"
        "        _subtract(self._in_flight, [i for i in self._in_flight if i.rid in rids])\n",
        f"{LEDGER} -k reused_id",
    ),
    in_ledger(
        "fence",
        "a zero-token row gives back a share",
        "8, 9",
        "        _subtract(self._in_flight, launch.output_rows)\n",
        "        _subtract(self._in_flight, [i for i in launch.identities if i in self._in_flight])\n",
        f"{LEDGER} -k gives_back_nothing",
    ),
    in_ledger(
        "fence",
        "one frame too many",
        "7",
        "            if self._in_flight.get(identity):\n",
        "            if self._in_flight.get(identity, 0) > 1:\n",
        f"{LEDGER} -k is_not_launched_again",
    ),
    in_ledger(
        "fence",
        "a request may be in a batch twice",
        "7",
        "if len(set(rows)) != len(rows):",
        "if len(set(rows)) > len(rows):",
        "test/ring/test_disagreement.py -k twice",
    ),
]
