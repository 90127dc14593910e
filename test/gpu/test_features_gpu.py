"""What requests may ask for besides text, on GPUs with overlap: grammars, log probabilities, pauses, retractions.

On a GPU these cross streams: a grammar's mask is made from tokens that the round before has just decided, log
probabilities are read back before the frame is sent, and KV rows change hands under rounds that are launched already.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "registered" / "pp"))
from conftest import CHAIN, RETRACTING, on_gpus
from workloads import Ask, ask_all, ask_with_aborts, constrained, few_shot, logprobs

from sglang_pp_spec.server import Server, started_together
from sglang_pp_spec.tiny import problems

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROUNDING = 0.25  # of a log probability in bfloat16, where the model knows what it says


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """Ours with overlap, the same where requests are retracted all the time, and plain EAGLE."""
    ours = on_gpus(replace(CHAIN, pp=2, mode="plugin"))
    retracting = replace(ours, extra_env={**ours.extra_env, **RETRACTING})
    found = {"ours": Server(ours), "retracting": Server(retracting), "plain": Server(CHAIN)}
    with started_together(*found.values()):
        assert "overlap on" in found["ours"].log()
        yield found


def test_structured_output_follows_its_grammar_beside_requests_that_end(servers) -> None:
    for _ in range(4):  # requests end and join at different places each time
        replies = ask_all(servers["ours"], [ask for _ in range(4) for ask in constrained()])
        for sentence, answer, free in zip(replies[::3], replies[1::3], replies[2::3], strict=True):
            assert re.fullmatch(r" [A-Z][a-z]+ has [0-9]{1,3}\.", sentence.text)
            assert re.fullmatch(r'\{\s*("answer"\s*:\s*-?\d*\s*\}?)?', answer.text), answer.text  # cut off after 32
            assert not free.text.startswith(("{", sentence.text))


def test_log_probabilities_are_of_the_tokens_and_prompts_of_their_request(servers) -> None:
    plain, ours = (ask_all(servers[name], logprobs()) for name in ("plain", "ours"))
    compared = 0
    for theirs, reply in zip(plain, ours, strict=True):
        entries = reply.meta.get("output_token_logprobs") or []
        assert not entries or [token for _, token, *_ in entries] == list(reply.token_ids)
        for kind in ("input_token_logprobs", "output_token_logprobs"):
            for mine, other in zip(reply.meta.get(kind) or [], theirs.meta.get(kind) or [], strict=False):
                if mine[1] != other[1]:
                    break  # the replies part here
                assert (mine[0] or 0.0) == pytest.approx(other[0] or 0.0, abs=ROUNDING), (kind, mine, other)
                compared += 1
    print(f"{compared} log probabilities within {ROUNDING} of plain EAGLE's")
    assert compared > 500


def test_a_pause_in_place_at_any_moment_loses_nothing(servers) -> None:
    server, ask = servers["ours"], Ask(problems.prompt("How many?"), 24, ignore_eos=True)
    for delay_ms in range(0, 60, 4):
        with ThreadPoolExecutor(1) as pool:
            replies = pool.submit(ask_all, server, [ask] * 3)
            time.sleep(delay_ms / 1000)
            server.pause_generation("in_place")
            time.sleep(0.05)
            server.continue_generation()
            assert [reply.completion_tokens for reply in replies.result(timeout=60)] == [24] * 3
        server.flush_cache(timeout_s=10)


def test_retracted_and_aborted_requests_leave_the_kv_pool_whole(servers) -> None:
    server = servers["retracting"]
    asks = [Ask(few_shot(1, seed=i), 20 + 7 * i, after_s=0.05 * i, ignore_eos=True) for i in range(24)]
    victims = [Ask(few_shot(1, seed=60 + i), 1500) for i in range(6)]
    replies, aborted = ask_with_aborts(server, asks, victims)
    assert [reply.completion_tokens for reply in replies] == [ask.max_new_tokens for ask in asks]
    assert {reply.finish_reason for reply in aborted} == {"abort"}
    assert re.search(r"#retracted_reqs: [1-9]", server.log()), "nothing was retracted"
    server.flush_cache(timeout_s=20)  # an error unless every slot of the KV pool came back
    assert server.is_alive()


def test_sampled_requests_are_sampled_and_leave_greedy_ones_beside_them_alone(servers) -> None:
    server = servers["ours"]
    greedy = [Ask(few_shot(1, seed=70 + i), 32, ignore_eos=True) for i in range(6)]
    hot = [replace(ask, sampling={"temperature": 2.0}) for ask in greedy[:1] * 6]
    alone = ask_all(server, greedy)
    replies = ask_all(server, [ask for pair in zip(greedy, hot, strict=True) for ask in pair])
    assert [reply.completion_tokens for reply in replies] == [32] * 12
    assert len({reply.token_ids for reply in replies[1::2]}) > 3, "six samples of one prompt are the same"
    for reply, undisturbed in zip(replies[::2], alone, strict=True):
        assert reply.token_ids[:8] == undisturbed.token_ids[:8]  # later a tie may be decided otherwise
