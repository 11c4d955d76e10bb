"""Arithmetic chains with written-out working: answers that a rule checks, at the end of rollouts of a chosen length.

"Start with 37. 12 times: times 7, plus the number of the step, keep the last 2 digits. Write each result with its
number." is answered by "1:60 2:22 ... 12:35". The prompt stays short however long the chain is, the working cannot be
skipped (nobody knows the end without it), and one wrong result makes every later one wrong: the longer the chain, the
more a small drift costs. Without the step's number a chain would repeat itself after few steps and become copying.
"""

import random
import re
from collections.abc import Iterator

# Odd and no multiple of 5: each step is then one-to-one on the kept digits, so that a wrong result never runs back
# into the right chain and a right answer means right working. 1 would need no multiplication.
MULTIPLIERS = (3, 7, 9)
# Chains of one task differ in length by this much, so that where to stop is read from the question and not learned.
SHORTEST_SHARE = 0.75

QUESTION = (
    "Start with {start}. {steps} times: times {times}, plus the number of the step, keep the last {digits} digits. "
    "Write each result with its number."
)
_PATTERN = re.compile(QUESTION.format(start=r"(\d+)", steps=r"(\d+)", times=r"(\d+)", digits=r"(\d)"))


def chain_problems(length: int, digits: int, seed: str) -> Iterator[tuple[str, str]]:
    """(question, answer) without end; the answer is the last result in canonical decimal form ("7", not "07").

    length: the most characters that a written-out answer has with its end-of-turn token. A byte-level tokenizer never
    makes more tokens than ASCII characters, so this bounds the response's tokens for every model.
    digits: how many of each result are kept; the more, the harder a step.
    """
    draw = random.Random(f"jetrl/chain/{seed}")
    most = most_steps(length, digits)
    fewest = max(1, round(SHORTEST_SHARE * most))
    while True:
        start, times = draw.randrange(10**digits), draw.choice(MULTIPLIERS)
        question = QUESTION.format(
            start=start,
            steps=draw.randint(fewest, most),
            times=times,
            digits=digits,
        )
        yield question, str(results(question)[-1])


def results(question: str) -> list[int]:
    """Every result of a question's chain, by exact integer arithmetic. Raises ValueError for another text."""
    found = _PATTERN.match(question)
    if found is None:
        raise ValueError(f"not a question of the task chain: {question[:80]!r}")
    value, steps, times, digits = map(int, found.groups())
    chain = []
    for number in range(1, steps + 1):
        value = (value * times + number) % 10**digits
        chain.append(value)
    return chain


def working(question: str) -> str:
    """The written-out answer: "1:60 2:22 3:57", results with leading zeros to the kept digits."""
    digits = int(_PATTERN.match(question).group(4))
    return " ".join(f"{number}:{value:0{digits}d}" for number, value in enumerate(results(question), 1))


def most_steps(length: int, digits: int) -> int:
    """The longest chain whose working fits into `length` characters, one of them for the end of the turn."""
    steps, used = 0, 0
    while True:
        used += len(str(steps + 1)) + 1 + digits + (steps > 0)
        if used + 1 > length:
            return steps
        steps += 1
