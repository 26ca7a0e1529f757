"""What environments may return, and what is said of the rest."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest

from roll.data.task import EnvSpec, Message, Task
from roll.env import EnvFailure, Environment, ResetResult, Step
from roll.env.base import parse_reset, parse_step

HI = Message(role="user", content="hi")
RULES = Message(role="system", content="be brief")


@pytest.mark.parametrize(
    ("returned", "messages", "info"),
    [
        ("hi", (HI,), {}),
        ("", (Message(role="user", content=""),), {}),
        ([RULES, HI], (RULES, HI), {}),
        ((RULES, HI), (RULES, HI), {}),
        (("hi", {"level": 3, "map": "cave"}), (HI,), {"level": 3.0, "map": "cave"}),
        (([HI], {}), (HI,), {}),
    ],
)
def test_a_beginning_is_text_or_messages_with_or_without_info(returned: Any, messages: Any, info: Any) -> None:
    assert parse_reset(returned) == ResetResult(messages, info)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, r"reset returned None, not a text or a list of messages: is a `return` missing\?"),
        (3, r"3 \(int\), not a text"),
        ([], "reset returned no messages"),
        ({"role": "user", "content": "hi"}, "not a text or a list of messages"),
        (["hi"], r"a list with 'hi' \(str\) in it: a message has `role` and `content`"),
        ([{"role": "user"}], "a message has `role` and `content`"),
        ([{**HI, "name": "x"}], "nothing else"),
        ([{"role": "user", "content": None}], "a message whose content is None"),
        ("\udcff", "text that is not Unicode.*errors='replace'"),
        (("hi", 3), r"as info, 3 \(int\), not a mapping"),
        (("hi", {"x": [1]}), r"as info\['x'\], \[1\] \(list\), not a number"),
        (("hi", {3: 1}), "whose name is 3"),
    ],
)
def test_a_beginning_that_is_none_is_refused(returned: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_reset(returned)


def test_a_step_is_a_step_or_gymnasiums_tuple() -> None:
    whole = Step("hi", 0.5, True, False, {"x": 1.0, "y": "z"})
    assert parse_step(whole) == whole
    assert parse_step(("hi", 0.5, True, False, {"x": 1, "y": "z"})) == whole
    assert parse_step(Step("hi")) == Step("hi", 0.0, False, False, {})
    assert parse_step(([HI], 0, False, False, {})).observation == (HI,)
    assert parse_step(((), 1, True, False, {})).messages == ()


def test_numpys_numbers_flags_and_texts_become_pythons() -> None:
    step = parse_step((np.str_("hi"), np.float32(0.5), np.True_, np.bool_(False), {np.str_("n"): np.int64(3)}))
    assert step == Step("hi", 0.5, True, False, {"n": 3.0})
    values = [step.observation, step.reward, step.terminated, step.truncated, *step.info, *step.info.values()]
    assert [type(value) for value in values] == [str, float, bool, bool, str, float]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, r"step returned None, not a Step: is a `return` missing\?"),
        ("hi", r"'hi' \(str\), not a Step"),
        (("hi", 1.0, True, {}), r"4 values, not 5: \(observation, reward, terminated, truncated, info\)"),
        (("hi", 1.0, True, {}, False), r"as truncated, \{\} \(dict\), not True or False"),
        (("hi", 1.0, 1, False, {}), r"as terminated, 1 \(int\), not True or False"),
        (("hi", None, True, False, {}), "as reward, None, not a number"),
        (("hi", float("nan"), True, False, {}), "as reward, nan, not a finite number"),
        (("hi", 1e308, True, False, {}), r"as reward, 1e\+308, but a reward is from"),
        (("hi", 10**400, True, False, {}), "as reward, 1000.*which is not one number"),
        (("hi", 10**5000, True, False, {}), "as reward, a int that cannot be shown"),
        (("hi", 0.0, False, False, {"x": 1e300}), r"info\['x'\], 1e\+300, but a number beside"),
        (("hi", np.ones(2), True, False, {}), "which is not one number"),
        (("hi", 0.0, False, False, {"x": float("inf")}), r"info\['x'\], inf, not a finite"),
        (("hi", 0.0, False, False, None), "as info, None"),
        ((None, 0.0, False, False, {}), "as observation, None, not a text"),
        (((), 0.0, False, False, {}), "no messages, but the episode continues"),
        (Step("hi", reward="high"), r"as reward, 'high' \(str\)"),  # type: ignore[arg-type]
    ],
)
def test_a_step_that_is_none_is_refused(returned: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_step(returned)


@pytest.mark.filterwarnings("error")
def test_a_forgotten_await_is_named() -> None:
    with pytest.raises(ValueError, match=r"step returned a coroutine, not a Step: was an `await` forgotten\?"):
        parse_step(asyncio.sleep(0))
    with pytest.raises(ValueError, match=r"as reward, a coroutine, not a number: was an `await` forgotten\?"):
        parse_step(("hi", asyncio.sleep(0), False, False, {}))


def test_a_texts_message_is_the_users_and_done_is_either_end() -> None:
    assert Step("hi").messages == (HI,)
    assert Step([RULES, HI]).messages == (RULES, HI)
    assert [Step("", 0, a, b).done for a in (False, True) for b in (False, True)] == [False, True, True, True]


def test_a_failure_says_its_kind_and_travels() -> None:
    failure = pickle.loads(pickle.dumps(EnvFailure("lost", "its process ended", "trace")))
    assert (str(failure), failure.kind, failure.detail) == ("lost: its process ended", "lost", "trace")


def test_an_environment_must_say_how_it_begins_and_goes_on() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Environment()  # type: ignore[abstract]


def test_a_task_may_name_an_environment() -> None:
    assert Task.ask("t", "?").environment is None
    task = Task("t", (), environment=EnvSpec("guess", 3, {"high": 9}))
    assert pickle.loads(pickle.dumps(task)) == task
    assert Task("t", (), 5, "maths", {"a": 1}, EnvSpec("guess")).environment == EnvSpec("guess", 0, {})
