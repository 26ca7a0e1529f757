"""Texts made to break a reward are wrong answers: every built-in reward gives each a number, in bounded time."""

from __future__ import annotations

import inspect
import math
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data.task import Response, Task
from roll.reward import time_limit
from roll.reward.base import RewardFn, normalise
from roll.reward.compose import warm_up
from roll.reward.factory import make
from roll.reward.instructions import CONSTRAINTS
from roll.reward.instructions.counting import sentences
from roll.reward.time_limit import TimeLimitReached, with_time_limit

HANGS_S = 60.0
"""A text that takes longer has hung its reward."""

ARGUMENTS: dict[str, Any] = {
    "keywords": ["cat"], "keyword": "cat", "frequency": 2, "relation": "at least", "forbidden_words": ["dog"],
    "letter": "a", "let_frequency": 3, "let_relation": "at least", "num_words": 5, "num_sentences": 3,
    "num_paragraphs": 3, "nth_paragraph": 1, "first_word": "x", "num_placeholders": 2, "postscript_marker": "P.S.",
    "num_bullets": 3, "num_highlights": 3, "section_spliter": "SECTION", "num_sections": 3, "end_phrase": "bye",
    "capital_frequency": 3, "capital_relation": "at least", "prompt_to_repeat": "hi", "language": "ja",
}  # fmt: skip
NAMES = list(CONSTRAINTS)
FOLLOWED = Task.ask(
    "t", "?", instruction_id_list=NAMES,
    kwargs=[{name: ARGUMENTS[name] for name in inspect.signature(CONSTRAINTS[each]).parameters if name != "text"}
            for each in NAMES],
)  # fmt: skip
CITIES = Task.ask("t", "?", "B", choices=["Paris", "Rome", "Oslo", "Bern"])
REWARDS: dict[str, tuple[RewardFn, Task]] = {
    "number": (make("number", {}), Task.ask("t", "?", "72")),
    "exact": (make("exact", {"ignore_case": True, "ignore_punctuation": True}), Task.ask("t", "?", "Paris")),
    "fuzzy": (make("fuzzy", {}), Task.ask("t", "?", "the quick brown fox")),
    "fuzzy characters": (make("fuzzy", {"by": "characters"}), Task.ask("t", "?", "the quick brown fox")),
    "choice": (make("choice", {}), CITIES),
    "format": (make("format", {"json": True, "schema": {"type": "object"}, "tags": ["answer"]}), Task.ask("t", "?")),
    "repetition": (make("repetition", {}), Task.ask("t", "?")),
    "instructions": (make("instructions", {}), FOLLOWED),
}
PIECES = [
    " ", "\n", "a", "A", "9", "1,", "1.", "1/", "-", "*", "**", "_", "`", "$", "\\", "{", "}", "(", "[", "<", "<<", ">>",
    "<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "\\frac{1}", "\\text{", "####", "answer is ", "Answer: ",
    "or ", "A or B ", "(A)", "A) ", "not ", "=", "^{", "½", "²", "１", "√(", "%", ":", "...", "!", "[a]", "*a*", "- a\n",
    "******", "P.S.", "```\n", '{"a":', "[[", "1e9 ", "1e999 ", "Mr. ", "e.g. ", "1. ", "B. x\n", "\ud800", "\u0301", "ﷺ",
    "İ", "ß", "\x00", "\r", "\x85", "\u2028", "\u200b",
]  # fmt: skip


def worth(name: str, text: str) -> float | None:
    """What the reward gives the text; None if it hangs."""
    reward, task = REWARDS[name]
    judge: Callable[[], float | None] = lambda: normalise(reward(task, Response(text, len(text), "stop"))).reward  # noqa: E731
    return with_time_limit(judge, None, HANGS_S)


@pytest.mark.parametrize("name", REWARDS)
@settings(derandomize=True, max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 1, 2, 7, 500])), min_size=1, max_size=6))
def test_every_text_is_worth_a_number(name: str, parts: list[tuple[str, int]]) -> None:
    value = worth(name, "".join(piece * times for piece, times in parts))
    assert value is not None
    assert math.isfinite(value)


@pytest.mark.parametrize("piece", ["<", "<<", "\n_", "Mr. ", "B. x\n", "a"])
def test_instructions_are_checked_in_linear_time(piece: str) -> None:
    """Quadratic time would be half an hour here."""
    assert worth("instructions", piece * (300_000 // len(piece))) is not None


def test_sentences_are_recognised_by_what_stands_near_their_ends() -> None:
    assert len(sentences("Mr. Bach met J. S. Bach, e.g. here. Then he left.")) == 2
    assert sentences("1. First.\n2. Second.") == ["1. First.", "2. Second."]
    assert len(sentences(f"{'x' * 500}. And more.")) == 2
    assert len(sentences("word " * 500 + "ends here 7. And more.")) == 2


STARES = "(a+)+b"
"""A pattern that takes 2^n steps on n times `a`."""
MANY = "a" * 60


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("exact", {"pattern": STARES}, MANY),
        ("fuzzy", {"pattern": STARES}, MANY),
        ("format", {"pattern": STARES}, MANY),
        ("format", {"pattern": STARES, "search": True}, MANY),
        ("format", {"schema": {"type": "string", "pattern": STARES}}, f'"{MANY}"'),
    ],
)
def test_a_pattern_that_takes_too_long_does_not_match(
    name: str, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "TIME_LIMIT_S", 0.1)
    assert make(name, options)(Task.ask("t", "?", "aab"), Response(text, 1, "stop")) == 0


def compute_for_ever() -> int:
    while True:
        pass


def test_a_judge_that_is_in_time_is_not_interrupted_and_timers_continue() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: rang.append(1))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 300)
        assert with_time_limit(lambda: 5, 0) == 5
        assert with_time_limit(compute_for_ever, 0, 0.05) == 0
        left_s, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        assert 200 < left_s < 300
        assert not rang
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_no_verifier_swallows_the_end_of_patience() -> None:
    assert not issubclass(TimeLimitReached, Exception)


HOSTILE_MATHS = {
    "a tower of powers": r"\boxed{9^{9^{9^{9}}}}",
    "factorials of factorials": r"\boxed{((9!)!)!}",
    "a power that no number holds": r"\boxed{10^{10^{10}}}",
    "deep braces": r"\boxed{" + "{" * 900 + "1" + "}" * 900 + "}",
    "deep roots": r"\boxed{" + r"\sqrt{" * 250 + "2" + "}" * 250 + "}",
}


@pytest.mark.parametrize("text", HOSTILE_MATHS)
def test_mathematics_that_cannot_be_computed_is_wrong(text: str) -> None:
    judge = make("math", {})
    warm_up(judge)
    assert (
        with_time_limit(lambda: judge(Task.ask("t", "?", "7"), Response(HOSTILE_MATHS[text], 1, "stop")), None, HANGS_S)
        == 0
    )


def test_a_tower_that_is_written_as_the_answer_is_right() -> None:
    judge = make("math", {})
    warm_up(judge)
    assert judge(Task.ask("t", "?", r"x+2^{2^{2^{2}}}"), Response(r"\boxed{x + 2^{2^{2^{2}}}}", 1, "stop")) == 1


@pytest.mark.parametrize("answer", ["1e999999999", "9**9**9**9", "[" * 5000, "1" * 70_000])
def test_a_verifier_that_computes_answers_is_not_given_what_it_cannot_compute(answer: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = Task.ask("t", "?", family="countdown", parameters={}, seed=0, size=3, index=0)
    judge = make("reasoning_gym", {"partial": False})
    assert judge(task, Response(f"<answer>{answer}</answer>", 1, "stop")) == 0
