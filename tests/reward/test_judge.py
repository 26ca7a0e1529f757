"""Rewards that ask others: services over HTTP, and language models."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import completion, serving

from roll.config import UserError
from roll.config.schema import RewardConfig
from roll.data import Message, Response, Task
from roll.reward import RewardSpec, ScoreFailure, Verdict, make
from roll.reward.http_client import HttpClient, HttpFailure
from roll.reward.http_reward import HttpReward
from roll.reward.judge import Judge
from roll.reward.openai_client import OpenAIClient
from roll.reward.pool import GraderPool

TASK = Task.ask("t1", "Capital of Italy?", "Rome", domain="places", level=3)
RESPONSE = Response("It is Rome.", 4, "stop")


def test_a_service_is_sent_the_task_and_the_response() -> None:
    seen: list[Any] = []

    def answer(posted: Any, headers: Any) -> tuple[int, Any]:
        seen.append((posted, headers))
        return 200, {"reward": 0.5, "style": 0.25}

    with serving(answer) as url:
        got = HttpReward(f"{url}/score", headers={"X-Key": "k"})(TASK, RESPONSE)
    assert got == {"reward": 0.5, "style": 0.25}
    posted, headers = seen[0]
    assert posted == {
        "path": "/score",
        "task": {
            "id": "t1",
            "domain": "places",
            "messages": [{"role": "user", "content": "Capital of Italy?"}],
            "answer": "Rome",
            "info": {"level": 3},
        },
        "response": {"text": "It is Rome.", "tokens": 4, "finish": "stop"},
    }
    assert headers["X-Key"] == "k"


def answers(*script: tuple[int, Any]) -> Any:
    """Answers one after the other; the last again and again. The number asked is in `asked`."""
    left = list(script)

    def answer(posted: Any, headers: Any) -> tuple[int, Any]:
        answer.asked += 1  # type: ignore[attr-defined]
        return left.pop(0) if len(left) > 1 else left[0]

    answer.asked = 0  # type: ignore[attr-defined]
    return answer


@pytest.mark.parametrize(
    ("script", "tries", "asked"),
    [
        ([(200, 1)], 1, 1),
        ([(503, "busy"), (429, "slow down"), (200, 1)], 3, 3),
        ([(200, "not json"), (200, {"reward": "high"}), (200, 1)], 3, 3),
    ],
)
def test_a_request_to_a_service_in_trouble_is_retried(script: Any, tries: int, asked: int) -> None:
    answer = answers(*script)
    with serving(answer) as url:
        assert HttpReward(url, tries=tries, backoff_s=0.01)(TASK, RESPONSE) == {"reward": 1}
    assert answer.asked == asked


@pytest.mark.parametrize(
    ("script", "asked", "says"),
    [
        ([(500, "broken")], 3, "no answer in 3 tries: status 500: broken"),
        ([(404, "who?")], 1, "answered with status 404: who?"),
        ([(302, "")], 1, "answered with status 302"),
        ([(200, {"reward": None})], 3, "returned, as 'reward', None"),
        ([(200, [1])], 3, "not a number"),
    ],
)
def test_a_service_that_stays_in_trouble_fails_with_its_words(script: Any, asked: int, says: str) -> None:
    answer = answers(*script)
    with serving(answer) as url, pytest.raises(HttpFailure, match=says):
        HttpReward(url, tries=3, backoff_s=0.01)(TASK, RESPONSE)
    assert answer.asked == asked


def test_a_service_that_hangs_or_is_not_there_costs_its_time_only() -> None:
    ends = threading.Event()

    def hang(posted: Any, headers: Any) -> tuple[int, Any]:
        ends.wait(20)
        return 200, 1

    with serving(hang) as url:
        with pytest.raises(HttpFailure, match="gave no answer in 1 try: TimeoutError"):
            HttpReward(url, timeout_s=0.2)(TASK, RESPONSE)
        ends.set()
    with pytest.raises(HttpFailure, match=r"in 2 tries: .*refused"):
        HttpReward(url, tries=2, backoff_s=0.01)(TASK, RESPONSE)


def test_a_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def answer(posted: Any, headers: Any) -> tuple[int, Any]:
        seen.append(headers.get("Authorization"))
        return 200, 1

    with serving(answer) as url:
        with pytest.raises(HttpFailure, match="'MY_TOKEN', named by token_env, is not set"):
            HttpReward(url, token_env="MY_TOKEN")(TASK, RESPONSE)
        monkeypatch.setenv("MY_TOKEN", "secret")
        HttpReward(url, token_env="MY_TOKEN")(TASK, RESPONSE)
    assert seen == ["Bearer secret"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "file:///etc/passwd"}, "but takes an address such as http://"),
        ({"url": "localhost:80"}, "but takes an address"),
        ({"url": "http://x", "tries": 0}, "tries is 0"),
        ({"url": "http://x", "deadline_s": 0}, "deadline_s is 0"),
    ],
)
def test_an_address_that_cannot_work_is_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HttpClient(**options)


def saying(*replies: str) -> tuple[Any, list[Sequence[Message]]]:
    """An `ask` that gives these replies one after the other, and the conversations it was asked."""
    left, asked = list(replies), []

    def ask(messages: Sequence[Message]) -> str:
        asked.append(messages)
        return left.pop(0)

    return ask, asked


def test_the_judge_is_shown_the_task_and_the_response() -> None:
    ask, asked = saying("Right. Score: 7")
    tricky = Response("{answer} {nobody}", 1, "stop")
    assert Judge(ask, system="Be fair.")(TASK, tricky) == {"reward": 0.7, "spread": 0, "unread": 0}
    system, user = asked[0]
    assert system == {"role": "system", "content": "Be fair."}
    for shown in ("Capital of Italy?", "Rome", "{answer} {nobody}", "from 0 (useless) to 10"):
        assert shown in user["content"]
    assert "{question}" not in user["content"]


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Score: 7", 0.7),
        ("score = 7.5", 0.75),
        ("**Score:** 10", 1.0),
        ("Score: 7/10", 0.7),
        ("The score is 3.", 0.3),
        ("First I thought Score: 2. But then: Score: 9", 0.9),
        ("<think>Score: 1?</think>\nScore: 4", 0.4),
        ("8", 0.8),
        (" 8\n", 0.8),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Good, 8 of 10 points", None),
        ("", None),
    ],
)
def test_the_last_score_of_a_reply_counts(reply: str, value: float | None) -> None:
    assert Judge(saying()[0]).read(reply) == (None if value is None else pytest.approx(value))


@given(st.lists(st.integers(0, 10), min_size=1))
def test_of_many_scores_the_last_counts(scores: list[int]) -> None:
    reply = " then ".join(f"Score: {score}" for score in scores)
    assert Judge(saying()[0]).read(reply) == pytest.approx(scores[-1] / 10)


def test_verdicts_in_words() -> None:
    judge = Judge(saying()[0], words={"yes": 1, "no": 0, "not at all": -1})
    assert [judge.read(text) for text in ("Yes!", "Yes, but NO.", "Nobody knows", "not at all")] == [1, 0, None, -1]


@pytest.mark.parametrize(
    ("combine", "value"),
    [("mean", 0.5), ("median", 0.4), ("majority", 0.2)],
)
def test_votes_are_combined(combine: Any, value: float) -> None:
    ask, asked = saying("2", "Score: 9", "2", "hm", "Score: 8", "4")
    got = Judge(ask, votes=5, combine=combine)(TASK, RESPONSE)
    assert got["reward"] == pytest.approx(value)
    assert got["spread"] == pytest.approx(0.7)
    assert (got["unread"], len(asked)) == (0, 6)


def test_a_tie_goes_to_the_lower_verdict() -> None:
    assert Judge(saying("9", "1")[0], votes=2, combine="majority")(TASK, RESPONSE)["reward"] == 0.1


def test_votes_without_a_verdict_are_left_out_while_most_have_one() -> None:
    got = Judge(saying("hm", "8", "8")[0], votes=3, tries=1)(TASK, RESPONSE)
    assert (got["reward"], got["unread"]) == (0.8, pytest.approx(1 / 3))
    with pytest.raises(ValueError, match=r"no verdict \(1 tries\): 'hm'"):
        Judge(saying("8", "hm")[0], votes=2, tries=1)(TASK, RESPONSE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rubric": "Grade {respnse}"}, r"rubric has \{respnse\}, but takes .*; did you mean 'response'"),
        ({"rubric": "Grade it"}, r"write \{response\} where it goes"),
        ({"low": 5, "high": 5}, "write a higher high"),
        ({"votes": 0}, "votes is 0"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Judge(saying()[0], **options)
    with pytest.raises(UserError, match=says):
        make("judge", {"url": "http://localhost/v1", "model": "m", **options})


def test_a_rubric_may_show_json() -> None:
    judge = Judge(saying("1")[0], rubric='Grade {response} as {"score": 3}')
    assert judge.messages(TASK, RESPONSE)[0]["content"] == 'Grade It is Rome. as {"score": 3}'


def chat(replies: Iterable[str | None], seen: list[Any]) -> Any:
    left = iter(replies)

    def answer(posted: Any, headers: Any) -> tuple[int, Any]:
        seen.append(posted)
        return 200, completion(next(left))

    return answer


def test_a_judge_behind_a_server_judges_in_grader_processes() -> None:
    seen: list[Any] = []

    async def verdict(url: str) -> Verdict:
        options = {"url": f"{url}/v1", "model": "m", "votes": 2, "temperature": 0.5}
        config = RewardConfig.model_validate({"parts": {"good": {"name": "judge", "options": options}}})
        source = RewardSpec.of_config(config)
        source.check()
        async with GraderPool(source) as pool:
            return await pool.score(TASK, RESPONSE)

    with serving(chat(["Score: 4", None, "Score: 8"], seen)) as url:
        got = asyncio.run(verdict(url))
    assert got.reward == pytest.approx(0.6)
    assert got.parts == {"good": pytest.approx(0.6), "good/spread": pytest.approx(0.4), "good/unread": 0}
    assert [posted["path"] for posted in seen] == ["/v1/chat/completions"] * 3
    assert (seen[0]["model"], seen[0]["temperature"], seen[0]["max_tokens"]) == ("m", 0.5, 512)


def test_a_server_that_is_no_chat_server_is_reported() -> None:
    async def failure(url: str) -> str:
        source = RewardSpec.of_config(RewardConfig(name="judge", options={"url": url, "model": "m", "timeout_s": 0.5}))
        async with GraderPool(source) as pool:
            with pytest.raises(ScoreFailure) as caught:
                await pool.score(TASK, RESPONSE)
            return caught.value.reason

    with serving(lambda posted, headers: (200, {"error": "no"})) as url:
        assert "ValueError: not a chat completion: {'error': 'no'}" in asyncio.run(failure(url))


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (DEEP, "RecursionError|not a chat completion"),  # libraries raise the limit of recursion
        ("[" + "0," * 2_000_000 + "0]", "longer than 2 MiB"),
        ('{"choices": [{"message": {"content": [1]}}]}', "not text"),
        ('{"choices": [{"message": {"content": {"a": 1}}}]}', "not text"),
        ('{"choices": {}}', "not a chat completion"),
        ("9" * 5000, "ValueError"),
        ("NaN", "not a chat completion"),
        ("", "ValueError|JSONDecodeError"),
    ],
)
def test_a_server_that_answers_with_what_is_no_answer_is_named(body: str, says: str) -> None:
    with serving(lambda posted, headers: (200, body)) as url, pytest.raises(HttpFailure, match=says):
        OpenAIClient(url, "m").ask([{"role": "user", "content": "?"}])


@pytest.mark.parametrize("said", [b"nonsense\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n[1"])
def test_a_server_that_does_not_speak_http_is_named(said: bytes) -> None:
    with (
        raw_server(lambda connection: connection.sendall(said)) as url,
        pytest.raises(HttpFailure, match="gave no answer"),
    ):
        HttpClient(url, tries=1, deadline_s=5).send({})


def test_an_answer_that_never_ends_is_given_up() -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(600):
            connection.sendall(b" ")
            time.sleep(0.05)

    started_s = time.monotonic()
    with raw_server(drip) as url, pytest.raises(HttpFailure, match=r"did not end in time|timed out"):
        HttpClient(url, tries=1, deadline_s=0.5).send({})
    assert time.monotonic() - started_s < 20


@contextlib.contextmanager
def raw_server(say: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that takes one connection and says something on it."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                say(connection)

    threading.Thread(target=serve, daemon=True).start()
    with server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
