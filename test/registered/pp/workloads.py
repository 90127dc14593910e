"""What the server tests ask, and how replies of two servers are compared: tokens, acceptance and verify rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_pp_spec.server import Reply, Server
from sglang_pp_spec.tiny import problems

CHUNK = 128  # tokens of a prefill chunk on every server of these tests


@dataclass(frozen=True)
class Ask:
    """One request: what, how long, and when after the start of its workload."""

    prompt: str | list[int]
    max_new_tokens: int = 96
    after_s: float = 0.0
    ignore_eos: bool = False
    fields: dict[str, Any] = field(default_factory=dict)  # of the request's body
    sampling: dict[str, Any] = field(default_factory=dict)


def questions(count: int = 24) -> list[Ask]:
    """Held-out problems, zero-shot, all at once."""
    return [Ask(problems.prompt(problem.question)) for problem in problems.held_out(count, seed=1)]


def long_prompts() -> list[Ask]:
    """Few-shot prompts of more than three chunks each."""
    return [Ask(few_shot(examples=5, seed=seed), max_new_tokens=48) for seed in range(4)]


def few_shot(examples: int, seed: int) -> str:
    """``examples`` solved problems and a question."""
    ((text, _),) = problems.few_shot_prompts(1, examples, seed=100 + seed)
    return text


def staggered() -> list[Ask]:
    """Requests that join and leave while others run: short and long, one every few rounds."""
    asked = problems.held_out(12, seed=2)
    return [
        Ask(problems.prompt(p.question), max_new_tokens=4 + 13 * (i % 5), after_s=0.15 * i, ignore_eos=True)
        for i, p in enumerate(asked)
    ]


def unequal_mix() -> list[Ask]:
    """Two mixes of different size and length at once, so that microbatches are unequal."""
    asked = problems.held_out(7, seed=3)
    short = [Ask(problems.prompt(p.question), max_new_tokens=24, ignore_eos=True) for p in asked[:5]]
    long = [Ask(few_shot(2, seed=9), max_new_tokens=64, ignore_eos=True, after_s=0.1)]
    return [*short, *long, Ask(problems.prompt(asked[6].question), max_new_tokens=1, after_s=0.2)]


def constrained() -> list[Ask]:
    """Structured output: a regular expression and a JSON schema, beside a free request."""
    schema = '{"type":"object","properties":{"answer":{"type":"integer"}},"required":["answer"]}'
    asked = problems.held_out(3, seed=4)
    return [
        Ask(problems.prompt(asked[0].question), 24, sampling={"regex": r" [A-Z][a-z]+ has [0-9]{1,3}\."}),
        Ask(problems.prompt(asked[1].question), 32, sampling={"json_schema": schema}),
        Ask(problems.prompt(asked[2].question), 48),
    ]


def logprobs() -> list[Ask]:
    """Log probabilities, of the prompt too for some, beside requests without; they end by themselves, one by one."""
    asked = problems.held_out(12, seed=8)
    fields = [{}, {"return_logprob": True, "top_logprobs_num": 2}, {"return_logprob": True, "logprob_start_len": 0}]
    return [Ask(problems.prompt(p.question), fields=fields[i % 3]) for i, p in enumerate(asked)]


WORKLOADS = {
    "questions": questions,
    "long_prompts": long_prompts,
    "staggered": staggered,
    "unequal_mix": unequal_mix,
    "constrained": constrained,
    "logprobs": logprobs,
}


def ask_all(server: Server, asks: Sequence[Ask]) -> list[Reply]:
    """All replies, in order; requests start ``after_s`` after the first one."""
    start = time.monotonic()

    def ask(one: Ask) -> Reply:
        time.sleep(max(0.0, start + one.after_s - time.monotonic()))
        sampling = {"max_new_tokens": one.max_new_tokens, "ignore_eos": one.ignore_eos, **one.sampling}
        return server.generate(one.prompt, sampling, **one.fields)

    with ThreadPoolExecutor(max_workers=len(asks)) as pool:
        return list(pool.map(ask, asks))


def ask_with_aborts(server: Server, asks: Sequence[Ask], victims: Sequence[Ask]) -> tuple[list[Reply], list[Reply]]:
    """Replies of ``asks`` while ``victims`` run beside them and are aborted mid-way, and the victims' replies."""
    rids = [f"victim-{i}-{time.monotonic_ns()}" for i in range(len(victims))]
    named = [
        Ask(v.prompt, v.max_new_tokens, v.after_s, True, {"rid": rid}) for v, rid in zip(victims, rids, strict=True)
    ]

    over = threading.Event()

    def abort_all() -> None:
        wait_s = 0.8
        while not over.wait(wait_s):  # an abort that comes before its request does nothing: ask again
            for rid in rids:
                server.abort(rid)
            wait_s = 0.4

    aborts = threading.Thread(target=abort_all)
    aborts.start()
    try:
        replies = ask_all(server, [*asks, *named])
    finally:
        over.set()
        aborts.join(timeout=30)
    return replies[: len(asks)], replies[len(asks) :]


def accuracy(replies: Sequence[Reply]) -> float:
    """Share of right answers to ``questions``."""
    asked = problems.held_out(len(replies), seed=1)
    right = [
        problems.final_number(r.text) == problems.final_number(p.answer) for r, p in zip(replies, asked, strict=True)
    ]
    return sum(right) / len(right)


def rounds(replies: Sequence[Reply]) -> int:
    """Verify rounds of all replies together."""
    return sum(reply.verify_rounds for reply in replies)


def accept_length(replies: Sequence[Reply]) -> float:
    """Tokens per verify round over all replies; the first token of a reply comes from prefill."""
    return sum(reply.completion_tokens for reply in replies) / max(1, rounds(replies))


def assert_same_logprobs(replies: Sequence[Reply], reference: Sequence[Reply]) -> None:
    """Every log probability of prompt and reply, and of the likeliest tokens, as in ``reference``."""
    for reply, plain in zip(replies, reference, strict=True):
        for kind in ("input_token_logprobs", "output_token_logprobs"):
            assert _flat(reply.meta.get(kind)) == pytest.approx(_flat(plain.meta.get(kind)), abs=1e-3), kind
        ours, theirs = (r.meta.get("output_top_logprobs") or [] for r in (reply, plain))
        assert [_flat(one) for one in ours] == [pytest.approx(_flat(one), abs=1e-3) for one in theirs]


def _flat(entries: Sequence[Sequence[Any]] | None) -> list[float]:
    """Values and token ids of (log probability or None, token id, text) entries."""
    return [number for value, token, *_ in entries or () for number in (value or 0.0, token)]


def assert_same(replies: Sequence[Reply], reference: Sequence[Reply]) -> None:
    """Token-identical, with as many verify rounds: a lost tree gives the right text in more rounds."""
    different = [i for i, (a, b) in enumerate(zip(replies, reference, strict=True)) if a.token_ids != b.token_ids]
    assert not different, (
        f"replies {different} differ from plain speculation; first: {replies[different[0]].text!r} "
        f"instead of {reference[different[0]].text!r}"
    )
    ours, plain = [r.verify_rounds for r in replies], [r.verify_rounds for r in reference]
    assert ours == plain, f"verify rounds {ours}, plain speculation needs {plain}: trees were lost or empty"


def assert_same_but_one_round(replies: Sequence[Reply], reference: Sequence[Reply]) -> None:
    """Token-identical, in as many verify rounds but for one, for random drafters.

    A batch whose trees are lost once takes several rounds more. One is let pass, since their scores are nearly tied
    and what else a batch holds may decide: twice one reply took a round more, one of them plain speculation's own.
    """
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in reference]
    needed, took = ([reply.verify_rounds for reply in some] for some in (reference, replies))
    assert sum(abs(a - b) for a, b in zip(needed, took, strict=True)) <= 1, f"rounds {took}, plain {needed}"
