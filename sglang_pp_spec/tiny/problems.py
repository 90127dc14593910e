"""Small arithmetic word problems in GSM8K's format: made from a seed, split in two, prompted and graded.

A problem belongs to the held-out split when the hash of its question says so, hence no seed can put a
held-out question in the training text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

NAMES = {
    "Ada": "She", "Ben": "He", "Carla": "She", "Dmitri": "He", "Elena": "She", "Farid": "He",
    "Grace": "She", "Hugo": "He", "Ines": "She", "Jonas": "He", "Keiko": "She", "Liam": "He",
    "Mia": "She", "Noah": "He", "Olga": "She", "Pedro": "He", "Rosa": "She", "Samir": "He",
    "Tess": "She", "Umar": "He", "Vera": "She", "Walter": "He", "Yuki": "She", "Zane": "He",
}  # fmt: skip
THINGS = (
    "apples", "beads", "books", "buttons", "candles", "cards", "coins", "cookies", "eggs", "figs",
    "lemons", "marbles", "muffins", "pencils", "plums", "rings", "shells", "stamps", "stickers", "toys",
)  # fmt: skip
PACKS = ("bag", "box", "basket", "crate", "jar", "tray")
ANIMALS = ("crows", "ducks", "frogs", "geese", "goats", "sheep", "swans", "turtles")
SPOTS = ("on the farm", "by the pond", "in the field", "near the barn")
TIMES_WORDS = {2: "twice", 3: "three times"}

HELD_OUT_SHARE = 8  # one question in this many is held out


@dataclass(frozen=True)
class Problem:
    """One problem; `answer` is the worked solution and ends with a line `#### N`."""

    question: str
    answer: str

    @property
    def number(self) -> int:
        """The correct final number."""
        number = final_number(self.answer)
        assert number is not None
        return number


# --- stories: each draws from `rng` and returns (question, worked steps, final number) ---

Story = tuple[str, str, int]


def _gain(rng: Random) -> Story:
    who, thing, a, b = rng.choice(list(NAMES)), rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 9)
    verb = rng.choice(("buys", "finds", "makes", "wins"))
    return (
        f"{who} has {a} {thing}. {NAMES[who]} {verb} {b} more. How many {thing} does {who} have now?",
        f"{who} had {a} {thing} and {verb} {b} more. Now {who} has {a}+{b}={a + b} {thing}.",
        a + b,
    )


def _give(rng: Random) -> Story:
    who, friend = rng.sample(list(NAMES), 2)
    thing, left, b = rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 6)
    a, verb = left + b, rng.choice(("gives", "sells", "lends"))
    return (
        f"{who} has {a} {thing} and {verb} {b} of them to {friend}. How many {thing} does {who} still have?",
        f"{who} {verb} {b} {thing} to {friend}, so {who} still has {a}-{b}={left} {thing}.",
        left,
    )


def _gain_then_lose(rng: Random) -> Story:
    who, thing = rng.choice(list(NAMES)), rng.choice(THINGS)
    a, b = rng.randint(2, 9), rng.randint(2, 6)
    c = rng.randint(2, min(6, a + b - 1))
    gain, lose = rng.choice(("buys", "finds", "gets")), rng.choice(("loses", "drops", "breaks"))
    return (
        (f"{who} has {a} {thing}. {NAMES[who]} {gain} {b} {thing}, then {lose} {c}. How many {thing} are left?"),
        (
            f"After {who} {gain} {b} there are {a}+{b}={a + b} {thing}. "
            f"{NAMES[who]} {lose} {c}, so {a + b}-{c}={a + b - c} are left."
        ),
        a + b - c,
    )


def _packs(rng: Random) -> Story:
    who, thing, pack = rng.choice(list(NAMES)), rng.choice(THINGS), rng.choice(PACKS)
    a, b = rng.randint(2, 5), rng.randint(2, 6)
    plural = pack + ("es" if pack == "box" else "s")
    return (
        f"{who} has {a} {plural}. Each {pack} holds {b} {thing}. How many {thing} does {who} have in all?",
        f"There are {a} {plural} with {b} {thing} each, so {who} has {a}*{b}={a * b} {thing}.",
        a * b,
    )


def _packs_and_loose(rng: Random) -> Story:
    who, thing, pack = rng.choice(list(NAMES)), rng.choice(THINGS), rng.choice(PACKS)
    a, b, c = rng.randint(2, 3), rng.randint(2, 5), rng.randint(2, 5)
    plural = pack + ("es" if pack == "box" else "s")
    return (
        (
            f"A shop sells {thing} in a {pack} of {b}. {who} takes {a} {plural} and {c} single {thing}. "
            f"How many {thing} is that?"
        ),
        (
            f"The {plural} hold {a}*{b}={a * b} {thing}. With the single ones {who} takes "
            f"{a * b}+{c}={a * b + c} {thing}."
        ),
        a * b + c,
    )


def _compare(rng: Random) -> Story:
    who, friend = rng.sample(list(NAMES), 2)
    thing, a, b = rng.choice(THINGS), rng.randint(2, 6), rng.randint(2, 5)
    return (
        (f"{who} has {a} {thing}. {friend} has {b} {thing} more than {who}. How many {thing} do they have together?"),
        f"{friend} has {a}+{b}={a + b} {thing}. Together they have {a}+{a + b}={a + a + b} {thing}.",
        a + a + b,
    )


def _times(rng: Random) -> Story:
    who, friend = rng.sample(list(NAMES), 2)
    thing, a, k = rng.choice(THINGS), rng.randint(2, 6), rng.choice(list(TIMES_WORDS))
    return (
        (
            f"{who} collects {a} {thing}. {friend} collects {TIMES_WORDS[k]} as many. "
            f"How many {thing} do they collect in total?"
        ),
        f"{friend} collects {k}*{a}={k * a} {thing}. In total that is {a}+{k * a}={a + k * a} {thing}.",
        a + k * a,
    )


def _spend(rng: Random) -> Story:
    who, thing = rng.choice(list(NAMES)), rng.choice(THINGS)
    a, b, left = rng.randint(2, 3), rng.randint(2, 5), rng.randint(2, 6)
    money = a * b + left
    return (
        (
            f"{who} has {money} dollars and pays for {a} {thing} at {b} dollars each. "
            f"How many dollars does {who} have left?"
        ),
        f"The {thing} cost {a}*{b}={a * b} dollars. {who} has {money}-{a * b}={left} dollars left.",
        left,
    )


def _share(rng: Random) -> Story:
    who, thing, each, k = rng.choice(list(NAMES)), rng.choice(THINGS), rng.randint(2, 6), rng.randint(2, 4)
    return (
        f"{who} shares {each * k} {thing} equally among {k} friends. How many {thing} does each friend get?",
        (f"{who} splits {each * k} {thing} into {k} equal parts. Each friend gets {each * k}/{k}={each} {thing}."),
        each,
    )


def _animals(rng: Random) -> Story:
    animal, spot = rng.choice(ANIMALS), rng.choice(SPOTS)
    left, b, c = rng.randint(2, 7), rng.randint(2, 6), rng.randint(2, 6)
    a = left + b
    return (
        f"There are {a} {animal} {spot}. Then {b} leave and {c} arrive. How many {animal} are {spot} now?",
        (
            f"When {b} {animal} leave, {a}-{b}={left} stay. When {c} arrive, {left}+{c}={left + c} {animal} "
            f"are {spot}."
        ),
        left + c,
    )


def _days(rng: Random) -> Story:
    who, thing = rng.choice(list(NAMES)), rng.choice(THINGS)
    a, b, c = (rng.randint(2, 6) for _ in range(3))
    verb = rng.choice(("paints", "packs", "sorts"))
    return (
        (
            f"{who} {verb} {a} {thing} on Monday, {b} on Tuesday and {c} on Friday. "
            f"How many {thing} does {who} do in the week?"
        ),
        f"By Tuesday {who} does {a}+{b}={a + b} {thing}. By Friday it is {a + b}+{c}={a + b + c} {thing}.",
        a + b + c,
    )


STORIES: tuple[Callable[[Random], Story], ...] = (
    _gain, _give, _gain_then_lose, _packs, _packs_and_loose,
    _compare, _times, _spend, _share, _animals, _days,
)  # fmt: skip


# --- the two splits ---


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out split: a property of its text alone."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _stream(seed: int, held_out: bool) -> Iterator[Problem]:
    """Endless problems of one split, in an order given by `seed`; a problem may come again."""
    rng = Random(seed)
    while True:
        question, steps, number = rng.choice(STORIES)(rng)
        if is_held_out(question) == held_out:
            yield Problem(question, f"{steps}\n#### {number}")


def training(seed: int = 0) -> Iterator[Problem]:
    """Endless problems of the training split."""
    return _stream(seed, held_out=False)


def held_out(n: int, seed: int = 0) -> list[Problem]:
    """`n` different problems that no training stream ever yields."""
    found: dict[Problem, None] = {}
    stream = _stream(seed, held_out=True)
    while len(found) < n:
        found[next(stream)] = None
    return list(found)


# --- prompts and grading ---


def prompt(question: str) -> str:
    """The zero-shot prompt; the reply starts with a space."""
    return f"Question: {question}\nAnswer:"


def document(problem: Problem) -> str:
    """A solved problem as the model's training text shows it, without a terminator."""
    return f"{prompt(problem.question)} {problem.answer}"


def few_shot_prompt(question: str, examples: Sequence[Problem]) -> str:
    """Solved examples, then the question, with blank lines between (200 bytes or so an example)."""
    return "\n\n".join([*map(document, examples), prompt(question)])


def few_shot_prompts(n: int, shots: int, seed: int = 0) -> list[tuple[str, Problem]]:
    """`n` held-out problems, each with its prompt of `shots` solved training problems."""
    examples = training(seed)
    return [(few_shot_prompt(p.question, [next(examples) for _ in range(shots)]), p) for p in held_out(n, seed)]


def final_number(reply: str) -> int | None:
    """The number after the first `####` of a reply, or None where there is none."""
    match = re.search(r"####\s*(-?[\d,]*\d)", reply)
    return int(match[1].replace(",", "")) if match else None
