"""Tests of the word-problem generator."""

import re
from itertools import islice

import pytest

from sglang_pp_spec.tiny import problems


def test_held_out_problems_never_appear_in_training():
    train = {p.question for p in islice(problems.training(seed=0), 20000)}
    assert train.isdisjoint(p.question for p in problems.held_out(1000, seed=0))
    assert not any(map(problems.is_held_out, train))


def test_the_same_seed_gives_the_same_problems_and_another_seed_gives_others():
    assert problems.held_out(50, seed=3) == problems.held_out(50, seed=3)
    assert problems.held_out(50, seed=3) != problems.held_out(50, seed=4)


def test_held_out_problems_are_all_different():
    assert len({p.question for p in problems.held_out(500)}) == 500


def test_every_worked_step_is_true_and_the_last_one_is_the_answer():
    ops = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for p in islice(problems.training(seed=1), 3000):
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", p.answer)
        assert steps
        for a, op, b, c in steps:
            assert ops[op](int(a), int(b)) == int(c)
            assert op != "/" or int(a) % int(b) == 0
        assert int(steps[-1][-1]) == p.number


def test_every_story_turns_up_and_replies_have_forty_to_a_hundred_and_twenty_bytes():
    found = list(islice(problems.training(seed=2), 3000))
    assert len({p.question for p in found}) > 2800
    assert all(40 <= len(p.answer.encode()) <= 120 for p in found)


def test_few_shot_prompts_hold_their_examples_and_end_with_the_question():
    ((text, problem),) = problems.few_shot_prompts(1, shots=5, seed=7)
    assert text.count("Question: ") == 6
    assert text.count("####") == 5
    assert text.endswith(problems.prompt(problem.question))


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        (" So 3+4=7.\n#### 7", 7),
        ("####-12 and more", -12),
        ("#### 1,234\n\nQuestion: next #### 5", 1234),
        ("no number ####", None),
        ("", None),
    ],
)
def test_the_final_number_is_what_follows_the_first_four_hashes(reply, number):
    assert problems.final_number(reply) == number
