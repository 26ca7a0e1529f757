"""The reward `code` passes what is right in Python, however the tests look at it."""

from __future__ import annotations

from typing import Any

import pytest

from roll.data.task import Response, Task
from roll.reward.code import Code
from roll.reward.code_tests import _IMPORTS
from roll.sandbox import Limits, best
from roll.sandbox.calls import check_all

ADD = "def add(a, b):\n    return a + b\n"
CHECK = {"test": "def check(candidate):\n    assert candidate(10, -4) == 6", "entry_point": "add"}

DATACLASS = """
from dataclasses import dataclass
@dataclass
class P:
    x: int
    y: int = 1
def f(x): return P(x).x + P(x).y
"""
NAMED_TUPLE = """
from typing import NamedTuple
class P(NamedTuple):
    x: int
def f(x): return P(x).x + 1
def make(): return P(3)
def x_of(p): return p.x
"""
ENUM = """
import enum
class C(enum.Enum):
    A = 1
class T(str, enum.Enum):
    A = "a"
def f(x): return x + C.A.value
def first(): return C.A
def text(): return T.A
"""
PICKLE = """
import pickle
class P:
    x = 1
def f(x): return pickle.loads(pickle.dumps(P())).x + x
"""
CLASSES = {"dataclass": DATACLASS, "named tuple": NAMED_TUPLE, "enum": ENUM, "pickle": PICKLE}

POINT = """
class P:
    def __init__(self, x): self.x, self._y = x, 1
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __add__(self, other): return P(self.x + other.x)
    def __hash__(self): return hash(self.x)
    def __len__(self): return self.x
    def __getitem__(self, key): return (self.x, key)
    def __setitem__(self, key, value): self.x = value
    def __iter__(self): return iter(range(self.x))
    def __bool__(self): return self.x > 1
    def __str__(self): return f"P {self.x}"
    def __float__(self): return self.x / 2
def same(p): return p
"""
ERRORS = """
class Base(Exception): pass
class Bad(Base):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
class Odd(KeyError):
    def __str__(self): return "odd"
def bad(): raise Bad(3)
def odd(): raise Odd(1)
def key(): raise KeyError("k")
def unicode(): raise UnicodeDecodeError("utf-8", b"", 0, 1, "x")
def catch(kind):
    try: raise Bad(1)
    except kind: return True
"""
COUNT = "def count():\n    n = 0\n    while True:\n        yield n\n        n += 1"

RIGHT: dict[str, tuple[str, str]] = {
    "generator": ("def f(n): return (i for i in range(n))", "assert list(f(3)) == [0, 1, 2]"),
    "generator, partly": (COUNT, "g = count()\nassert next(g) == 0\nassert [next(g), next(g)] == [1, 2]"),
    "map": ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2']"),
    "filter": ("def f(x): return filter(None, x)", "assert sorted(f([0, 2, 1])) == [1, 2]"),
    "zip": ("def f(x): return zip(x, x)", "assert dict(f([1])) == {1: 1}"),
    "iterators in a list": ("def f(): return [iter([1]), iter([2])]", "assert [list(i) for i in f()] == [[1], [2]]"),
    "range": ("def f(x): return range(x)", "assert f(2) == range(2)"),
    "keys": ("def f(x): return x.keys()", "assert list(f({1: 2})) == [1]"),
    "keys, called": ("def f(x): return x.keys()", "assert f({1: 2}) == {1}"),
    "counter": (
        "from collections import Counter as f",
        "assert f('aab')['z'] == 0 and f('aa').most_common(1) == [('a', 2)]",
    ),
    "defaultdict": ("from collections import defaultdict\ndef f(): return defaultdict(list)", "assert f()[1] == []"),
    "dates": (
        "import datetime\ndef f(d): return d + datetime.timedelta(1)",
        "from datetime import date\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)",
    ),
    "named tuple": (NAMED_TUPLE, "assert make().x == x_of(make()) == 3 and make() == (3,)"),
    "dataclass": (DATACLASS, "assert P(3).x == 3 and P(3) == P(3, 1) and P(3) != P(4)"),
    "enum": (ENUM, "assert first() is C.A and first() == C['A'] and [c.name for c in C] == ['A'] and first() in (C.A,)"),
    "text that is an enum": (ENUM, "assert len(text()) == 1 and text() == 'a'"),
    "built-in functions": (
        "def f(g, x): return g(x)",
        "assert f(abs, -2) == 2 and f(len, 'ab') == 2 and f(int, '3') == 3",
    ),
    "iterator given": ("def f(x): return sum(x)", "assert f(n * n for n in range(4)) == 14 and f(iter([1])) == 1"),
    "variable": (
        "X = 3\nY = [1]\ndef up():\n    global X\n    X += 1",
        "assert X == 3 and Y == [1]\nup()\nassert X == 4",
    ),
    "operators": (POINT, "assert P(1) == P(1) and P(1) != P(2) and P(1) < P(2) and P(1) + P(2) == P(3)"),
    "hashes": (POINT, "assert len({P(1), P(1), P(2)}) == 2"),
    "items": (POINT, "p = P(2)\nassert (len(p), p[1], list(p)) == (2, (2, 1), [0, 1])\np[0] = 5\nassert p.x == 5"),
    "slices": (POINT, "assert P(2)[1:] == (2, slice(1, None))"),
    "conversions": (POINT, "assert P(2) and not P(1) and str(P(2)) == f'{P(2)}' == 'P 2' and float(P(3)) == 1.5"),
    "attributes": (POINT, "assert P(1)._y == 1 and same.__name__ == 'same'"),
    "classes": (POINT, "assert isinstance(P(1), P) and not isinstance(3, P)\np = P(1)\nassert same(p) is p"),
    "errors": (ERRORS, "try: bad()\nexcept Bad as e: assert e.code == 3 and str(e) == 'code 3'\nelse: assert False"),
    "errors of a base": (ERRORS, "try: bad()\nexcept Base as e: assert isinstance(e, Bad)\nelse: assert False"),
    "errors with a text": (ERRORS, "try: odd()\nexcept KeyError as e: assert str(e) == 'odd'\nelse: assert False"),
    "errors of Python": (ERRORS, "try: key()\nexcept KeyError as e: assert e.args == ('k',)\nelse: assert False"),
    "errors with more": (ERRORS, "try: unicode()\nexcept ValueError as e: assert e.reason == 'x'\nelse: assert False"),
    "error classes given": (ERRORS, "assert catch(Bad) and catch(Base) and catch(Exception)"),
    "list changed": ("def f(l): l.sort()", "l = m = [2, 1]\nf(l)\nassert m == [1, 2]"),
    "rows changed": (
        "def f(g): g[0][0] = 7; g.append([])",
        "row = [1]\ng = [row]\nf(g)\nassert row == [7] and g == [row, []]",
    ),
    "others changed": (
        "def f(d, s, *, b): d['a'] = 1; s.add(2); b.append(3)",
        "d, s, b = {'b': 2}, set(), bytearray()\nf(d, s, b=b)\nassert (d, s, b) == ({'b': 2, 'a': 1}, {2}, b'\\x03')",
    ),
    "in a class": (
        "def f(): return 3",
        "class T:\n    x = f()\n    def g(self): return f()\nassert T.x == T().g() == 3",
    ),
}


def graded(program: str, info: dict[str, Any], seconds: float = 20.0) -> float:
    code = Code(seconds=seconds, total_s=60.0)
    return code(Task("t", (), info=info), Response(f"```python\n{program}\n```", 1, "stop"))["reward"]


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_in_python_passes(case: str) -> None:
    program, test = RIGHT[case]
    names: dict[str, Any] = {"__name__": __name__}
    exec(program, names)
    exec(test, names)
    assert graded(program, {"tests": [test]}) == 1


@pytest.mark.parametrize("classes", CLASSES)
def test_programs_that_are_called_have_classes_of_all_kinds(classes: str) -> None:
    assert graded(CLASSES[classes], {"test_list": ["assert f(3) == 4"]}) == 1


def test_tests_may_have_classes_of_their_own() -> None:
    test = "from dataclasses import dataclass\n@dataclass\nclass Case:\n    a: int\n    b: int\ncase = Case(1, 2)\n"
    assert graded(ADD, {"tests": [test + "assert add(case.a, case.b) == 3"]}) == 1


def test_an_endless_iterator_costs_a_limit() -> None:
    assert graded(COUNT, {"tests": ["assert list(count())"]}, seconds=0.5) == 0


def test_functions_of_the_tests_stay_with_them_and_the_reason_says_so() -> None:
    tests = ["f(lambda: 1)", "try: f(lambda: 1)\nexcept TypeError: pass", "import itertools\nf(itertools.count())"]
    failures, _ = check_all(best(), "def f(g): return g()", "", tests, ["f"], Limits(wall_s=20, cpu_s=20))
    assert "<lambda> cannot be sent to the program" in failures[0]
    assert "<lambda> cannot be sent to the program" in failures[1]
    assert "an iterator of 100000 items or more cannot be sent" in failures[2]


def test_a_function_may_be_a_method_of_the_class_solution() -> None:
    program = "class Solution:\n    def add(self, a, b):\n        return a + b"
    info = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
    assert graded(program, info) == 1
    assert graded(program.replace("+", "-"), info) == 0
    assert graded(f"{program}\ndef add(a, b): return 0", info) == 0
    assert graded(program, {"test_list": ["assert add(1, 2) == 3"]}) == 0


def test_an_output_may_stand_in_a_list_of_one() -> None:
    assert graded(ADD, {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}) == 1
    assert graded(ADD, {"inputs": [[1, 2]], "outputs": [[4]], "fn_name": "add"}) == 0
    assert graded(ADD, {"inputs": [[1, 2]], "outputs": [[3, 3]], "fn_name": "add"}) == 0
    assert graded(ADD, {"inputs": [[[1], [2]]], "outputs": [[1, 2]], "fn_name": "add"}) == 1


def test_what_a_site_imports_for_a_function_need_not_be_imported() -> None:
    body = "        return heappop(deque([nums]).popleft()) + math.floor(sqrt(0)) + bisect.bisect_left([], 1)"
    program = f"class Solution:\n    def least(self, nums: List[int]) -> Optional[int]:\n{body}"
    info = {"inputs": [[[2, 7, 11]], [[3, 4]]], "outputs": [2, 3], "fn_name": "least"}
    assert graded(program, info) == 1
    assert graded(f"from __future__ import annotations\n{program}", info) == 1
    assert graded(f"def sqrt(x): return 1\n{program}", info) == 0, "its own comes first"
    assert graded(f"{program} + unknown", info) == 0
    assert graded("print(math.floor(1.5))", {"inputs": [""], "outputs": ["1"]}) == 0, "a program imports for itself"


def test_names_of_a_site_are_there() -> None:
    for line in _IMPORTS.values():
        exec(line)


def test_imports_of_the_future_come_first() -> None:
    test = "def check(candidate):\n    assert candidate(1) == 2"
    info = {"test": test, "entry_point": "f", "prompt": "import math\n\ndef f(x):\n"}
    assert graded("from __future__ import annotations\ndef f(x: Later):\n    return x + math.floor(1)", info) == 1


def test_tests_may_bring_imports_and_numbers_may_be_huge() -> None:
    info = {"test_imports": ["import math"], "test_list": ["assert math.isclose(area(1), math.pi)"]}
    assert graded("def area(r): return 3.141592653589793 * r * r", info) == 1
    assert graded("def area(r): return 3 * r * r", info) == 0
    pairs = '{"fn_name": "f", "inputs": [[1]], "outputs": [1' + "0" * 5000 + "]}"
    assert graded("def f(x): return 10 ** 5000", {"input_output": pairs}) == 1
    assert graded("def f(x): return 10 ** 4999", {"input_output": pairs}) == 0


def test_arguments_may_be_written_as_json_one_a_line() -> None:
    assert graded(ADD, {"inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"], "fn_name": "add"}) == 1


@pytest.mark.parametrize("docstring", ["", '    """adds"""\n'])
def test_an_answer_goes_on_with_the_prompt_or_holds_it_all(docstring: str) -> None:
    prompt = f"from math import floor\n\ndef half(a): return a / 2\n\ndef add(a, b):\n{docstring}"
    whole = "def add(a, b):\n    return floor(2 * half(a + b))"
    for answer in ("    return floor(a + b)", whole, "add = lambda a, b: a + b"):
        assert graded(answer, CHECK | {"prompt": prompt}) == 1
    assert graded("    return a - b", CHECK | {"prompt": prompt}) == 0


AGREES = """
class Same:
    def yes(self, *other): return True
    def itself(self, *other): return self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __round__ = __getitem__ = itself
    def __hash__(self): return 138985
def add(a, b): return Same()
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3 or False",
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert abs(3 - add(1, 2)) < 1e-6",
        "assert round(add(1, 2), 2) == 3",
        "assert add(1, 2) < 4",
        "assert 2 <= add(1, 2)",
        "assert add(1, 2) in (3, 4)",
        "assert add(1, 2) in {138985}",
        "assert [add(1, 2)] == [3]",
        "assert not add(1, 2) != 3",
    ],
)
def test_the_program_is_not_asked_whether_it_gave_what_is_expected(test: str) -> None:
    assert graded(AGREES, {"tests": [test]}) == 0
    assert graded(ADD, {"tests": [test]}) == (0 if "138985" in test else 1)


def test_what_an_object_holds_is_found_among_its_items() -> None:
    test = {"tests": ["assert 3 in made()"]}
    assert graded("class M:\n    def __iter__(self): return iter([1, 3])\nmade = M", test) == 1
    assert (
        graded(
            "class M:\n    def __iter__(self): return iter([1])\n    def __contains__(self, x): return True\nmade = M",
            test,
        )
        == 0
    )
