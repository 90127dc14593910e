"""PP x EAGLE through the plugin against plain EAGLE, on the real server: same tokens, same acceptance, same rounds.

The bonus token is always accepted, so text stays right when every draft is lost; verify rounds do not.
"""

from __future__ import annotations

import json
import random
import re
import string
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle3_checkpoint
import moe_checkpoint
import mtp_checkpoint
import pytest
import torch
from conftest import CHAIN, EAGLE3, EAGLE3_TREE, TREE, Arm, with_overlap, without_overlap
from workloads import (
    CHUNK,
    Ask,
    accept_length,
    accuracy,
    ask_all,
    ask_with_aborts,
    assert_same,
    assert_same_but_one_round,
    assert_same_logprobs,
    few_shot,
    logprobs,
    long_prompts,
    questions,
    staggered,
    unequal_mix,
)
from workloads import constrained as constrained_workload

from benchmark import relay_budget
from sglang_pp_spec.server import Reply, Server, ServerError, ServerSpec
from sglang_pp_spec.tiny import problems

EOS = 257  # of the tiny model, whose other tokens are bytes


class TestPPSpecConsistency:
    """Every test runs on every arm: PP 2, 3, 4, chain and tree, depth 0, 1, 2, each kind of overlap and none."""

    def test_accuracy_acceptance_tokens_and_rounds_equal_plain_speculation(self, arm: Arm) -> None:
        replies, plain = ask_all(arm.server, questions()), arm.reference["questions"]
        assert accuracy(replies) >= 0.9
        assert accept_length(plain) >= 2.0, "plain speculation accepts too little to show a lost tree"
        assert_same(replies, plain)
        assert accept_length(replies) == pytest.approx(accept_length(plain))

    def test_a_prompt_of_more_than_three_chunks_seeds_no_round_before_its_last_chunk(self, arm: Arm) -> None:
        arm.server.flush_cache(timeout_s=10)
        replies = ask_all(arm.server, long_prompts())
        for reply in replies:
            uncached = reply.meta["prompt_tokens"] - reply.meta["cached_tokens"]
            assert uncached > 3 * CHUNK, "the prompt was not chunked"
        assert_same(replies, arm.reference["long_prompts"])

    def test_requests_that_join_and_finish_mid_flight_change_nothing_for_the_others(self, arm: Arm) -> None:
        assert_same(ask_all(arm.server, staggered()), arm.reference["staggered"])

    def test_two_unequal_mixes_at_once_keep_their_rows_apart(self, arm: Arm) -> None:
        assert_same(ask_all(arm.server, unequal_mix()), arm.reference["unequal_mix"])

    def test_aborted_requests_leave_the_others_as_they_are(self, arm: Arm) -> None:
        victims = [Ask(few_shot(1, seed=20 + i), max_new_tokens=1500) for i in range(3)]
        replies, aborted = ask_with_aborts(arm.server, staggered(), victims)
        assert [reply.finish_reason for reply in aborted] == ["abort"] * 3
        assert any(reply.completion_tokens > 0 for reply in aborted), "nothing was aborted mid-way"
        assert_same(replies, arm.reference["staggered"])

    def test_a_cached_prefix_gives_the_same_reply(self, arm: Arm) -> None:
        ask_all(arm.server, long_prompts())
        replies = ask_all(arm.server, long_prompts())
        assert all(reply.meta["cached_tokens"] > CHUNK for reply in replies), "no prefix was reused"
        assert_same(replies, arm.reference["long_prompts"])

    def test_structured_output_follows_its_grammar_and_equals_plain_speculation(self, arm: Arm) -> None:
        replies = ask_all(arm.server, constrained_workload())
        assert re.fullmatch(r" [A-Z][a-z]+ has [0-9]{1,3}\.", replies[0].text)
        assert_same(replies, arm.reference["constrained"])

    def test_log_probabilities_belong_to_the_request_that_asked_for_them(self, arm: Arm) -> None:
        """With overlap a round has a surplus row of a request that has just ended: rows behind it got its values."""
        replies, plain = ask_all(arm.server, logprobs()), arm.reference["logprobs"]
        assert any(reply.meta.get("output_top_logprobs") for reply in plain)
        assert any(len(reply.meta.get("input_token_logprobs") or ()) > 20 for reply in plain)
        assert_same(replies, plain)
        assert_same_logprobs(replies, plain)

    def test_a_cut_off_request_pauses_and_resumes_without_losing_or_repeating_a_token(self, arm: Arm) -> None:
        """Retract on pause used to reach one slot only, and a chunk still in flight came back to a new life."""
        asks = [Ask(few_shot(5, seed=seed), max_new_tokens=48, ignore_eos=True) for seed in range(6)]
        undisturbed = ask_all(arm.server, asks)
        arm.server.flush_cache(timeout_s=10)
        disturbed = _ask_while_pausing(arm.server, asks)
        assert [r.token_ids for r in disturbed] == [r.token_ids for r in undisturbed]

    def test_a_pause_in_place_just_after_a_prefill_loses_nothing(self, arm: Arm) -> None:
        """Between its prefill and its first round a stage looked idle, and its leak check ended the server."""
        ask = questions(1)[0]
        for delay_ms in range(0, 120, 12):
            with ThreadPoolExecutor(1) as pool:
                reply = pool.submit(ask_all, arm.server, [ask])
                time.sleep(delay_ms / 1000)
                arm.server.pause_generation("in_place")
                time.sleep(0.1)
                arm.server.continue_generation()
                assert_same(reply.result(timeout=60), arm.reference["questions"][:1])
            arm.server.flush_cache(timeout_s=10)

    def test_stage_0_launches_a_round_before_it_does_what_overlap_leaves_for_later(self, arm: Arm) -> None:
        """Its own questions only: a pause reads the frames of every slot at once, whatever is launched next."""
        asked_at = time.monotonic()
        ask_all(arm.server, questions())
        spans = [json.loads(line) for line in (arm.timeline / "stage0.jsonl").read_text().splitlines()]
        spans = [span for span in spans if span["start"] > asked_at]
        pairs = list(steady_rounds(spans))
        assert len(pairs) > 50
        later = {"on": (True, True), "accounting": (False, True), "off": (False, False)}[arm.overlap]
        assert {(launched < read, launched < account) for launched, read, account in pairs} == {later}


def steady_rounds(spans: list[dict[str, Any]]) -> Iterator[tuple[float, float, float]]:
    """Starts of a launch and of reading and accounting for the slot's step before, for steps of consecutive turns."""
    num_slots = len({span["slot"] for span in spans})
    reading: dict[int, float] = {}  # by slot
    done: dict[int, tuple[float, float]] = {}  # by step; the frame that a slot read last is the one it accounts for
    for span in spans:
        if span["name"] == "read":
            reading[span["slot"]] = span["start"]
        elif span["name"] == "account" and span["slot"] in reading:
            done[span["step"]] = reading[span["slot"]], span["start"]
    launches = {span["step"]: span["start"] for span in spans if span["name"] in ("verify", "prefill", "middle")}
    for step, launched in launches.items():
        if step - num_slots in done:
            yield launched, *done[step - num_slots]


class TestPPSpecPressure:
    """Retraction under KV pressure, on a server whose pool is too small for what runs on it."""

    def test_requests_retracted_under_kv_pressure_resume_and_reply_the_same(self) -> None:
        asks = [Ask(problems.prompt(p.question), 160, ignore_eos=True) for p in problems.held_out(8, seed=5)]
        with Server(CHAIN) as plain:
            reference = ask_all(plain, asks)
        pressed = replace(CHAIN, pp=2, mode="plugin", extra_args=(*CHAIN.extra_args, "--max-total-tokens", "1100"))
        with Server(pressed) as server:
            replies = ask_all(server, asks)
            retracted = server.log().count("Retract requests")
            assert server.is_alive()
        assert retracted > 0, "the pool was large enough after all"
        assert [r.token_ids for r in replies] == [r.token_ids for r in reference]
        # A resume starts from a prefill, which decides one token without a round and may cut a round into two.
        assert accept_length(replies) == pytest.approx(accept_length(reference), rel=0.1)

    def test_chunked_prompts_do_not_pile_up_in_one_slot(self) -> None:
        """A last chunk may land in any slot: nine once decoded in a slot of four, more than a frame held."""
        rng = random.Random(1)
        asks = [
            Ask(few_shot(rng.randint(1, 3), seed=i), rng.randint(1, 120), after_s=0.05 * i, ignore_eos=True)
            for i in range(60)
        ]
        crowded = replace(CHAIN, pp=4, mode="plugin", extra_args=(*CHAIN.extra_args, "--max-running-requests", "16"))
        with Server(crowded) as server:
            replies = ask_all(server, asks)
            in_one_slot = {int(n) for n in re.findall(r"Decode batch.*?#running-req: (\d+)", server.log())}
        assert [reply.completion_tokens for reply in replies] == [ask.max_new_tokens for ask in asks]
        assert max(in_one_slot) == 4


def assert_as_plain(spec: ServerSpec, pp: int, asks: list[Ask], *, accepts: float) -> None:
    """``spec`` over ``pp`` stages, with overlap, replies as without a pipeline, in as many rounds but for one.

    Plain speculation must accept more than ``accepts`` tokens a round, or a lost tree would not show.
    """
    with Server(spec) as plain:
        reference = ask_all(plain, asks)
    with Server(with_overlap(replace(spec, mode="plugin", pp=pp))) as server:
        replies = ask_all(server, asks)
    assert accept_length(reference) > accepts, "too little is accepted to show a lost tree"
    assert_same_but_one_round(replies, reference)


class TestPPSpecMTP:
    """A multi-token-prediction module as drafter, on the last stage, with the target's embedding and head."""

    def test_an_mtp_module_over_three_stages_replies_as_plain_nextn_in_as_many_rounds(self, tmp_path: Path) -> None:
        target, draft = mtp_checkpoint.write_checkpoints(tmp_path)
        nextn = replace(
            CHAIN,
            model=str(target),
            draft=str(draft),
            extra_args=(*CHAIN.extra_args, "--speculative-algorithm", "NEXTN"),
        )
        asks = [replace(ask, max_new_tokens=40, ignore_eos=True) for ask in questions(8)]
        assert_as_plain(nextn, 3, asks, accepts=1.3)


class TestPPSpecMoE:
    """A target with experts, of Qwen3's kind."""

    def test_a_target_with_experts_over_three_stages_replies_as_plain_eagle_in_as_many_rounds(
        self, tmp_path: Path
    ) -> None:
        target, draft = moe_checkpoint.write_checkpoints(tmp_path)
        moe = replace(TREE, model=str(target), draft=str(draft))
        asks = [replace(ask, max_new_tokens=40, ignore_eos=True) for ask in questions(8)]
        assert_as_plain(moe, 3, asks, accepts=1.3)


class TestPPSpecTokenMap:
    """A head that drafts from a part of the vocabulary numbers its tokens by itself; frames carry the target's."""

    def test_a_head_with_a_token_map_replies_as_without_a_pipeline_in_as_many_rounds(self, tmp_path: Path) -> None:
        frequent = sorted({ord(c) for c in string.ascii_lowercase + string.digits + " .,?\n"} | {EOS}, reverse=True)
        torch.save(frequent, tmp_path / "map.pt")  # descending, so that no token keeps its number
        mapped = replace(TREE, extra_args=(*TREE.extra_args, "--speculative-token-map", str(tmp_path / "map.pt")))
        assert_as_plain(mapped, 3, questions(), accepts=1.8)


class TestPPSpecEagle3:
    """An EAGLE3 head drafts from what three layers of the target have before them, on whatever stages those are.

    Layers 1, 3 and 5 of six. A head fed with a neighbouring layer accepts almost as much, so rounds are compared one
    by one (``assert_same``), and what is fed in ``test/unit/test_aux_states.py``.
    """

    @pytest.mark.parametrize(
        "spec",
        [
            pytest.param(without_overlap(replace(EAGLE3, mode="plugin", pp=2)), id="pp2-chain-sync"),
            pytest.param(with_overlap(replace(EAGLE3, mode="plugin", pp=2, tp=2)), id="tp2-pp2-chain"),
            pytest.param(with_overlap(replace(EAGLE3, mode="plugin", pp=4)), id="pp4-chain"),
        ],
    )
    def test_an_eagle3_head_replies_as_without_a_pipeline_in_as_many_rounds(
        self, spec: ServerSpec, plain_eagle3: list[Reply]
    ) -> None:
        assert accept_length(plain_eagle3) >= 1.8, "too little is accepted to show a lost hidden state"
        with Server(spec) as server:
            assert_same(ask_all(server, questions()), plain_eagle3)

    def test_a_last_stage_without_any_of_the_layers_drafts_from_those_of_the_others(self, tmp_path: Path) -> None:
        """SGLang's target unpacked a pair of states where it had captured none."""
        early = replace(EAGLE3_TREE, draft=str(eagle3_checkpoint.fed_by(tmp_path / "draft", [0, 1, 2])))
        asks = [replace(ask, max_new_tokens=24) for ask in questions(6)]
        assert_as_plain(early, 3, asks, accepts=1.3)

    def test_a_head_that_is_narrower_than_its_target_keeps_its_own_embedding(self, tmp_path: Path) -> None:
        """Heads for large targets are. SGLang loads the target's embedding into it where that is on another stage."""
        narrow = replace(EAGLE3, draft=str(eagle3_checkpoint.half_as_wide(tmp_path / "draft")))
        asks = [replace(ask, max_new_tokens=24) for ask in questions(6)]
        assert_as_plain(narrow, 2, asks, accepts=1.0)

    def test_a_head_for_a_larger_target_is_refused_by_the_layers_it_asks_for(self, tmp_path: Path) -> None:
        other = replace(
            EAGLE3, mode="plugin", pp=2, draft=str(eagle3_checkpoint.fed_by(tmp_path / "draft", [2, 16, 29]))
        )
        with pytest.raises(ServerError, match=re.escape("[3, 17, 30], the target has 6")):
            Server(other, start_timeout_s=120).start()


@pytest.fixture(scope="class")
def plain_eagle3() -> list[Reply]:
    """Replies of plain EAGLE3 to the questions, a chain."""
    with Server(EAGLE3) as server:
        return ask_all(server, questions())


class TestPPSpecBudget:
    """What a round of the relay costs, counted on a running server."""

    def test_a_hop_is_one_tensor_read_but_for_its_padding_and_a_round_one_wait(self) -> None:
        """Also that counting itself still fits the loop: it once broke without a test noticing.

        A frame has room for all four requests and each of the two slots has two: two of five rows are padding.
        """
        options = relay_budget.parse([])
        found = relay_budget.budget(relay_budget.count("plugin", options), relay_budget.HOPS["ours"])
        assert found["device_tensors_per_hop"] == 1 and found["host_messages_per_hop"] == 0
        assert 0 < found["unread_bytes_per_hop"] < 0.5 * found["bytes_per_hop"]
        assert max(found["host_waits_per_round"].values()) < 1.1


class TestPPSpecGate:
    """What the plugin refuses, it refuses at start, with the reason, before a model is loaded."""

    @pytest.mark.parametrize(
        ("arguments", "env", "reason"),
        [
            (("--enable-mixed-chunk",), {}, "mixed-chunk"),
            (("--enable-return-hidden-states",), {}, "hidden states are not relayed"),
            (("--speculative-algorithm", "STANDALONE"), {}, "STANDALONE is not supported"),
            (("--tp-size", "2"), {"SGLANG_PP_SPEC_ON_MISMATCH": "abort"}, "cannot tell the others in time"),
            ((), {"SGLANG_PP_SPEC_ON_MISMATCH": "abort"}, "without --disable-radix-cache"),
        ],
    )
    def test_an_unsupported_combination_ends_the_server_with_its_reason(
        self, arguments: tuple[str, ...], env: dict[str, str], reason: str
    ) -> None:
        spec = replace(CHAIN, pp=2, mode="plugin", extra_args=(*CHAIN.extra_args, *arguments), extra_env=env)
        with pytest.raises(ServerError, match=re.escape(reason)) as failure:
            Server(spec, start_timeout_s=120).start()
        assert "Load weight" not in str(failure.value), "a model was loaded before the refusal"


def _ask_while_pausing(server: Server, asks: list[Ask]) -> list[Reply]:
    """Replies of ``asks`` while generation is paused with retract and continued, several times."""

    def disturb() -> None:
        for _ in range(4):
            time.sleep(0.35)
            server.pause_generation("retract")
            time.sleep(0.1)
            server.continue_generation()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        return ask_all(server, asks)
    finally:
        thread.join(timeout=60)
