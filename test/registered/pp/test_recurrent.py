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
from conftest import CHAIN, RETRACTING, TREE, depth, poisoned, streamed, with_overlap, without_overlap
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

from sglang_pp_spec.server import Reply, Server, ServerError, ServerSpec

#: Convolution states are bfloat16 by default, and a rounded one may flip a tie in another batch.
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
NO_PREFIXES = ("--disable-radix-cache",)
PREFIXES = ("--mamba-radix-cache-strategy", "no_buffer")

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(hybrid_checkpoint.write_checkpoint(tmp_path_factory.mktemp("hybrid")))


def nextn(spec: ServerSpec, model: str, *more: str) -> ServerSpec:
    """``spec`` with the hybrid target and its own MTP module."""
    arguments = (*spec.extra_args, "--speculative-algorithm", "NEXTN", *(more or NO_PREFIXES))
    return replace(spec, model=model, draft=model, extra_args=arguments, extra_env=EXACT)


@pytest.fixture(scope="module")
def plain(model: str) -> Callable[[int], dict[str, list[Reply]]]:
    """What plain speculation with that topk replies to every workload, without a prefix cache."""

    @cache
    def of_topk(topk: int) -> dict[str, list[Reply]]:
        with Server(nextn(TREE if topk > 1 else CHAIN, model)) as server:
            replies = {name: ask_all(server, make()) for name, make in WORKLOADS.items()}
        assert accept_length(replies["together"]) > 1.25, "too little is accepted to show a state that was taken back"
        return replies

    return of_topk


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest, model: str) -> Iterator[Server]:
    chain, tree = (nextn(replace(spec, mode="plugin"), model) for spec in (CHAIN, TREE))
    with Server(ARMS[request.param](chain, tree)) as server:
        yield server
        assert server.is_alive(), f"the server died during its tests\n{server.log_tail()}"


class TestPPSpecRecurrent:
    """Replies and verify rounds are plain speculation's."""

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_every_stage_goes_on_from_the_accepted_state(self, arm: Server, plain, workload: str) -> None:
        assert_same_but_one_round(ask_all(arm, WORKLOADS[workload]()), plain(arm.spec.topk)[workload])

    def test_a_request_that_takes_over_an_aborted_one_s_state_starts_from_zeros(self, arm: Server, plain) -> None:
        victims = [Ask(few_shot(1, seed=20 + i), max_new_tokens=1500) for i in range(3)]
        replies, aborted = ask_with_aborts(arm, staggered(), victims)
        assert [reply.finish_reason for reply in aborted] == ["abort"] * 3
        assert_same_but_one_round(replies, plain(arm.spec.topk)["staggered"])

    def test_a_retracted_request_computes_its_state_again(self, model: str, plain) -> None:
        """A resume prefills into a row and a state that another request may have left."""
        spec = with_overlap(nextn(replace(CHAIN, mode="plugin", pp=2), model))
        with Server(replace(spec, extra_env={**spec.extra_env, **RETRACTING})) as server:
            replies = ask_all(server, together())
            assert re.search(r"#retracted_reqs: [1-9]", server.log()), "nothing was retracted"
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in plain(1)["together"]]

    def test_a_cached_prefix_brings_its_state_along(self, model: str, plain) -> None:
        spec = without_overlap(nextn(replace(CHAIN, mode="plugin", pp=3), model, *PREFIXES))
        with Server(spec) as server:
            assert_same_but_one_round(ask_all(server, chunked()), plain(1)["chunked"])
            again = ask_all(server, chunked())
        assert all(reply.meta["cached_tokens"] > CHUNK for reply in again), "no prefix was reused"
        assert_same_but_one_round(again, plain(1)["chunked"])

    def test_checkpoints_of_states_are_refused_before_a_model_is_loaded(self, model: str) -> None:
        """Rounds of earlier stages would write none, and a later request would go on from an old one."""
        spec = nextn(replace(CHAIN, mode="plugin", pp=2), model, "--mamba-radix-cache-strategy", "auto")
        with pytest.raises(ServerError, match="extra_buffer") as failure:
            Server(spec, start_timeout_s=120).start()
        assert "Load weight" not in str(failure.value)
