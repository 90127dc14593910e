"""Which tokens can rounding choose? The tiny target, every layer's output rounded to bfloat16 at random.

    python -m benchmark.rounding

A kernel that adds up in another order rounds some outputs up where another kernel rounds them down. Monte Carlo
arithmetic (D. S. Parker, 1997) does so at random: float32 inside a layer, what comes out of it is one of the two
bfloat16 numbers around it, the nearer one more often. (Layers are linear ones, norms and whole decoder layers; what
rotary embedding and attention round themselves is not.) Where two tokens win draws, rounding may be what two servers
differ by. What one server thinks of two tokens tells less: on few-shot prompts, which this model does not understand,
it jumps, and prefers one of two winners by far (the command prints by how much).

Printed per kind of prompt: positions of its greedy replies at which more than one token won, and the largest margin
in log probability of one such winner over another, in any draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sglang_pp_spec.server import Reply
from sglang_pp_spec.tiny import TARGET_PATH, problems

from .report import emit, provenance
from .ties import Difference

NEW_TOKENS = 48
DRAWS = 256
_AT_ONCE = 16  # draws in one forward
_DROPPED_BITS = 16  # of float32's mantissa; what is left is a bfloat16


class RoundedTarget:
    """The target; every forward rounds anew."""

    def __init__(self, seed: int = 0) -> None:
        self._seed, self._random = seed, torch.Generator()
        self.model = AutoModelForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.float32).eval()
        for module in self.model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__.endswith(("RMSNorm", "DecoderLayer")):
                module.register_forward_hook(self._round_output)

    @torch.no_grad()
    def log_probabilities(self, tokens: Sequence[int], start: int, draws: int = DRAWS) -> Tensor:
        """What each draw thinks of the tokens from ``start`` on and of the one after: [draws, positions, V].

        The same every time, whatever was asked before.
        """
        self._random.manual_seed(self._seed)
        row = torch.tensor(list(tokens))
        drawn = []
        for first in range(0, draws, _AT_ONCE):
            rows = row.expand(min(_AT_ONCE, draws - first), -1)
            drawn.append(self.model(rows, logits_to_keep=len(row) - start + 1).logits.log_softmax(-1))
        return torch.cat(drawn)

    def winners(self, tokens: Sequence[int], draws: int = DRAWS) -> Counter[int]:
        """The most likely next token of each draw, and how many draws it won."""
        return Counter(self.log_probabilities(tokens, len(tokens), draws)[:, -1].argmax(-1).tolist())

    def _round_output(self, module: nn.Module, inputs: object, output: Tensor | tuple) -> Tensor | tuple:
        if isinstance(output, tuple):
            return round_at_random(output[0], self._random), *output[1:]
        return round_at_random(output, self._random)


def round_at_random(values: Tensor, random: torch.Generator) -> Tensor:
    """float32 ``values`` as one of the bfloat16 numbers around each, the nearer one more often; still float32."""
    bits = values.contiguous().view(torch.int32)
    added = torch.randint(0, 1 << _DROPPED_BITS, bits.shape, generator=random, dtype=torch.int32)
    return ((bits + added) & -(1 << _DROPPED_BITS)).view(torch.float32)


def unexplained(
    found: Iterable[Difference],
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Reply],
    target: RoundedTarget,
) -> list[Difference]:
    """Those of ``found`` that are no ties and of whose two tokens one wins no draw: faults.

    Prints how often each token of the others won.
    """
    return [one for one in found if not one.is_tie() and not _may_be_rounding(one, prompts, plain, target)]


def _may_be_rounding(
    one: Difference, prompts: Sequence[Sequence[int]], plain: Sequence[Reply], target: RoundedTarget
) -> bool:
    if one.plain_token is None or one.token is None:
        return False  # a reply of another length
    won = target.winners([*prompts[one.request], *plain[one.request].token_ids[: one.position]])
    print(f"{one}: of {won.total()} draws plain's token wins {won[one.plain_token]}, the other {won[one.token]}")
    return won[one.plain_token] > 0 and won[one.token] > 0


def prompts() -> dict[str, list[str]]:
    """The few-shot prompts of the server tests and six of their questions."""
    few_shot = [problems.few_shot_prompts(1, 5, seed=100 + seed)[0][0] for seed in range(4)]
    return {"few-shot": few_shot, "questions": [problems.prompt(p.question) for p in problems.held_out(6, seed=1)]}


def measured(texts: Sequence[str], target: RoundedTarget) -> dict[str, object]:
    """How settled the greedy replies to ``texts`` are."""
    nearest = AutoModelForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.bfloat16).eval()
    positions, unsettled, largest = 0, 0, 0.0
    for text in texts:
        asked = torch.tensor([list(text.encode())])
        reply = nearest.generate(asked, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[0].tolist()
        drawn = target.log_probabilities(reply, asked.shape[1])[:, :-1]
        for said in drawn.unbind(1):
            won = said.argmax(-1).unique()
            positions += 1
            unsettled += len(won) > 1
            among = said[:, won]
            largest = max(largest, float((among.amax(-1) - among.amin(-1)).max()))
    return {"positions": positions, "unsettled": unsettled, "largest_margin": round(largest, 3)}


def main() -> dict[str, object]:
    """Both kinds of prompts."""
    target = RoundedTarget()
    found = {kind: measured(texts, target) for kind, texts in prompts().items()}
    emit(provenance() | {"draws": DRAWS, **found})
    return found


if __name__ == "__main__":
    main()
