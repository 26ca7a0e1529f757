"""The reward `code`: programs pass or fail by what they answer, whatever else they do."""

from __future__ import annotations

import asyncio
import itertools
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from thorough import but

from roll.config.errors import UserError
from roll.data.task import Response, Task
from roll.reward import RewardSpec, code_tests
from roll.reward.code import Code, program_in, same, same_output
from roll.reward.code_tests import AssertTest, CallTest, InOut, assertion, free_names
from roll.reward.pool import GraderPool

DATA = Path(__file__).parents[3] / "shared" / "data"
PATIENT: dict[str, Any] = {"seconds": 20.0, "total_s": 60.0}

ADD = "def add(a, b):\n    return a + b\n"
IN_OUT = {"tests": [{"stdin": "48213 90772\n", "stdout": "138985\n"}, {"stdin": "10 -4\n", "stdout": "6\n"}]}
CALLS = {
    "tests": [{"call": "add", "args": [48213, 90772], "result": 138985}, {"call": "add", "args": [10, -4], "result": 6}]
}
ASSERTS = {"test_list": ["assert add(48213, 90772) == 138985", "assert add(10, -4) == 6"]}
CODED = {
    "tests": ["assert sorted([add(48213, 90772), 1]) == [1, 138985]", "for n in range(1, 3): assert add(n, n) == 2 * n"]
}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(48213, 90772) == 138985\n    assert candidate(10, -4) == 6",
    "entry_point": "add",
}
FORMS = {"in and out": IN_OUT, "calls": CALLS, "asserts": ASSERTS, "coded asserts": CODED, "check": CHECK}
FUNCTIONS = {name: info for name, info in FORMS.items() if name != "in and out"}


def graded(program: str, info: dict[str, Any], **options: Any) -> float:
    task = Task("t", (), info=info)
    return Code(**{**PATIENT, **options})(task, Response(f"Here it is:\n```python\n{program}\n```", 1, "stop"))["reward"]


class TestPrograms:
    def test_the_last_block_is_the_program(self) -> None:
        text = "```python\nfirst\n```\nNo:\n```py\nlast\n```\nDone."
        assert program_in(text) == "last\n"
        assert program_in(text, "first") == "first\n"
        assert program_in(text, "all") == "first\n\nlast\n"
        assert program_in(text, "text") == text

    def test_a_block_that_is_not_closed_goes_on_to_the_end(self) -> None:
        assert program_in("```python\nx = 1\ny = 2") == "x = 1\ny = 2"

    def test_a_text_without_blocks_is_the_program(self) -> None:
        assert program_in("print(1)") == "print(1)"


class TestForms:
    @pytest.mark.parametrize("form", FUNCTIONS)
    def test_a_right_function_passes(self, form: str) -> None:
        assert graded(ADD, FUNCTIONS[form]) == 1

    @pytest.mark.parametrize("form", FUNCTIONS)
    def test_a_wrong_function_fails(self, form: str) -> None:
        assert graded("def add(a, b):\n    return a - b", FUNCTIONS[form]) == 0

    def test_programs_are_judged_by_their_output(self) -> None:
        assert graded("a, b = map(int, input().split())\nprint(a + b)", IN_OUT) == 1
        assert graded("a, b = map(int, input().split())\nprint(a - b)", IN_OUT) == 0
        assert graded("print(138985)\nraise SystemExit(1)", IN_OUT) == 0

    def test_the_share_of_tests_can_be_the_reward(self) -> None:
        assert graded("print(6)", IN_OUT, credit="share") == 0.5
        assert graded("def add(a, b):\n    return 6", CALLS, credit="share") == 0.5
        assert graded("def add(a, b):\n    if a > 20: raise ValueError\n    return 6", ASSERTS, credit="share") == 0.5

    def test_functions_of_the_program_may_take_and_return_anything(self) -> None:
        program = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
def top(stack): return stack.items[-1]
def fail(): raise KeyError("no")
"""
        test = """
stack = Stack()
stack.push((1, {2, 3})); stack.push(4)
assert top(stack) == 4 and stack.pop() == 4
assert stack.pop() == (1, {2, 3})
stack.items = [7]
assert top(stack) == 7
try: fail()
except KeyError: pass
else: assert False
"""
        assert graded(program, {"tests": [test]}) == 1

    def test_what_was_written_as_json_knows_no_tuples(self) -> None:
        assert graded("def f(): return (1, [2])", {"inputs": [[]], "outputs": [[1, [2]]], "fn_name": "f"}) == 1
        assert graded("def f(): return (1, 2)", {"test_list": ["assert f() == [1, 2]"]}) == 0

    def test_numbers_may_be_near(self) -> None:
        info = {"tests": [{"stdin": "", "stdout": "0.333333 ok"}]}
        assert graded("print(1 / 3, 'ok')", info) == 0
        assert graded("print(1 / 3, 'ok')", info, tolerance=1e-5) == 1
        assert graded("def f(): return [1 / 3]", {"tests": [{"call": "f", "result": [0.33333]}]}, tolerance=1e-4) == 1

    def test_a_prompt_comes_before_the_program(self) -> None:
        info = CHECK | {"prompt": "from math import floor\n\ndef add(a, b):\n    '''adds'''\n"}
        assert graded("def add(a, b):\n    return floor(a + b)", info) == 1

    def test_no_program_is_worth_nothing(self) -> None:
        assert graded("", CALLS) == 0
        assert graded("def add(a, b) return", CALLS) == 0

    def test_a_task_without_tests_is_refused(self) -> None:
        with pytest.raises(ValueError, match="task 't' has no tests"):
            graded(ADD, {})
        with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
            graded(ADD, {"inputs": ["", ""], "outputs": [""]})

    @pytest.mark.parametrize("options", [{"credit": "half"}, {"block": "middle"}, {"seconds": 0}, {"tolerance": -1}])
    def test_wrong_options_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            Code(**options)


CHEATS = {
    "ends early": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits in the function": "def add(a, b):\n    raise SystemExit(0)",
    "prints verdicts": """
import os
for fd in range(1, 20):
    try: os.write(fd, b"passed\\npassed\\npassed\\n")
    except OSError: pass
def add(a, b): return 0
""",
    "answers in advance": """
import os
for fd in range(1, 20):
    try: os.write(fd, b'["value", true]\\n' * 9)
    except OSError: pass
def add(a, b): return 0
""",
    "is equal to everything": """
class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 138985
def add(a, b): return Same()
""",
    "is a number equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Same(0)
""",
    "changes built-ins": """
import builtins
builtins.AssertionError = KeyError
builtins.sorted = lambda x: [1, 138985]
builtins.range = lambda *n: []
builtins.compile = builtins.exec = lambda *a, **k: None
def add(a, b): return 0
""",
    "searches memory and files": """
import gc, glob, os, sys
def seen(value): return isinstance(value, (str, int)) and "589831" in str(value)[::-1]
def wanted(): return int("589831"[::-1])
def add(a, b):
    frame = sys._getframe()
    while frame:
        if any(map(seen, frame.f_locals.values())): return wanted()
        frame = frame.f_back
    for found in gc.get_objects():
        inner = list(found.values()) if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else []
        if any(map(seen, list(inner))): return wanted()
    for path in glob.glob("/scratch/*") + glob.glob("*") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/environ"):
        try:
            if seen(open(path, errors="replace").read()): return wanted()
        except OSError: pass
    return 0
print(add(0, 0))
""",
    "hangs": "while True: pass",
    "closes everything": "import os\nos.closerange(0, 256)\ndef add(a, b): return 0",
    "replaces json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return 0",
}


FEW = {("calls", cheat) for cheat in CHEATS} | {(form, "answers in advance") for form in FORMS}
"""Each way to cheat with one form of tests, and each form with one way."""


@pytest.mark.parametrize(("form", "cheat"), but(FEW, itertools.product(FORMS, CHEATS)))
def test_cheating_is_worth_nothing(cheat: str, form: str) -> None:
    assert graded(CHEATS[cheat], FORMS[form], credit="share", seconds=0.5 if cheat == "hangs" else 20.0) == 0


_NEAR_ROOT = """
def check(candidate):
    for factors in ([1, 2], [-6, 11, -6, 1]):
        assert math.fabs(poly(factors, candidate(factors))) < 1e-4
"""
_HELPED = {
    "test": _NEAR_ROOT,
    "entry_point": "root",
    "prompt": "import math\n\ndef poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n"
    "def root(xs):\n    '''a root'''\n",
}
_HONEST_ROOT = "    return -xs[0] / xs[1] if len(xs) == 2 else 1.0\n"


class TestNamesOfTests:
    """What tests use beside the program's own functions is never the program's."""

    def test_helpers_of_the_prompt_cannot_be_defined_anew(self) -> None:
        assert graded(_HONEST_ROOT, _HELPED) == 1
        assert graded(_HONEST_ROOT + "\ndef poly(xs, x): return 0", _HELPED) == 1
        assert graded("    return 5\n\ndef poly(xs, x): return 0", _HELPED) == 0
        assert graded("def poly(xs, x): return 0\ndef root(xs): return 5", _HELPED) == 0

    def test_modules_are_pythons(self) -> None:
        fake = "class math:\n    fabs = staticmethod(lambda x: 0)\n"
        assert graded(fake + "def root(xs): return 5", _HELPED) == 0
        info = {"tests": ["assert math.fabs(add(1, 2) - 3) < 1e-6"]}
        assert graded(ADD, info) == 1
        assert graded(fake + "def add(a, b): return 0", info) == 0

    def test_helpers_of_a_prefix_cannot_be_defined_anew(self) -> None:
        info = {"prefix": "def off(a, b):\n    return abs(a - b)\n", "tests": ["assert off(add(1, 2), 3) < 1e-6"]}
        assert graded(ADD, info) == 1
        assert graded("def add(a, b): return 0\ndef off(a, b): return 0", info) == 0

    def test_objects_of_a_prefix_are_the_programs(self) -> None:
        node = "class Node:\n    def __init__(self, value):\n        self.value = value\n"
        info = {"prefix": node, "tests": ["assert get(Node(5)) == 5"]}
        assert graded("def get(node): return node.value", info) == 1

    def test_a_function_may_have_the_name_of_a_module(self) -> None:
        assert graded("def copy(x): return list(x)", {"tests": ["assert sum(copy([1, 2])) == 3"]}) == 1


_ALL = {"tests": ["assert all(map(lambda n: add(n, n) == 2 * n, range(3)))"]}


class TestEndOfIteration:
    def test_a_call_does_not_end_the_tests(self) -> None:
        assert graded(ADD, _ALL) == 1
        assert graded("def add(a, b): raise StopIteration", _ALL) == 0
        assert graded("class Stop(StopIteration): pass\ndef add(a, b): raise Stop", _ALL) == 0

    def test_iterators_of_programs_end(self) -> None:
        assert graded("def f():\n    yield 1\n    yield 2", {"tests": ["assert [n for n in f()] == [1, 2]"]}) == 1
        test = "try: f()\nexcept StopIteration: pass\nelse: assert False"
        assert graded("def f(): return next(iter([]))", {"tests": [test]}) == 1


@pytest.mark.parametrize(
    "info",
    [
        {"tests": ["assert f(" + "-" * 50_000 + "1) == 1"]},
        {"input_output": "[" * 200_000},
        {"inputs": ["[" * 200_000], "outputs": ["1"], "fn_name": "f"},
    ],
    ids=["an assertion", "all tests", "an argument"],
)
def test_tests_that_nest_too_deep_are_refused(info: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the tests of task 't' cannot be read"):
        graded(ADD, info)


def test_graders_continue_after_every_attack() -> None:
    attacks = [
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
        "while True: print('x' * 1000)",
        "import time\ntime.sleep(3600)",
        *CHEATS.values(),
    ]

    async def run() -> list[float]:
        async with GraderPool(RewardSpec.of("code"), workers=2, deadline_s=60) as pool:
            task = Task("t", (), info=CALLS)
            first = [pool.score(task, Response(attack, 1, "stop")) for attack in attacks]
            verdicts = await asyncio.gather(*first, pool.score(task, Response(ADD, 1, "stop")))
            assert pool.stats().restarts == 0
            return [verdict.reward for verdict in verdicts]

    *attacked, honest = asyncio.run(run())
    assert attacked == [0] * len(attacks)
    assert honest == 1


class TestReading:
    def test_an_assertion_about_a_call_becomes_a_call(self) -> None:
        assert assertion("assert f(1, [2], k={'a': (1,)}) == -3.5") == CallTest(
            "f", [1, [2]], -3.5, {"k": {"a": (1,)}}, True
        )
        assert assertion("assert sum(1, 2) == 3") == CallTest("sum", [1, 2], 3, {}, True)

    @pytest.mark.parametrize(
        "text",
        [
            "assert f(x) == 1",
            "assert f(1)",
            "assert f(1) != 2",
            "assert len(f(1)) == 2",
            "assert f(1) == f(2)",
            "x = f(1)",
        ],
    )
    def test_other_assertions_stay_code(self, text: str) -> None:
        assert isinstance(assertion(text), AssertTest)

    def test_names_that_the_program_must_define(self) -> None:
        text = "import math\nfrom os import path as p\ndef g(a): return f(a) + h\nassert g(math.pi) < len(p.sep) + k"
        assert set(free_names(text)) == {"f", "h", "k"}

    def test_inputs_and_outputs_of_other_data(self) -> None:
        found = code_tests.tests_of(
            Task("t", (), info={"input_output": '{"inputs": ["1\\n", ["2", "3"]], "outputs": ["1", ["4"]]}'})
        )
        assert found.tests == (InOut("1\n", "1"), InOut("2\n3", "4"))


def test_outputs_are_compared_without_spaces_at_the_ends() -> None:
    assert same_output("1\n2\n", "1  \n2\n\n")
    assert not same_output("1\n2\n", "1 2")
    assert not same_output("1 2", "1  2")


def test_values_are_compared_by_type_where_that_is_required() -> None:
    assert same([1, (2, 3)], (1, [2, 3]))
    assert not same([1, (2, 3)], (1, [2, 3]), exact=True)
    assert same({"a": [1.0]}, {"a": (1.0000001,)}, tolerance=1e-6)
    assert not same(1.0, 1.1)
    assert not same(float("nan"), float("nan"))


def test_wrong_values_of_any_kind_are_wrong() -> None:
    expected = [1, 1.5, 10**400, [1], {"a": 1}, {1}, "1", None, math.nan, -0.0]
    odd = [10**400, -(10**5000), math.inf, math.nan, Decimal("NaN"), Decimal("1e999999"), range(10**11), "\ud800", b"1"]
    for one, got, exact, tolerance in itertools.product(expected, odd, (False, True), (0.0, 1e-6)):
        assert same(one, got, tolerance, exact) is (one == got)


def test_whole_numbers_that_no_float_holds_may_be_near() -> None:
    assert same(10**400, 10**400 + 1, tolerance=1e-6)
    assert not same(10**400, 10**400 + 10**395, tolerance=1e-6)
    assert not same(1e300, 10**400, tolerance=1e-6)


def test_words_that_no_float_holds_are_the_same_only_as_text() -> None:
    assert same_output("1e400", "1e400", 1e-6)
    assert not same_output("1e400", "inf", 1e-6)
    assert not same_output("1e400", "1e999", 1e-6)


FORGED = {
    "a range that would be written out": '["value", {"keys": {"range": [0, 100000000000]}}]',
    "a tuple of a range": '["value", {"named": [[], {"range": [0, 100000000000]}]}]',
    "a number that cannot be compared": '["value", {"Decimal": "sNaN"}]',
    "a number that no float holds": '["value", {"int": "0x%s"}]' % ("f" * 1000),
    "an error that no text holds": '["error", {"int": "0x%s"}]' % ("f" * 9000),
    "deep lists": f'["value", {"[" * 9000}{"]" * 9000}]',
    "no answer": "[]",
}


@pytest.mark.parametrize("form", ["calls", "coded asserts"])
@pytest.mark.parametrize("answer", FORGED)
def test_answers_that_a_program_writes_by_hand_are_worth_nothing(answer: str, form: str) -> None:
    line = FORGED[answer].encode() + b"\n"
    writes = f"    try: os.write(fd, {line!r})\n    except OSError: pass\n"
    program = f"import os\nfor fd in range(3, 9):\n{writes}{ADD}"
    assert graded(program, FORMS[form], tolerance=1e-6) == 0


def test_a_program_too_long_to_be_read_for_its_names_is_still_run() -> None:
    info = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    assert graded("x = 1\n" * 50_000 + ADD, info) == 1


def test_the_name_is_known() -> None:
    RewardSpec.of("code").check()
    with pytest.raises(UserError, match="code"):
        RewardSpec.of("cod").check()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the data is not here")
@pytest.mark.parametrize("name", ["HumanEval", "mbpp"])
def test_reference_solutions_of_real_data_pass(name: str) -> None:
    import json

    failed = []
    for row in map(json.loads, (DATA / f"{name}.jsonl").read_text().splitlines()):
        program = row["code"] if name == "mbpp" else row["prompt"] + row["canonical_solution"]
        if graded(program, row) != 1:
            failed.append(row["task_id"])
    assert failed == []
