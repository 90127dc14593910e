"""Requests: their chunks, their tokens and KV, and what a batch keeps of them."""

from __future__ import annotations

from mutant import CHUNKS, ENDS, FRAME, RECOMPOSED, TOY, Mutant, in_apply, in_frame, in_loop

APPLY = "test/unit/test_apply.py"
ADVANCED = "    advanced = at_launch + num_accepted\n"
COMMIT = "        state.commit_cache(turn, rows, owned_rows(state, turn))\n"
LATEST = "max((t for t in self.loop.turns if t), key=lambda t: t.launch.header.step).forward"

CHUNK = [
    in_loop(
        "chunk / retract",
        "commit the placeholder",
        "8, 11",
        "num_accepted=[int(samples) for samples in launch.samples]",
        "num_accepted=[1 for samples in launch.samples]",
        f"{CHUNKS} -k beside",
    ),
    in_frame(
        "chunk / retract",
        "accept a placeholder as a token",
        "8, 15",
        "elif kind is FrameKind.MIDDLE or samples is False:",
        "elif kind is FrameKind.MIDDLE:",
        f"{FRAME} -k where_it_goes_on",
    ),
    in_apply(
        "chunk / retract",
        "do not drain the chunk counter of an aborted request",
        "10, 11",
        "    return not is_finished or chunks_in_flight > 0\n",
        "    return not is_finished\n",
        f"{ENDS} -k aborted_at_any_point",
    ),
    in_apply(
        "chunk / retract",
        "a frame from before the retraction still counts",
        "10, 11",
        "    if rebuilds != launched_rebuilds or is_retracted:\n",
        "    if is_retracted:\n",
        f"{ENDS} -k retracted_at_any_point",
    ),
    in_apply(
        "chunk / retract",
        "a retracted request still owns its row",
        "11",
        "    if rebuilds != launched_rebuilds or is_retracted:\n",
        "    if False:\n",
        f"{ENDS} -k two_retractions",
    ),
    in_apply(
        "chunk / retract",
        "a frame of a finished request is applied",
        "10",
        "    return not is_finished or chunks_in_flight > 0\n",
        "    return True\n",
        f"{APPLY} -k owns",
    ),
    in_loop(
        "chunk / retract",
        "pause retracts without draining",
        "11",
        "            self._adopt(turn)\n            self._account(turn)\n\n",
        "            self._adopt(turn)\n\n",
        f"{ENDS} -k pause",
    ),
]

ACCOUNTING = [
    in_apply(
        "accounting",
        "keep the optimistic advance",
        "6",
        ADVANCED,
        "    advanced = at_launch + torch.full_like(num_accepted, 3)\n",
        f"{RECOMPOSED} -k accepted",
    ),
    in_apply(
        "accounting",
        "advance twice",
        "6",
        ADVANCED,
        "    advanced = at_launch + 2 * num_accepted\n",
        f"{RECOMPOSED} -k accepted",
    ),
    in_apply(
        "accounting",
        "advance live lengths",
        "3, 6",
        ADVANCED,
        "    advanced = current[: len(num_accepted)] + num_accepted\n",
        f"{RECOMPOSED} -k accepted",
    ),
    in_apply(
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
    in_loop(
        "state",
        "slot off by one",
        "1",
        "self.transport.post(slot)",
        "self.transport.post((slot + 1) % self.num_slots)",
        f"{RECOMPOSED} -k committed_after",
    ),
    in_apply(
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
    in_apply(
        "state",
        "commit the cache of rows that lost their request",
        "10, 19",
        COMMIT,
        "        state.commit_cache(turn, rows, range(header.num_rows))\n",
        f"{ENDS} -k retracted_at_any_point",
    ),
    in_apply(
        "state",
        "nodes numbered with another stride",
        "19",
        "shape.num_draft_tokens\n    return torch.where",
        "shape.max_accepted\n    return torch.where",
        f"{APPLY} -k compaction",
    ),
]
