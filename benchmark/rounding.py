"""How far does bfloat16 move the tiny model's margins, and so what is a tie for the tests on GPUs?

    python -m benchmark.rounding

Its greedy replies to few-shot prompts and to plain questions, written in bfloat16 and weighed again with the same
weights (the files are bfloat16) in float32 arithmetic, on the CPU: how much the log probability of the most likely
token over the next one changes at every position (largest and root mean square), and how small that margin gets.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from sglang_pp_spec.tiny import TARGET_PATH, problems

from .report import emit, provenance

NEW_TOKENS = 48


def prompts() -> dict[str, list[str]]:
    """The few-shot prompts of the server tests and six of their questions."""
    few_shot = [problems.few_shot_prompts(1, 5, seed=100 + seed)[0][0] for seed in range(4)]
    return {"few-shot": few_shot, "questions": [problems.prompt(p.question) for p in problems.held_out(6, seed=1)]}


def margins(model, tokens: torch.Tensor, start: int, pairs: torch.Tensor | None = None) -> tuple:
    """(margin per position, the two tokens it is between [positions, 2]) of the reply that begins at ``start``."""
    said = model(tokens).logits[0, start - 1 : -1].float().log_softmax(-1)
    pairs = said.topk(2, -1).indices if pairs is None else pairs
    chosen = said.gather(1, pairs)
    return chosen[:, 0] - chosen[:, 1], pairs


@torch.no_grad()
def main() -> dict[str, object]:
    """Both kinds of prompts."""
    narrow, wide = (
        AutoModelForCausalLM.from_pretrained(TARGET_PATH, dtype=dtype).eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    found: dict[str, object] = {}
    for kind, texts in prompts().items():
        moved, smallest = [], []
        for text in texts:
            asked = torch.tensor([list(text.encode())])
            reply = narrow.generate(asked, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
            seen, pairs = margins(narrow, reply, asked.shape[1])
            moved.append(seen - margins(wide, reply, asked.shape[1], pairs)[0])
            smallest.append(float(seen.min()))
        every = torch.cat(moved)
        found[kind] = {
            "largest": round(float(every.abs().max()), 3),
            "rms": round(float(every.pow(2).mean().sqrt()), 3),
            "smallest_margin_of_each": [round(value, 3) for value in smallest],
        }
    emit(provenance() | found)
    return found


if __name__ == "__main__":
    main()
