"""How well two servers agree where rounding lets their replies part: by log probabilities.

A random target's best tokens are often nearly tied, so in bfloat16 replies part, and behind that nothing can be
compared. Up to there both servers computed log probabilities for the same tokens, and a wrong state moves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workloads import Ask

from benchmark.ties import first_difference, margin
from sglang_pp_spec.server import Reply

_LOOKED_AT = 5  # most likely tokens that a server reports
_UNNAMED = 99.0  # the margin of a token that is not among them


def with_logprobs(asks: Sequence[Ask]) -> list[Ask]:
    """``asks`` with log probabilities of each reply's tokens."""
    wanted = {"return_logprob": True, "top_logprobs_num": _LOOKED_AT}
    return [replace(ask, fields={**ask.fields, **wanted}) for ask in asks]


@dataclass(frozen=True)
class Agreement:
    """Of all replies of two servers; log probabilities are natural logarithms."""

    apart: list[float]  # log probabilities of the tokens before replies part, one server's from the other's
    margins: list[float]  # where replies part: plain's token before the other one, in plain's own eyes

    def __str__(self) -> str:
        far = sorted(self.apart)[-3:]
        margins = [round(one, 3) for one in sorted(self.margins)[-3:]]
        return f"{len(self.apart)} tokens, apart by at most {far}; {len(self.margins)} replies part, by {margins}"


def agreement(plain: Sequence[Reply], others: Sequence[Reply]) -> Agreement:
    """Of ``others`` with ``plain``; both were asked ``with_logprobs``."""
    apart, margins = [], []
    for a, b in zip(plain, others, strict=True):
        position = first_difference(a.token_ids, b.token_ids)
        theirs, ours = ([value for value, *_ in r.meta["output_token_logprobs"]][:position] for r in (a, b))
        apart += [abs(x - y) for x, y in zip(theirs, ours, strict=True)]
        if position is not None:
            tokens = (reply.token_ids[position] for reply in (a, b))
            found = margin(a.meta["output_top_logprobs"][position], *tokens)
            margins.append(_UNNAMED if found is None else found)
    return Agreement(apart, margins)
