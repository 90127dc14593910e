"""GSM8K, few-shot and greedy: PP x EAGLE through the plugin against plain EAGLE on one stage, reply by reply.

    python -m benchmark.gsm8k --model M/target --draft M/draft --data GSM8K_FOLDER --json OUT.json
    python -m benchmark.gsm8k ... --colocated                    # both stages on one GPU

The prompt, the stop words and the number taken from a reply are those of SGLang's few-shot evaluation. ``sgl-eval``
asks zero-shot over the chat endpoint and reports no token ids, which are what is compared here.

In bfloat16 a batch of another shape may flip a tie, so replies need not be identical. For every reply that differs a
third server, without speculation, is asked what it thinks of the two tokens at the first difference: a difference of
at most ``--tie`` in log probability is a tie, more is a fault. Exit status 1 on a fault, where the accuracies differ
by more than two standard errors, or where acceptance length differs by more than 1 %.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang.test.few_shot_gsm8k import get_answer_value, get_few_shot_examples, get_one_example
from sglang.utils import read_jsonl
from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_pp_spec.core.settings import COLOCATED
from sglang_pp_spec.server import Mode, Reply, Server, ServerSpec, started_together

from .arms import GPU_ARGS
from .report import emit, provenance, table
from .ties import TIE, Difference, differences

STOP = ["Question", "Assistant:", "<|separator|>"]
ACCEPTANCE_TOLERANCE = 0.01
MODES: tuple[Mode, ...] = ("plain", "plugin")


@dataclass(frozen=True)
class Question:
    """One question of the test split: its whole few-shot prompt as tokens, and its number."""

    tokens: list[int]
    number: float


def questions(folder: Path, tokenizer: Any, count: int, shots: int) -> list[Question]:
    """The first ``count`` questions of the test split behind ``shots`` examples of the train split."""
    shown = get_few_shot_examples(list(read_jsonl(str(folder / "train.jsonl"))), shots)
    asked = list(read_jsonl(str(folder / "test.jsonl")))[:count]
    return [
        Question(
            tokenizer(shown + get_one_example(asked, i, include_answer=False))["input_ids"],
            get_answer_value(asked[i]["answer"]),
        )
        for i in range(len(asked))
    ]


def ask_both(asked: Sequence[Question], options: argparse.Namespace) -> dict[Mode, list[Reply]]:
    """The replies of plain EAGLE and of the plugin; both servers start at once and are asked one after the other."""
    servers = {mode: Server(spec_of(mode, options), log_path=_log(mode, options)) for mode in MODES}
    with started_together(*servers.values()):
        return {mode: ask(mode, server, asked, options) for mode, server in servers.items()}


def _log(mode: Mode, options: argparse.Namespace) -> Path | None:
    return Path(options.logs) / f"gsm8k_{mode}.log" if options.logs else None


def ask(mode: Mode, server: Server, asked: Sequence[Question], options: argparse.Namespace) -> list[Reply]:
    """One server's replies."""
    sampling = {"temperature": 0.0, "max_new_tokens": options.new_tokens, "stop": STOP}
    prompts = [question.tokens for question in asked]
    with tqdm(total=len(asked), desc=mode, mininterval=5) as bar:
        return server.generate(prompts, sampling, concurrency=options.concurrency, on_reply=lambda _: bar.update())


def summary(replies: Sequence[Reply], asked: Sequence[Question], plain: Sequence[Reply]) -> dict[str, float | int]:
    """One arm's figures."""
    rounds = sum(reply.verify_rounds for reply in replies)
    pairs = list(zip(replies, asked, strict=True))
    return {
        "questions": len(asked),
        "accuracy": sum(get_answer_value(reply.text) == question.number for reply, question in pairs) / len(asked),
        "accept_length": sum(reply.completion_tokens for reply in replies) / max(1, rounds),
        "verify_rounds": rounds,
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(replies, plain, strict=True)),
    }


def judged(spec: ServerSpec, asked: Sequence[Question], plain: list[Reply], ours: list[Reply]) -> list[Difference]:
    """Every reply that differs, judged by the server of ``spec``, which is not started if none does."""
    if all(a.token_ids == b.token_ids for a, b in zip(plain, ours, strict=True)):
        return []
    with Server(spec) as judge:
        return differences(judge, [question.tokens for question in asked], plain, ours)


def verdicts(arms: dict[str, dict[str, Any]], found: Sequence[Difference], tie: float) -> list[str]:
    """What speaks against the plugin; empty if nothing does."""
    plain, ours = arms["plain"], arms["plugin"]
    said = [f"no tie: {asdict(one)}" for one in found if not one.is_tie(tie)]
    p, n = plain["accuracy"], plain["questions"]
    error = math.sqrt(2 * p * (1 - p) / n)
    if abs(ours["accuracy"] - p) > 2 * error:
        said.append(f"accuracy {ours['accuracy']:.3f}, plain {p:.3f}, standard error of the difference {error:.3f}")
    if not plain["verify_rounds"]:
        said.append("plain EAGLE reports no verify rounds: nothing was speculated")
    elif abs(ours["accept_length"] / plain["accept_length"] - 1) > ACCEPTANCE_TOLERANCE:
        said.append(f"acceptance length {ours['accept_length']:.4f}, plain {plain['accept_length']:.4f}")
    return said


def spec_of(mode: Mode, options: argparse.Namespace) -> ServerSpec:
    """The server of an arm; the judge is the one without speculation."""
    pp = options.pp if mode == "plugin" else 1
    env = {COLOCATED: "1"} if options.colocated and pp > 1 else {}
    spec = ServerSpec(options.model, options.draft, pp=pp, mode=mode, steps=options.steps, extra_env=env)
    args = () if spec.on_cpu else (*GPU_ARGS, "--cuda-graph-max-bs-decode", str(options.concurrency))
    return replace(spec, extra_args=(*args, *options.server_args.split()))


def main() -> int:
    options = _parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    asked = questions(options.data, tokenizer, options.questions, options.shots)
    replies = ask_both(asked, options)
    arms = {mode: summary(found, asked, replies["plain"]) for mode, found in replies.items()}
    found = judged(spec_of("nospec", options), asked, replies["plain"], replies["plugin"])
    print(table(["arm", *arms["plain"]], [[mode, *row.values()] for mode, row in arms.items()]))
    said = verdicts(arms, found, options.tie)
    print("\n".join(f"FAILED: {one}" for one in said) or "passed")
    shown = [asdict(one) | {"tie": one.is_tie(options.tie)} for one in found]
    emit(provenance() | {"arms": arms, "differences": shown, "failed": said}, options.json)
    return 1 if said else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--shots", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="draft steps, one token each")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tie", type=float, default=TIE, help="largest difference in log probability of a tie")
    parser.add_argument("--colocated", action="store_true", help="all stages on GPU 0, over CUDA IPC")
    parser.add_argument("--server-args", default="", help="added to every server's command line")
    parser.add_argument("--logs", default="", help="folder for server logs")
    parser.add_argument("--json", default="")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
