"""Train `sglang_pp_spec.tiny`'s checkpoints from a seed on one CPU thread: the target, then its EAGLE head.

The target is a byte-level Llama trained on solved word problems. The head is EAGLE's first kind, as
SGLang's `LlamaForCausalLMEagle` runs it: one decoder layer without an input norm, fed with
`fc(concat(embedding of token t+1, target's final hidden state of token t))`; its output has no norm of
its own, imitates the target's *normed* hidden state of token t+1, goes through the target's `lm_head`,
and is fed back as the hidden state of the next draft step. `train_tiny_eagle3.py` trains another head.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sglang_pp_spec.tiny import DRAFT_PATH, TARGET_PATH, problems

BOS, EOS, PAD = 256, 257, 258  # a token below 256 is the byte itself; no text starts with BOS
VOCAB = 320
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
QUESTION_WEIGHT = 0.1  # of a question's byte in the losses; a byte of an answer weighs 1
SHORT, LONG = 384, 2048  # row lengths: two problems; about eleven, for few-shot prompts


# --- data ---


class Rows:
    """Endless training rows. A row is whole problems, the last one cut.

    Half of the rows part their problems with EOS, half with a blank line as few-shot prompts do; either
    way the label after an answer is EOS.
    """

    def __init__(self, seed: int):
        self._problems = problems.training(seed)
        self._coin = torch.Generator("cpu").manual_seed(seed)

    def row(self, length: int) -> tuple[list[int], list[int], list[float]]:
        """The next row's tokens, labels and loss weights, `length` of each."""
        blank = torch.rand((), generator=self._coin, device="cpu") < 0.5
        separator = list(b"\n\n") if blank else [EOS]
        tokens: list[int] = []
        labels: list[int] = []
        weights: list[float] = []
        while len(tokens) <= length:
            problem = next(self._problems)
            asked = len(problems.prompt(problem.question))
            text = list(problems.document(problem).encode())
            tokens += text + separator
            labels += [*text[1:], EOS, *separator[1:], ord("Q")]
            weights += [QUESTION_WEIGHT] * (asked - 1) + [1.0] * (len(text) - asked + 1)
            weights += [QUESTION_WEIGHT] * len(separator)
        return tokens[:length], labels[:length], weights[:length]

    def take(self, n: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """A batch of rows: tokens and labels (int64) and weights (float32), each [n, length]."""
        tokens, labels, weights = zip(*(self.row(length) for _ in range(n)), strict=True)
        return torch.tensor(tokens), torch.tensor(labels), torch.tensor(weights)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges whose token ids are the bytes; adds neither BOS nor EOS."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


# --- training ---


def optimizers(model: nn.Module, steps: int, lr: float) -> list:
    """Muon for the matrices inside the layers, AdamW for the rest, both with warm-up and linear decay."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers." in n)]
    found = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def scale(step: int) -> float:
        return min(1.0, (step + 1) / 50, (steps - step) / (0.7 * steps))

    return [(o, torch.optim.lr_scheduler.LambdaLR(o, scale)) for o in found]


def device_type(model: nn.Module) -> str:
    """The type of device the model is on."""
    return next(model.parameters()).device.type


def descend(loss: Tensor, model: nn.Module, opts: list) -> None:
    """One clipped optimizer step on `loss`."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, schedule in opts:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def train_target(seed: int, steps: int, lr: float, start: Path | None = None, batch: int = 8) -> LlamaForCausalLM:
    """Train the target, from scratch or from a checkpoint; the last tenth of the steps mixes in long rows."""
    torch.manual_seed(seed)
    if start is None:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=6))
    else:
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    opts, data = optimizers(model, steps, lr), Rows(seed)
    bar = tqdm(range(steps), desc="target", mininterval=5)
    for step in bar:
        long = step > 0.9 * steps and step % 4 == 0
        tokens, labels, weights = data.take(max(1, batch // 4), LONG) if long else data.take(batch, SHORT)
        with torch.autocast(device_type(model), torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        answer = each[weights.flatten() == 1].mean()
        descend((each * weights.flatten()).sum() / weights.sum(), model, opts)
        if step % 20 == 0:
            bar.set_postfix(answer=f"{answer:.4f}", all=f"{each.mean():.3f}", refresh=False)
    return model.eval()


def round_to_bfloat16(model: nn.Module) -> None:
    """Round every weight to a bfloat16 value, kept in float32."""
    for p in model.parameters():
        p.data = p.data.bfloat16().float()


class EagleHead(nn.Module):
    """EAGLE's draft layer; state-dict names are those SGLang loads."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()

    def features(self, target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the head is fed of the target, and the target's final hidden states, each [B, T, .]."""
        hidden = target.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden, hidden

    def draft(self, target: LlamaForCausalLM, output: Tensor) -> Tensor:
        """The likeliest token after each output, [B, R]."""
        return target.lm_head(output).argmax(-1)

    def _inputs(self, embeds: Tensor, state: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream it is added to."""
        x = self.fc(torch.cat((embeds, state), -1))
        return x, x

    def _heads(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Split [B, R, heads * D] into [B, heads, R, D], rotated where positions [R] are given, and repeat
        key or value heads for the queries."""
        x = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        if positions is not None:
            half = self.config.head_dim // 2
            theta = self.config.rope_parameters["rope_theta"]
            angles = positions[:, None] / theta ** (torch.arange(half, device=x.device) / half)
            cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
            x = x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
        return x.repeat_interleave(self.config.num_attention_heads // x.shape[1], 1)

    def unroll(self, embeds: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Draft `depth` steps from every position at once, each chain seeing what it would see when served.

        Args:
            embeds: target embeddings of tokens 1..T, [B, T, H] float.
            hidden: `features` of tokens 0..T-1, [B, T, .] float.
        Returns:
            Step d's outputs [B, R, H], R = T - depth + 1, from root t: the guess of hidden state t + d.
        """
        layer, attn = self.layers[0], self.layers[0].self_attn
        roots = embeds.shape[1] - depth + 1
        positions = torch.arange(roots, device=embeds.device)
        mask = torch.full((roots, roots), float("-inf"), device=embeds.device).triu(1)
        state, outputs, own_keys, own_values = hidden[:, :roots], [], [], []
        for d in range(depth):
            x, residual = self._inputs(embeds[:, d : d + roots], state, d)
            q = self._heads(attn.q_proj(x), positions + d) * self.config.head_dim**-0.5
            k, v = self._heads(attn.k_proj(x), positions + d), self._heads(attn.v_proj(x), None)
            if d == 0:
                keys, values = k, v
            else:
                own_keys.append(k)
                own_values.append(v)
            scores = [q @ keys.transpose(-1, -2) + mask, *((q * k).sum(-1, keepdim=True) for k in own_keys)]
            probs = torch.cat(scores, -1).softmax(-1)
            mixed = probs[..., :roots] @ values
            for i, v in enumerate(own_values):
                mixed = mixed + probs[..., roots + i : roots + i + 1] * v
            x = residual + attn.o_proj(mixed.transpose(1, 2).flatten(-2))
            state = x + layer.mlp(layer.post_attention_layernorm(x))
            outputs.append(state)
        return outputs


def train_head(target: LlamaForCausalLM, seed: int, steps: int, lr: float, depth: int = 3) -> EagleHead:
    """Train the head on the frozen target's hidden states, `depth` draft steps unrolled."""
    torch.manual_seed(seed)
    head = EagleHead(LlamaConfig(**SHAPE, num_hidden_layers=1, attn_implementation="sdpa"))
    opts, data = optimizers(head, steps, lr), Rows(seed + 1)
    bar = tqdm(range(steps), desc="head", mininterval=5)
    for step in bar:
        tokens, _, weights = data.take(8, SHORT)
        with torch.no_grad():
            hidden = target.model(input_ids=tokens, use_cache=False).last_hidden_state
            embeds, wanted = target.model.embed_tokens(tokens[:, 1:]), target.lm_head(hidden).softmax(-1)
        loss = torch.zeros(())
        for d, guess in enumerate(head.unroll(embeds, hidden[:, :-1], depth), 1):
            at = slice(d, d + guess.shape[1])
            w = weights[:, at] / weights[:, at].sum()
            cross = F.cross_entropy(target.lm_head(guess).mT, wanted[:, at].mT, reduction="none")
            distance = F.smooth_l1_loss(guess, hidden[:, at], reduction="none").mean(-1)
            loss = loss + (w * (cross + distance)).sum()
        descend(loss, head, opts)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return head.eval()


# --- evaluation ---


@torch.no_grad()
def greedy(target: LlamaForCausalLM, prompts: list[str], new_tokens: int = 128) -> list[list[int]]:
    """Greedy replies as token lists, EOS included."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (longest - len(p)) + list(p.encode()) for p in prompts])
    out = target.generate(
        tokens,
        attention_mask=(tokens != PAD).long(),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return [[t for t in row if t != PAD] for row in out[:, longest:].tolist()]


def accuracy(replies: list[list[int]], asked: list[problems.Problem]) -> float:
    """Share of replies that end by themselves and give the right number."""
    texts = [bytes(t for t in r if t < 256).decode(errors="replace") if EOS in r else "" for r in replies]
    return sum(problems.final_number(t) == p.number for t, p in zip(texts, asked, strict=True)) / len(asked)


@torch.no_grad()
def acceptance(
    target: LlamaForCausalLM, head: EagleHead, prompts: list[str], replies: list[list[int]], steps: int
) -> float:
    """Mean number of tokens a verification commits when the head drafts chains of `steps` tokens greedily."""
    committed = verifications = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = torch.tensor([[*prompt.encode(), *reply, *[PAD] * (steps + 1)]])
        fed, _ = head.features(target, tokens)
        outputs = head.unroll(target.model.embed_tokens(tokens[:, 1:]), fed[:, :-1], steps)
        roots = outputs[0].shape[1] - 1
        hits = [head.draft(target, o[:, :-1])[0] == tokens[0, d : d + roots] for d, o in enumerate(outputs, 2)]
        gained = commits(hits, len(prompt), len(prompt) + len(reply) - 1)  # from the last token known to EOS
        committed, verifications = committed + sum(gained), verifications + len(gained)
    return committed / verifications


def commits(hits: list[Tensor], last: int, end: int) -> list[int]:
    """Tokens each verification commits from ``last`` to ``end``; ``hits[d][t]``: draft d from token t is right."""
    gained = []
    while last < end:
        accepted = 0
        while accepted < len(hits) and hits[accepted][last - 1]:
            accepted += 1
        gained.append(min(accepted + 1, end - last))
        last += gained[-1]
    return gained


# --- checkpoints ---


def save_target(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the target in bfloat16 with its tokenizer."""
    model.bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    model.float()


def save_head(head: EagleHead, target: LlamaForCausalLM, folder: Path) -> None:
    """Write the head in bfloat16, with a copy of the target's embedding to stand by itself."""
    weights = {"embed_tokens.weight": target.model.embed_tokens.weight, **head.state_dict()}
    weights = {k: v.detach().bfloat16().contiguous() for k, v in weights.items()}
    write_head(folder, weights, architectures=["LlamaForCausalLMEagle"])


def write_head(folder: Path, weights: dict[str, Tensor], **config) -> None:
    """A head's checkpoint: the target's shape, one layer, and what `config` adds."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    whole = LlamaConfig(**SHAPE, num_hidden_layers=1, dtype="bfloat16", **config)
    (folder / "config.json").write_text(json.dumps(whole.to_dict(), indent=2, sort_keys=True) + "\n")


def report(target: LlamaForCausalLM, n: int) -> None:
    """Print the target's held-out accuracy, zero-shot and few-shot."""
    asked = problems.held_out(n, seed=1)
    replies = greedy(target, [problems.prompt(p.question) for p in asked])
    print(f"held-out accuracy, zero-shot, {n} problems: {accuracy(replies, asked):.4f}")
    for shots in (3, 8):
        shown = problems.few_shot_prompts(n // 4, shots, seed=2)
        right = accuracy(greedy(target, [t for t, _ in shown]), [p for _, p in shown])
        print(f"held-out accuracy, {shots}-shot, {n // 4} problems: {right:.4f}")


def report_head(target: LlamaForCausalLM, head: EagleHead, n: int) -> None:
    """Print a head's acceptance lengths on at most 200 of the same problems."""
    prompts = [problems.prompt(p.question) for p in problems.held_out(n, seed=1)[:200]]
    replies = greedy(target, prompts)
    for steps in (1, 2, 3, 4):
        length = acceptance(target, head, prompts, replies, steps)
        print(f"{type(head).__name__}: acceptance length, chain of {steps} draft steps: {length:.3f} of {steps + 1}")


def main() -> None:
    """Train, round, save and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET_PATH.parent, help="folder of the checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="a target checkpoint to train on from")
    parser.add_argument("--steps", type=int, default=3200, help="of the target")
    parser.add_argument("--lr", type=float, default=1.5e-2, help="of the target")
    parser.add_argument("--draft-steps", type=int, default=200)
    parser.add_argument("--draft-lr", type=float, default=1e-2)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step of the target")
    parser.add_argument(
        "--device", default="cpu", help="another device is faster; its weights differ in the last bits"
    )
    parser.add_argument("--held-out", type=int, default=1000, help="problems to measure on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(args.device)
    torch.backends.cuda.enable_cudnn_sdp(False)  # not there in every installation, and not needed
    start = time.monotonic()
    target = train_target(args.seed, args.steps, args.lr, args.start, args.batch)
    round_to_bfloat16(target)
    save_target(target, args.out / TARGET_PATH.name)
    head = train_head(target, args.seed, args.draft_steps, args.draft_lr)
    round_to_bfloat16(head)
    save_head(head, target, args.out / DRAFT_PATH.name)
    print(f"trained in {time.monotonic() - start:.0f} s")
    report(target, args.held_out)
    report_head(target, head, args.held_out)


if __name__ == "__main__":
    main()
