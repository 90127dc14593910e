"""A target with recurrent layers (Qwen3.5's gated delta rule) over several stages, against plain speculation.

A verify leaves the state after every node in scratch, and every stage has to take the accepted one: a stage that does
not, or takes another node's, replies otherwise from the second token on, and acceptance hardly shows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import hybrid_checkpoint
import pytest
from conftest import CHAIN, RETRACTING, TREE, depth, poisoned, streamed, with_overlap
from hybrid_checkpoint import CHECKPOINTS, LAST_STATES, NO_PREFIXES, nextn
from transformers import AutoTokenizer
from workloads import (
    CHUNK,
    Ask,
    accept_length,
    ask_all,
    ask_with_aborts,
    assert_same_but_one_round,
    few_shot,
    long_prompts,
    questions,
    staggered,
)

from sglang_pp_spec.server import Reply, Server

ARMS = {
    "pp3-chain-streams-poisoned": lambda chain, tree: with_overlap(streamed(poisoned(replace(chain, pp=3)))),
    "pp4-tree-depth1": lambda chain, tree: with_overlap(depth(replace(tree, pp=4), 1)),
    "tp2-pp2-chain-accounting": lambda chain, tree: with_overlap(replace(chain, pp=2, tp=2), "accounting"),
}


def together() -> list[Ask]:
    """Twelve questions at once."""
    return [replace(ask, max_new_tokens=40, ignore_eos=True) for ask in questions(12)]


def chunked() -> list[Ask]:
    """Prompts of more than three chunks; a state goes from chunk to chunk."""
    return [replace(ask, max_new_tokens=24, ignore_eos=True) for ask in long_prompts()]


WORKLOADS = {"together": together, "chunked": chunked, "staggered": staggered}


def long_replies() -> list[Ask]:
    """Replies that cross the places where checkpoints are written, in different rounds."""
    lengths = range(60, 180, 20)
    return [replace(ask, max_new_tokens=n, ignore_eos=True) for ask, n in zip(questions(6), lengths, strict=True)]


def second_turns(model: str, replies: list[Reply]) -> list[Ask]:
    """What was asked and replied, and a little more."""
    tokenize = AutoTokenizer.from_pretrained(model)
    said = [tokenize(a.prompt)["input_ids"] + list(r.token_ids) for a, r in zip(long_replies(), replies, strict=True)]
    return [Ask([*tokens, *b" And?"], 30, ignore_eos=True) for tokens in said]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(hybrid_checkpoint.write_checkpoint(tmp_path_factory.mktemp("hybrid")))


@pytest.fixture(scope="module")
def plain(model: str) -> Callable[[int], dict[str, list[Reply]]]:
    """What plain speculation with that topk replies to every workload, without a prefix cache."""

    @cache
    def of_topk(topk: int) -> dict[str, list[Reply]]:
        with Server(nextn(TREE if topk > 1 else CHAIN, model, NO_PREFIXES)) as server:
            replies = {name: ask_all(server, make()) for name, make in WORKLOADS.items()}
            replies["first turns"] = ask_all(server, long_replies())
            replies["second turns"] = ask_all(server, second_turns(model, replies["first turns"]))
        assert accept_length(replies["together"]) > 1.25, "too little is accepted to show a state that was taken back"
        return replies

    return of_topk


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest, model: str) -> Iterator[Server]:
    chain, tree = (nextn(replace(spec, mode="plugin"), model, CHECKPOINTS) for spec in (CHAIN, TREE))
    with Server(ARMS[request.param](chain, tree)) as server:
        yield server
        assert server.is_alive(), f"the server died during its tests\n{server.log_tail()}"


class TestPPSpecRecurrent:
    """Replies and verify rounds are plain speculation's."""

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_every_stage_goes_on_from_the_accepted_state(self, arm: Server, plain, workload: str) -> None:
        assert_same_but_one_round(ask_all(arm, WORKLOADS[workload]()), plain(arm.spec.topk)[workload])

    def test_a_reply_that_is_a_prefix_now_brings_the_state_that_a_round_left(self, arm: Server, model, plain) -> None:
        """The built-in's earlier stages write no checkpoints in rounds: half of such replies were wrong there."""
        expected = plain(arm.spec.topk)
        assert_same_but_one_round(ask_all(arm, long_replies()), expected["first turns"])
        asks = second_turns(model, expected["first turns"])
        replies = ask_all(arm, asks)
        for reply, ask, first in zip(replies, asks, long_replies(), strict=True):
            decoded = reply.meta["cached_tokens"] - (len(ask.prompt) - len(b" And?") - first.max_new_tokens)
            assert decoded > 0, "what was reused ends within the first prompt"
        assert_same_but_one_round(replies, expected["second turns"])

    def test_a_request_that_takes_over_an_aborted_one_s_state_starts_from_zeros(self, arm: Server, plain) -> None:
        victims = [Ask(few_shot(1, seed=20 + i), max_new_tokens=1500) for i in range(3)]
        replies, aborted = ask_with_aborts(arm, staggered(), victims)
        assert [reply.finish_reason for reply in aborted] == ["abort"] * 3
        assert_same_but_one_round(replies, plain(arm.spec.topk)["staggered"])


class TestPPSpecRecurrentOptions:
    """Retraction, and another way to keep states for prefixes."""

    def test_a_retracted_request_computes_its_state_again(self, model: str, plain) -> None:
        """A resume prefills into a row and a state that another request may have left."""
        spec = with_overlap(nextn(replace(CHAIN, mode="plugin", pp=2), model, NO_PREFIXES))
        with Server(replace(spec, extra_env={**spec.extra_env, **RETRACTING})) as server:
            replies = ask_all(server, together())
            assert re.search(r"#retracted_reqs: [1-9]", server.log()), "nothing was retracted"
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in plain(1)["together"]]

    def test_the_last_states_of_requests_are_kept_for_prefixes_without_overlap(self, model: str, plain) -> None:
        """With a surplus round in flight the state that is kept would be another one; see ``host/overlap.py``."""
        expected = plain(1)
        with Server(nextn(replace(CHAIN, mode="plugin", pp=3), model, LAST_STATES)) as server:
            first = ask_all(server, [*chunked(), *long_replies()])
            again = ask_all(server, [*chunked(), *second_turns(model, expected["first turns"])])
        assert_same_but_one_round(first, [*expected["chunked"], *expected["first turns"]])
        assert_same_but_one_round(again, [*expected["chunked"], *expected["second turns"]])
        assert all(reply.meta["cached_tokens"] > CHUNK for reply in again[:4]), "no prompt was reused"
