"""Frames: what is in them, and who makes them."""

from __future__ import annotations

from mutant import CORE, FRAME, RECOMPOSED, TOY, TREES, Mutant, in_frame, in_trees

PAYLOAD = [
    in_trees(
        "payload",
        "zeros as drafts",
        "16",
        "num_drafts=rows.num_drafts.clone(),",
        "num_drafts=torch.full_like(rows.num_drafts, shape.num_drafts),",
        f"{RECOMPOSED} -k empty_draft_column",
    ),
    in_frame(
        "payload",
        "clip or spill a width silently",
        "15",
        "    _check_widths(layout.shape, payload)\n    body",
        "    body",
        f"{FRAME} -k another_width",
    ),
    in_frame(
        "payload",
        "padding as data",
        "15",
        "        body = frame[1 : 1 + num_rows]\n",
        "        body = frame[1:]\n",
        f"{FRAME} -k padding_rows",
    ),
    in_frame(
        "payload",
        "any count is good",
        "15",
        "    if not smallest <= accepted <= largest:\n",
        "    if not 0 <= accepted <= layout.shape.max_accepted:\n",
        f"{FRAME} -k at_most_a_path",
    ),
    in_trees(
        "payload",
        "new tokens with old topology",
        "17",
        "            self.tokens, self.parents, self.selected = newer.tokens, newer.parents, newer.selected\n",
        "            self.tokens = newer.tokens\n",
        f"{RECOMPOSED} -k committed_after",
    ),
    in_trees(
        "payload",
        "topology stays when rows move",
        "17",
        "            self.parents, self.selected = self.parents[index], self.selected[index]",
        "            self.parents, self.selected = self.parents[: len(index)], self.selected[: len(index)]",
        f"{RECOMPOSED} -k permuted",
    ),
    in_trees(
        "payload",
        "buffer shared without a copy",
        "23",
        "rows.parents.clone()",
        "rows.parents",
        f"{TREES} -k buffer",
    ),
    in_trees(
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
