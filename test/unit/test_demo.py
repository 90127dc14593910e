"""The demo's verdict: replies alone would pass a relay that loses every draft."""

from dataclasses import replace

import pytest

from sglang_pp_spec.demo import ArmResult, Asked, arms, faults, summarise
from sglang_pp_spec.server import Reply
from sglang_pp_spec.tiny.problems import held_out

PLAIN = ArmResult("plain", 10, 10, 0.9, 2.0, 100, 1.0)
PLUGIN = replace(PLAIN, name="plugin")
BUILTIN = replace(PLAIN, name="builtin", identical=3, accept_length=1.0, verify_rounds=200)


def test_equal_replies_acceptance_and_rounds_pass_whatever_the_builtin_does():
    assert faults([PLAIN, PLUGIN, BUILTIN]) == []
    assert faults([PLAIN, PLUGIN, ArmResult("builtin", 10, error="did not start")]) == []


@pytest.mark.parametrize(
    "change, word",
    [
        ({"identical": 9}, "1 of 10 replies differ"),
        ({"accept_length": 1.99}, "acceptance length 1.99"),
        ({"verify_rounds": 101}, "101 verify rounds"),
        ({"verify_rounds": 99}, "99 verify rounds"),
        ({"error": "died"}, "plugin: died"),
    ],
)
def test_each_shortfall_of_the_plugin_is_a_fault(change, word):
    (found,) = faults([PLAIN, replace(PLUGIN, **change), BUILTIN])
    assert word in found


def test_a_plain_server_that_never_speculated_is_a_fault():
    silent = {"accept_length": None, "verify_rounds": 0}
    assert faults([replace(PLAIN, **silent), replace(PLUGIN, **silent), BUILTIN])


def test_a_plain_server_that_failed_is_a_fault():
    assert faults([ArmResult("plain", 10, error="died"), PLUGIN, BUILTIN]) == ["plain: died"]


def a_reply(text: str, ids: tuple[int, ...], rounds: int) -> Reply:
    return Reply(text, ids, len(ids), rounds, None, "stop")


def test_a_row_counts_right_answers_equal_tokens_and_tokens_per_round():
    problems = held_out(2)
    replies = [a_reply(problems[0].answer, (1, 2, 3, 4), 2), a_reply("no idea", (5, 6), 1)]
    reference = [replies[0], replace(replies[1], token_ids=(5, 7))]
    row = summarise("plugin", Asked(replies, 1.234), problems, reference)
    assert row == ArmResult("plugin", 2, 1, 0.5, 2.0, 3, 1.23)


def test_without_a_reference_nothing_is_called_identical():
    problems = held_out(1)
    row = summarise("builtin", Asked([a_reply("", (1,), 1)], 1.0), problems, None)
    assert row.identical is None


def test_plain_eagle_on_one_stage_comes_first():
    assert [(spec.mode, spec.pp) for spec in arms(4, 2)] == [("plain", 1), ("plugin", 4), ("builtin", 4)]
