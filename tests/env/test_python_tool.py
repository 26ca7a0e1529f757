"""The environment `python`: programs run in the sandbox, and what they print is the observation."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from roll.data.task import EnvSpec
from roll.env.base import Step
from roll.env.pool import EnvPool
from roll.env.python_tool import QUESTIONS, PythonTool, shows_last

GIVEN: dict[str, Any] = {"question": "What is 6 times 7?", "answer": 42}


def opened(**options: Any) -> PythonTool:
    tool = PythonTool(**{**GIVEN, "seconds": 20.0, **options})
    tool.reset(0)
    return tool


def fenced(program: str) -> str:
    return f"Let me see.\n```python\n{program}\n```"


def facts(success: float = 0, invalid: float = 0, failed_programs: float = 0) -> dict[str, float]:
    return {"success": success, "invalid": invalid, "failed_programs": failed_programs}


class TestTurns:
    def test_what_a_program_prints_is_shown_and_the_answer_ends_it(self) -> None:
        tool = opened()
        step = tool.step(fenced("print(6 * 7)"))
        assert step == Step("42\nTurns left: 3.", info=facts())
        assert tool.step("So it is <answer>42</answer>") == Step("Right.", 1.0, terminated=True, info=facts(success=1))

    @pytest.mark.parametrize(
        ("said", "worth"), [("42.0", 1.0), (" 4,2 ", 1.0), ("41", 0.0), ("forty-two", 0.0), ("nan", 0.0)]
    )
    def test_an_answer_is_a_number(self, said: str, worth: float) -> None:
        assert opened().step(f"<answer>{said}</answer>").reward == worth

    def test_after_the_last_turn_it_ends(self) -> None:
        tool = opened(turns=2)
        assert not tool.step(fenced("1")).done
        last = tool.step(fenced("2"))
        assert last.terminated
        assert last.reward == 0

    def test_what_is_neither_a_program_nor_an_answer_costs(self) -> None:
        step = opened(invalid_penalty=0.1).step("I think it is 42.")
        assert (step.reward, step.info, step.done) == (-0.1, facts(invalid=1), False)
        assert "neither a program nor <answer>" in step.observation

    def test_an_error_is_shown_and_costs(self) -> None:
        step = opened(error_penalty=0.2).step(fenced("x = 1\nprint('so far')\nx / 0"))
        assert step.reward == -0.2
        assert "so far" in step.observation
        assert "ZeroDivisionError" in step.observation
        assert "line 3" in step.observation

    def test_a_program_that_takes_too_long_is_stopped(self) -> None:
        step = opened(seconds=1.0).step(fenced("while True: pass"))
        assert "took more than 1 s" in step.observation
        assert not step.done

    def test_long_output_is_shortened(self) -> None:
        step = opened(output_chars=20).step(fenced("print('a' * 5000 + 'z')"))
        assert step.observation.startswith("a" * 10 + "\n… 4981 more")
        assert "a" * 9 + "z" in step.observation

    def test_a_program_cannot_read_the_answer(self) -> None:
        program = "import os, sys\nprint(dict(os.environ), sys.argv, open('main.py').read(), os.listdir('/'))"
        assert "42" not in opened().step(fenced(program)).observation.replace("Turns left: 3.", "")

    def test_calls_of_a_tool(self) -> None:
        tool = opened(form="json")
        call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
        assert tool.step(f"<tool_call>{call}</tool_call>").observation.startswith("42\n")
        assert tool.step(fenced("print(1)")).info == facts(invalid=1)

    def test_what_went_wrong_is_counted_to_the_end(self) -> None:
        tool = opened()
        tool.step("hm")
        tool.step(fenced("1 / 0"))
        assert tool.step("<answer>41</answer>").info == facts(invalid=1, failed_programs=1)


class TestQuestions:
    @pytest.mark.parametrize("kind", QUESTIONS)
    def test_every_kind_can_be_answered(self, kind: Any) -> None:
        solutions = {
            "arithmetic": lambda n: n[0] * n[1] - n[2],
            "sum": lambda n: sum(i for i in range(n[0], n[1] + 1) if i % n[2] == 0),
            "primes": lambda n: sum(all(i % d for d in range(2, i)) for i in range(n[0], n[1] + 1)),
            "digits": lambda n: sum(int(digit) for digit in str(n[0] ** n[1])),
            "sequence": lambda n: fibonacci(n[0], n[1], n[2]) % n[3],
        }
        for seed in range(5):
            tool = PythonTool(kinds=[kind])
            question = tool.reset(seed).partition("\n")[0]
            if kind == "calendar":
                continue
            answer = solutions[kind]([int(number) for number in re.findall(r"\d+", question)])
            assert tool.step(f"<answer>{answer}</answer>").reward == 1.0, question

    def test_days_between_dates(self) -> None:
        tool = PythonTool(kinds=["calendar"])
        first, last = re.findall(r"\d{4}-\d\d-\d\d", tool.reset(3))
        program = f"from datetime import date as d\n(d.fromisoformat('{last}') - d.fromisoformat('{first}')).days"
        days = tool.step(fenced(program)).observation.partition("\n")[0]
        assert tool.step(f"<answer>{days}</answer>").reward == 1.0

    def test_the_seed_says_it_all(self) -> None:
        assert PythonTool().reset(7) == PythonTool().reset(7)
        assert len({PythonTool().reset(seed) for seed in range(50)}) == 50

    @pytest.mark.parametrize(
        "options",
        [{"kinds": ["magic"]}, {"kinds": []}, {"form": "x"}, {"question": "?"}, {"turns": 0}, {**GIVEN, "answer": "x"}],
    )
    def test_wrong_options_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="python: "):
            PythonTool(**options)


def fibonacci(before: int, now: int, place: int) -> int:
    for _ in range(place - 2):
        before, now = now, before + now
    return now


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 'ä'; x * 2", "ää\n"),
        ("x = [1]\nx.append(2)", ""),
        ("print(1)", "1\n"),
        ("(\n1 +\n2\n)  # three", "3\n"),
        ("def f():\n    return 5\nf()", "5\n"),
        ("if True:\n    7", ""),
    ],
)
def test_a_last_expression_is_shown(source: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(shows_last(source), {})
    assert capsys.readouterr().out == printed


def test_episodes_side_by_side_in_a_pool() -> None:
    async def episode(pool: EnvPool, name: str) -> float:
        await pool.reset(name, EnvSpec("python", options={**GIVEN, "seconds": 20.0}))
        attack = await pool.step(name, fenced("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, 9)"))
        assert not attack.done
        assert (await pool.step(name, fenced("6 * 7"))).observation.startswith("42\n")
        return (await pool.step(name, "<answer>42</answer>")).reward

    async def play() -> list[float]:
        async with EnvPool() as pool:
            return await asyncio.gather(*(episode(pool, str(n)) for n in range(6)))

    assert asyncio.run(play()) == [1.0] * 6
