"""Train the EAGLE-3 head of `sglang_pp_spec.tiny`'s target, from a seed on one CPU thread, in a minute.

The head is of EAGLE's third kind, as SGLang's `LlamaForCausalLMEagle3` runs it. `fc` takes the outputs of three of
the target's layers, nothing else; attention reads `concat(normed embedding, normed state)`, and the state
itself is the residual stream. A step's output is fed back as it is, past `fc`; for the logits it goes through
a norm and an `lm_head` of its own, whose vocabulary is a part of the target's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from train_tiny import (
    EOS,
    SHAPE,
    SHORT,
    EagleHead,
    Rows,
    descend,
    optimizers,
    report_head,
    round_to_bfloat16,
    write_head,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sglang_pp_spec.tiny import DRAFT_EAGLE3_PATH, TARGET_PATH, problems

AUX_LAYERS = (0, 2, 4)  # whose outputs the head reads: one of each third of the target
AUX_SCALE = 256.0  # they are this large; training divides them by it, and the saved `fc` does so instead
DRAFT_VOCAB = 64  # the text has 72 different bytes, so a few capitals cannot be drafted


class Eagle3Head(EagleHead):
    """EAGLE-3's draft layer; `tokens` [DRAFT_VOCAB] are the ids it can draft, ascending."""

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM, tokens: Tensor):
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * size, size, bias=False)
        layer, attn = self.layers[0], self.layers[0].self_attn
        layer.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        layer.hidden_norm = LlamaRMSNorm(size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attn, name, nn.Linear(2 * size, getattr(attn, name).out_features, bias=False))
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(tokens), bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight[tokens])
        self.tokens = tokens

    def features(self, target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled outputs of `AUX_LAYERS` side by side, and the target's final hidden states."""
        out = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[i + 1] for i in AUX_LAYERS], -1) / AUX_SCALE, out.last_hidden_state

    def logits(self, output: Tensor) -> Tensor:
        """Logits of the draft vocabulary, [B, R, DRAFT_VOCAB]."""
        return self.lm_head(self.norm(output))

    def draft(self, target: LlamaForCausalLM, output: Tensor) -> Tensor:
        """The likeliest token after each output, [B, R]."""
        return self.tokens[self.logits(output).argmax(-1)]

    def _inputs(self, embeds: Tensor, state: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream it is added to."""
        state = self.fc(state) if step == 0 else state
        layer = self.layers[0]
        return torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(state)), -1), state


def draft_vocabulary(seed: int, size: int = DRAFT_VOCAB) -> Tensor:
    """EOS and the `size - 1` most frequent bytes of the training text, ascending."""
    texts = (problems.document(p).encode() for p in islice(problems.training(seed), 20_000))
    counts = Counter(byte for text in texts for byte in text)
    return torch.tensor(sorted([EOS, *(byte for byte, _ in counts.most_common(size - 1))]))


def train_eagle3_head(target: LlamaForCausalLM, seed: int, steps: int, lr: float, depth: int = 3) -> Eagle3Head:
    """Train the EAGLE-3 head on the frozen target's distributions, `depth` draft steps unrolled."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, num_hidden_layers=1, attn_implementation="sdpa")
    head = Eagle3Head(config, target, draft_vocabulary(seed))
    opts, data = optimizers(head, steps, lr), Rows(seed + 1)
    bar = tqdm(range(steps), desc="eagle3 head", mininterval=5)
    for step in bar:
        tokens, _, weights = data.take(8, SHORT)
        with torch.no_grad():
            fed, hidden = head.features(target, tokens)
            embeds = target.model.embed_tokens(tokens[:, 1:])
            wanted = target.lm_head(hidden).softmax(-1)[..., head.tokens]  # may sum to less than 1
        loss = torch.zeros(())
        for d, output in enumerate(head.unroll(embeds, fed[:, :-1], depth), 1):
            at = slice(d, d + output.shape[1])
            cross = F.cross_entropy(head.logits(output).mT, wanted[:, at].mT, reduction="none")
            loss = loss + (weights[:, at] * cross).sum() / weights[:, at].sum()
        descend(loss, head, opts)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return head.eval()


def save_eagle3_head(head: Eagle3Head, target: LlamaForCausalLM, folder: Path) -> None:
    """Write the EAGLE-3 head in bfloat16; `d2t` is what to add to a draft id to get the target's."""
    weights = {"embed_tokens.weight": target.model.embed_tokens.weight, **head.state_dict()}
    weights["fc.weight"] = weights["fc.weight"] / AUX_SCALE
    weights = {k.replace("layers.0.", "midlayer."): v.detach().bfloat16().contiguous() for k, v in weights.items()}
    weights["d2t"] = head.tokens - torch.arange(len(head.tokens))
    write_head(
        folder,
        weights,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(head.tokens),
        target_hidden_size=SHAPE["hidden_size"],
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
    )


def main() -> None:
    """Train, round, save and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DRAFT_EAGLE3_PATH, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100, help="few, so that drafts are rejected, too")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--held-out", type=int, default=200, help="problems to measure on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = LlamaForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.float32).eval()
    head = train_eagle3_head(target, args.seed, args.steps, args.lr)
    round_to_bfloat16(head)
    save_eagle3_head(head, target, args.out)
    report_head(target, head, args.held_out)


if __name__ == "__main__":
    main()
