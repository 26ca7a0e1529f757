"""Reads a task's tests: what a program has to do to be right.

A task carries tests in its `info`, in one of these forms (docs/guides/sandbox.md):

    tests: [{stdin: "2 3\\n", stdout: "5\\n"}, {call: add, args: [2, 3], result: 5}, {assert: "assert add(2, 3) == 5"}]
    test_list: ["assert add(2, 3) == 5"], test_setup_code: ""          as in MBPP, or test_imports: ["import math"]
    test: "def check(candidate): …", entry_point: add, prompt: "…"     as in HumanEval
    inputs: […], outputs: […], fn_name: add                            as in APPS and TACO, also as `input_output`

With `fn_name` the function may be a method of a class `Solution`, an output may be wrapped in a list of one, and names
that sites with such tasks import for a program (`_SITE_NAMES`) need not be imported.

An assertion that compares a call with a literal becomes a call, so that the comparison happens outside the sandbox.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeAlias

from roll.data.task import Task


@dataclass(frozen=True)
class InOut:
    """The program, given that input, must write that output."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    """A function, called with these arguments, must return that result."""

    name: str
    arguments: Sequence[Any]
    result: Any
    keywords: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    """Whether a tuple differs from a list, as in Python. Results that were written as JSON have no tuples."""
    apps_style: bool = False
    """Whether the function may be a method of a class `Solution`, and the result may be wrapped in a list of one."""


@dataclass(frozen=True)
class AssertTest:
    """Code that must run without an error, and the names in it that the program must define."""

    text: str
    names: tuple[str, ...]


CodeTest: TypeAlias = InOut | CallTest | AssertTest


@dataclass(frozen=True)
class CodeTests:
    """The tests of a program."""

    tests: tuple[CodeTest, ...]
    setup: str = ""
    """Code before every assertion."""
    prefix: str = ""
    """Code before the program."""
    entry_point: str = ""
    """The function that the prefix begins and the program continues, if the tests work like that."""
    site_imports: bool = False
    """Whether names that sites for such tasks import for a program (`List`, `deque`, `math`) are available."""

    def with_prefix(self, source: str) -> str:
        """The program with the code before it. A program that defines the entry point itself gets only the imports and
        helpers before the entry point."""
        if self.site_imports:
            return _prepend(_imports(source), source)
        if not self.entry_point or not _defines(source, self.entry_point):
            return _prepend(self.prefix, source)
        return _prepend(self.helpers, source)

    @property
    def helpers(self) -> str:
        """The part of the prefix before the entry point."""
        begun = self.entry_point and re.search(
            rf"^(?:async[ \t]+)?def[ \t]+{re.escape(self.entry_point)}\b", self.prefix, re.MULTILINE
        )
        return self.prefix[: begun.start()] if begun else self.prefix


_SITE_NAMES: Mapping[str, str] = {
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cmp_to_key lru_cache partial reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations combinations_with_replacement count cycle groupby islice permutations "
    "product repeat starmap takewhile zip_longest",
    "math": "ceil comb cos exp factorial floor gcd hypot inf isqrt log log10 log2 perm pi sin sqrt tan",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List NamedTuple Optional "
    "Sequence Set Tuple TypeVar Union",
}
"""Names that a program may use without importing them if its site does so, by module."""
_MODULES = {*_SITE_NAMES, "copy", "datetime", "decimal", "fractions", "operator", "random", "re", "sys", "time"}
_IMPORTS = {name: f"import {name}" for name in sorted(_MODULES)} | {
    name: f"from {module} import {name}" for module, names in _SITE_NAMES.items() for name in names.split()
}
_MAX_PARSED_CHARS = 1 << 17
"""Longer programs are not parsed for the names they use: parsing takes about 300 bytes of memory per character."""
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[ \t][^\n]*\n?", re.MULTILINE)


def _imports(source: str) -> str:
    """Imports of the names that a program uses, does not define, and may take for granted."""
    if len(source) > _MAX_PARSED_CHARS:
        return ""
    try:
        names = free_names(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return "\n".join(_IMPORTS[name] for name in names if name in _IMPORTS)


def _prepend(prefix: str, source: str) -> str:
    """A program after other lines; its `__future__` imports are moved to the top."""
    if not prefix:
        return source
    return "".join([*_FUTURE.findall(source), prefix, "\n", _FUTURE.sub("", source)])


def tests_of(task: Task) -> CodeTests:
    """The task's tests; raises `ValueError` if it has none or they cannot be read."""
    info = task.info
    try:
        found = _tests_of(info)
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the tests of task {task.id!r} cannot be read: {type(error).__name__}: {error}") from error
    if found is None or not found.tests:
        known = "tests, test_list, test with entry_point, inputs with outputs, or input_output"
        raise ValueError(f"task {task.id!r} has no tests: its info needs {known}")
    return found


def _tests_of(info: Mapping[str, Any]) -> CodeTests | None:
    if "tests" in info:
        setup = str(info.get("setup") or "")
        tests = tuple(_parse_test(test, setup) for test in _sequence(info["tests"]))
        return _with_trusted_names(CodeTests(tests, setup, str(info.get("prefix") or "")))
    if "test_list" in info:
        setup = "\n".join(filter(None, (_text(info.get("test_imports") or ""), info.get("test_setup_code"))))
        return _with_trusted_names(
            CodeTests(tuple(assertion(text, setup) for text in _sequence(info["test_list"])), setup)
        )
    if "test" in info and "entry_point" in info:
        text = f"{info['test']}\n\ncheck({info['entry_point']})"
        test = AssertTest(text, free_names(text))
        return _with_trusted_names(CodeTests((test,), "", str(info.get("prompt") or ""), str(info["entry_point"])))
    if "input_output" in info:
        pairs = info["input_output"]
        return _pairs(_loads(pairs) if isinstance(pairs, str) else pairs)
    return _pairs(info) if "inputs" in info and "outputs" in info else None


def assertion(text: str, setup: str = "") -> CallTest | AssertTest:
    """One assertion: as a call if it compares one with a literal, so that the comparison happens outside the sandbox."""
    if not setup.strip() and (call := _as_call(text)) is not None:
        return call
    return AssertTest(text, free_names(f"{setup}\n{text}"))


def _with_trusted_names(tests: CodeTests) -> CodeTests:
    """The same, with modules and prefix helpers of the assertions' own: a program could redefine them to make every
    answer right. Helpers with classes stay the program's, because the assertions get their objects."""
    texts = [test.text for test in tests.tests if isinstance(test, AssertTest)]
    used_names = {name for test in tests.tests if isinstance(test, AssertTest) for name in test.names}
    trusted_helpers = _defined_by(tests.helpers) & used_names - {tests.entry_point} if used_names else set()
    setup = [tests.helpers] if trusted_helpers else []
    setup += [
        f"import {name}"
        for name in sorted(used_names & _MODULES - trusted_helpers)
        if all(_only_module(name, t) for t in texts)
    ]
    if not setup:
        return tests
    full_setup = "\n".join([*setup, tests.setup])
    named = tuple(
        replace(test, names=free_names(f"{full_setup}\n{test.text}")) if isinstance(test, AssertTest) else test
        for test in tests.tests
    )
    return replace(tests, tests=named, setup=full_setup)


def _defined_by(helpers: str) -> set[str]:
    """Names of the functions, modules and variables that some lines define; none if they have classes or are not
    Python."""
    try:
        body = ast.parse(helpers).body
    except SyntaxError:
        return set()
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef):
            return set()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _only_module(name: str, text: str) -> bool:
    """Whether code uses a name only for its attributes, as it does with a module."""
    tree = ast.parse(text)
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return all(id(node) in owners for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


def free_names(text: str) -> tuple[str, ...]:
    """Names that code uses, and that neither it nor Python defines."""
    bound: set[str] = set()
    used: dict[str, None] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used[node.id] = None
            else:
                bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return tuple(name for name in used if name not in bound and not hasattr(builtins, name))


def _as_call(text: str) -> CallTest | None:
    try:
        body = ast.parse(text).body
    except (SyntaxError, RecursionError, MemoryError):
        return None
    if len(body) != 1 or not isinstance(body[0], ast.Assert) or not isinstance(body[0].test, ast.Compare):
        return None
    compare = body[0].test
    call = compare.left
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq) or not isinstance(call, ast.Call):
        return None
    if not isinstance(call.func, ast.Name) or any(keyword.arg is None for keyword in call.keywords):
        return None  # a program may define a function with the name of a builtin: nobody tests Python itself on literals
    try:
        arguments = [ast.literal_eval(argument) for argument in call.args]
        keywords = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
        result = ast.literal_eval(compare.comparators[0])
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return CallTest(call.func.id, arguments, result, keywords, exact=True)


def _parse_test(test: Any, setup: str) -> CodeTest:
    if isinstance(test, str):
        return assertion(test, setup)
    if "assert" in test:
        return assertion(str(test["assert"]), setup)
    if "call" in test:
        return CallTest(str(test["call"]), _sequence(test.get("args", [])), test["result"], test.get("kwargs") or {})
    return InOut(str(test["stdin"]), str(test["stdout"]))


def _pairs(info: Mapping[str, Any]) -> CodeTests:
    inputs, outputs = _sequence(info["inputs"]), _sequence(info["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    name = info.get("fn_name")
    pairs = list(zip(inputs, outputs, strict=True))
    if name:
        calls = [(_arguments(given), _result(given, result)) for given, result in pairs]
        tests = (CallTest(str(name), given, result, apps_style=True) for given, result in calls)
        return CodeTests(tuple(tests), site_imports=True)
    return CodeTests(tuple(InOut(_text(given), _text(result)) for given, result in pairs))


def _arguments(given: Any) -> Sequence[Any]:
    """Some data has the arguments as JSON, one per line."""
    return [_loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else _sequence(given)


def _result(given: Any, result: Any) -> Any:
    return _loads(result) if isinstance(given, str) and isinstance(result, str) else result


def _loads(text: str) -> Any:
    """Parses JSON with integers of any length: Python's parser takes only some thousand digits."""
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        return int(Decimal(digits))


def _defines(source: str, name: str) -> bool:
    """Whether a program defines a function, judged without parsing: a program that begins indented continues another's
    body."""
    lines = [line for line in source.splitlines() if line.strip()]
    if not lines or lines[0][0] in " \t":
        return False
    return bool(
        re.search(rf"^(?:(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b|{re.escape(name)}[ \t]*=)", source, re.MULTILINE)
    )


def _text(value: Any) -> str:
    """Some data has the lines of a text as a list."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _sequence(value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        if hasattr(value, "tolist"):  # of NumPy, as Parquet files give them
            return list(value.tolist())
        raise TypeError(f"{value!r} is not a list")
    return value
