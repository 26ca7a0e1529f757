"""What a child sends is read as data of the types that its parent names."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from typing import Any

import pytest

from roll.env import ipc as env_ipc
from roll.env.base import ResetResult, Step
from roll.process.framing import HEADER, Reader
from roll.reward import ipc as reward_ipc
from roll.reward.base import Verdict


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/nowhere/made/by/a/payload",)


class Deep:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Step, "__init__")


@pytest.mark.parametrize("value", [Attack(), Deep(), [1, {"a": Attack()}], OrderedDict(a=1), len, Verdict, b"x".join])
def test_a_payload_that_names_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is not among the types that this process may send"):
        env_ipc.RESULTS.read(pickle.dumps(value))


@pytest.mark.parametrize("payload", [b"", b"nonsense", b"\x80\x05.", pickle.dumps([1])[:-1], b"(" * 1000])
def test_a_payload_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError)):
        env_ipc.RESULTS.read(payload)


def test_all_that_processes_say_is_read() -> None:
    said = [
        (1, env_ipc.EnvReady(), 0.5),
        (2, ResetResult(({"role": "user", "content": "hi"},), {"a": 1.0}, ({"type": "function"},)), 0.5),
        (3, Step("hi", 1.0, True, False, {"a": 1.0}), 0.5),
        (4, env_ipc.EnvFailed("raised", "why", "where"), 0.5),
        (-1, env_ipc.EnvSettled(3, 7), 0.0),
        (-1, env_ipc.EnvEnding(3, "how"), 0.0),
    ]
    for each in said:
        assert env_ipc.RESULTS.read(env_ipc.frame(each)[HEADER.size :]) == each
    scored = reward_ipc.GraderScored(Verdict(1.0, {"a": 2.0}, "7"), 0.1, {"a": 0.1}, True)
    for answer in (
        scored,
        reward_ipc.GraderFailed("raised", "why"),
        reward_ipc.GraderEntered("a"),
        reward_ipc.GraderReady(),
    ):
        assert reward_ipc.ANSWERS.read(pickle.dumps(answer)) == answer


def test_only_named_types_are_read() -> None:
    assert Reader([Verdict]).read(pickle.dumps(Verdict(1.0))) == Verdict(1.0)
    with pytest.raises(pickle.UnpicklingError):
        Reader([]).read(pickle.dumps(Verdict(1.0)))
