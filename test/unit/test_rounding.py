"""Telling rounding from faults: which tokens win when every layer's output is rounded at random."""

from __future__ import annotations

import pytest
import torch

from benchmark.rounding import RoundedTarget, prompts, round_at_random, unexplained
from benchmark.ties import Difference
from sglang_pp_spec.server import Reply


@pytest.fixture(scope="module")
def target() -> RoundedTarget:
    return RoundedTarget()


def test_a_value_becomes_one_of_its_two_neighbours_and_on_average_itself() -> None:
    values = torch.tensor([1.0, 1.001, -3.14159, 1e-20]).expand(20000, -1)
    rounded = round_at_random(values, torch.Generator().manual_seed(1))
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert [len(column.unique()) for column in rounded.unbind(1)] == [1, 2, 2, 2]
    assert torch.allclose(rounded.double().mean(0), values[0].double(), rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    ("prompt", "said", "plain_token", "token"), [(1, " The 2 shere are ", "9", "5"), (3, " There are ", "6", "l")]
)
def test_two_replies_that_were_taken_for_faults_were_rounding(target, prompt, said, plain_token, token) -> None:
    """On GPUs, one server each: margins of 3.97 and 5.04, and rounding can choose either token."""
    won = target.winners([*prompts()["few-shot"][prompt].encode(), *said.encode()])
    assert {ord(plain_token), ord(token)} <= set(won)


def test_a_wrong_token_in_an_answer_the_model_knows_is_a_fault_and_a_tie_is_none(target) -> None:
    text = prompts()["questions"][0]
    asked = list(text.encode())
    (right,) = target.winners(asked, draws=32)
    plain = [Reply("", (right,), 1, 1, None, "length")]
    wrong = Difference(request=0, position=0, plain_token=right, token=ord("#"), margin=12.0)
    tie = Difference(request=0, position=0, plain_token=right, token=ord("#"), margin=0.2)
    ended = Difference(request=0, position=0, plain_token=right, token=None, margin=None)
    longer = Difference(request=0, position=0, plain_token=None, token=right, margin=None)
    assert unexplained([wrong, tie, ended, longer], [asked], plain, target) == [wrong, ended, longer]


def test_a_token_that_an_unsettled_prompt_does_not_lead_to_is_still_a_fault(target) -> None:
    asked = [*prompts()["few-shot"][1].encode(), *b" The 2 shere are "]
    plain = [Reply("", (ord("9"),), 1, 1, None, "length")]
    other = Difference(request=0, position=0, plain_token=ord("9"), token=ord("l"), margin=2.4)
    assert unexplained([other], [asked], plain, target) == [other]
