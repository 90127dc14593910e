"""Where the replies of two servers part, and whether rounding may have parted them.

In bfloat16 a batch of another shape may decide otherwise between two tokens that are about equally likely. So where
two replies first differ, the target itself is asked, without speculation, what it thinks of the two tokens: a small
difference in log probability is a tie. A large one is a fault of the server, unless the target is unsettled there
(``benchmark.rounding``, for the tiny one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_pp_spec.server import Reply, Server

TIE = 0.25  # largest difference in log probability that counts as a tie: a step of bfloat16 between 32 and 64
_FLOAT32 = 1e-4  # log probabilities are float32: two logits one step apart were 0.25000006 apart
_LOOKED_AT = 20  # most likely tokens the judge reports


@dataclass(frozen=True)
class Difference:
    """Where a reply first differs from the plain one, and how much the target itself prefers the plain token."""

    request: int
    position: int  # in the reply
    plain_token: int | None  # None: this reply ends here
    token: int | None
    margin: float | None  # log probability of plain's token less that of the other; None: the judge did not name it

    def is_tie(self, tie: float = TIE) -> bool:
        """Whether rounding may have decided between the two tokens."""
        return self.margin is not None and abs(self.margin) <= tie + _FLOAT32


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two replies differ, None if they are the same."""
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))


def differences(
    judge: Server, prompts: Sequence[Sequence[int]], plain: Sequence[Reply], others: Sequence[Reply]
) -> list[Difference]:
    """Every reply to ``prompts`` (token ids) that differs, judged: a judge's only token comes from its prefill."""
    found = []
    for i, (a, b) in enumerate(zip(plain, others, strict=True)):
        position = first_difference(a.token_ids, b.token_ids)
        if position is not None:
            found.append(_judge(judge, i, position, prompts[i], a.token_ids, b.token_ids))
    return found


def _judge(
    judge: Server, request: int, position: int, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Difference:
    tokens = [reply[position] if position < len(reply) else None for reply in (plain, other)]
    reply = judge.generate(
        [*prompt, *plain[:position]],
        {"temperature": 0.0, "max_new_tokens": 1},
        return_logprob=True,
        top_logprobs_num=_LOOKED_AT,
    )
    return Difference(request, position, *tokens, margin(reply.meta["output_top_logprobs"][0], *tokens))


def margin(top: Sequence[Sequence[Any]], plain_token: int | None, token: int | None) -> float | None:
    """Log probability of ``plain_token`` less that of ``token``; ``top`` holds (log probability, token, text)."""
    of = {entry[1]: entry[0] for entry in top}
    if plain_token not in of or token not in of:
        return None
    return of[plain_token] - of[token]
