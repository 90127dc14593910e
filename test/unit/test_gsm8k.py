"""How two arms of the GSM8K evaluation are compared; the servers themselves are not needed for that."""

import pytest

from benchmark.gsm8k import verdicts
from benchmark.ties import Difference, first_difference, margin

ARM = {"questions": 200, "accuracy": 0.4, "accept_length": 2.5, "verify_rounds": 1000, "identical": 200}
TOP = [[-0.7, 11, None], [-0.9, 12, None], [-4.0, 13, None]]


@pytest.mark.parametrize(
    ("plain", "other", "position"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((1,), (1, 2), 1), ((), (1,), 0)],
)
def test_replies_differ_at_the_first_other_token_or_where_one_of_them_ends(plain, other, position):
    assert first_difference(plain, other) == position


def test_the_margin_is_plain_s_token_over_the_other_and_unknown_for_a_token_the_judge_does_not_name():
    assert margin(TOP, 11, 12) == pytest.approx(0.2)
    assert margin(TOP, 12, 11) == pytest.approx(-0.2)
    assert margin(TOP, 11, 99) is None
    assert margin(TOP, 11, None) is None


def test_one_step_of_bfloat16_is_a_tie_though_float32_rounds_it_up():
    """GSM8K on a GPU failed with a margin of 0.25000006."""
    assert Difference(37, 17, 35, 7791, margin=-0.2500000596046448).is_tie(0.25)


def test_a_reply_that_ends_early_or_goes_on_alone_is_no_tie():
    assert Difference(0, 3, 11, 12, margin=-0.2).is_tie(0.25)
    assert not Difference(0, 3, 11, 13, margin=3.3).is_tie(0.25)
    assert not Difference(0, 3, 11, 13, margin=0.28).is_tie(0.25)
    assert not Difference(0, 3, 11, None, margin=None).is_tie(0.25)


def test_equal_arms_have_nothing_against_them():
    assert verdicts({"plain": ARM, "plugin": ARM}, [Difference(0, 3, 11, 12, margin=0.1)], tie=0.25) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"accuracy": 0.29}, "accuracy"),
        ({"accept_length": 2.47}, "acceptance"),
        ({"accept_length": 2.53}, "acceptance"),
    ],
)
def test_an_arm_that_falls_short_is_named(change, word):
    (said,) = verdicts({"plain": ARM, "plugin": ARM | change}, [], tie=0.25)
    assert word in said


def test_a_fault_among_ties_is_named():
    found = [Difference(0, 3, 11, 12, margin=0.1), Difference(1, 5, 11, 13, margin=3.3)]
    (said,) = verdicts({"plain": ARM, "plugin": ARM}, found, tie=0.25)
    assert "request': 1" in said


def test_a_plain_arm_without_rounds_proves_nothing():
    idle = ARM | {"verify_rounds": 0, "accept_length": 0.0}
    assert "nothing was speculated" in verdicts({"plain": idle, "plugin": idle}, [], tie=0.25)[0]
