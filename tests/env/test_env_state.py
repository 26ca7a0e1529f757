"""States as numbers: equal where an environment calls them equal, else where it shows the same; in any process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis_examples import examples

from roll.data.task import Message
from roll.env import ResetResult, Step
from roll.env.state_key import state_of

SAID = st.lists(st.builds(Message, role=st.sampled_from(["user", "system"]), content=st.text(max_size=5)), max_size=3)
NAMES = st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(SAID, SAID, st.floats(-1, 1), st.booleans())
def test_without_a_name_the_state_is_what_was_shown(
    first: list[Message], second: list[Message], reward: float, done: bool
) -> None:
    same = state_of(ResetResult(tuple(first))) == state_of(Step(second, reward, done, info={"level": 3.0}))
    assert same == (first == second)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(NAMES, NAMES, SAID)
def test_a_state_with_a_name_is_what_it_is_called(first: str | float, second: str | float, said: list[Message]) -> None:
    one, other = state_of(Step(said, info={"state": first})), state_of(Step("elsewhere", info={"state": second}))
    assert (one == other) == (first == second)
    assert one != state_of(Step(said))
    assert -(2**63) <= one < 2**63


@pytest.mark.parametrize(("one", "other", "equal"), [(1, 1.0, True), (0.0, -0.0, True), ("1", 1, False)])
def test_numbers_are_compared_as_numbers_and_are_no_texts(one: str | float, other: str | float, equal: bool) -> None:
    states = [state_of(Step("", info={"state": name})) for name in (one, other)]
    assert (states[0] == states[1]) == equal


def test_a_text_is_the_users_message_that_it_stands_for() -> None:
    assert state_of(Step("hi")) == state_of(ResetResult((Message(role="user", content="hi"),)))


def test_a_state_is_the_same_number_in_another_process() -> None:
    code = "from roll.env import Step; from roll.env.state_key import state_of; print(state_of(Step('hi')))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(said.stdout) == state_of(Step("hi"))
