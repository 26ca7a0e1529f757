"""No wait without a deadline: whatever can die or hang is waited for with a limit, or the line says what ends the wait.

A wait is bounded when it is inside `asyncio.timeout(...)`, has a timeout of its own, or awaits a coroutine function of
this package, whose own waits are looked at here too. Any other carries a comment `# waits: …` on its line or the one
above that says what ends it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import roll

pytestmark = pytest.mark.lint

ROOT = Path(roll.__file__).parent
MARK = "# waits:"

BOUNDED = {"sleep", "wait_for", "to_thread", "call", "call_rank", "call_each"}
"""Calls that end by themselves: `to_thread` runs functions that are looked at here; calls on a role have deadlines."""
JOINING = {"gather", "shield", "ensure_future", "create_task"}
"""They wait as long as what they are given."""
BLOCKING = {
    "subprocess.run": "timeout",
    "subprocess.check_output": "timeout",
    "subprocess.check_call": "timeout",
    "ray.get": "timeout",
    "ray.wait": "timeout",
    "socket.create_connection": "timeout",
}
BLOCKING_METHODS = {"wait", "join", "acquire", "get", "communicate", "recv"}
"""Without an argument these block for as long as it takes."""


@cache
def trees() -> list[tuple[Path, list[str], ast.Module]]:
    """All modules but the simulation's, whose clock raises `Deadlock` when all wait."""
    found = []
    for file in sorted(file for file in ROOT.rglob("*.py") if not file.is_relative_to(ROOT / "simulation")):
        text = file.read_text()
        found.append((file, text.splitlines(), ast.parse(text)))
    return found


@cache
def own_coroutines() -> frozenset[str]:
    """Names of all coroutine functions of the package."""
    return frozenset(
        node.name for _, _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)
    )


def called(node: ast.AST) -> str:
    """The last name of what is called."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def has_timeout(call: ast.Call) -> bool:
    return any(keyword.arg in ("timeout", "deadline_s") for keyword in call.keywords)


def limits(node: ast.AST) -> bool:
    """Whether a `with` block ends what is inside it in time."""
    items = node.items if isinstance(node, ast.AsyncWith | ast.With) else []
    contexts = [item.context_expr for item in items]
    return any(
        called(context) in ("timeout", "timeout_at") or getattr(context, "id", "") == "limit" for context in contexts
    )


Names = dict[str, ast.expr]
"""What the names of a function stand for."""


def is_bounded(value: ast.expr, names: Names) -> bool:
    """Whether what is awaited ends by itself, or is a coroutine of this package."""
    if isinstance(value, ast.Name) and value.id in names:
        return is_bounded(_element(names[value.id]), {n: v for n, v in names.items() if n != value.id})
    if isinstance(value, ast.IfExp):
        return is_bounded(value.body, names) and is_bounded(value.orelse, names)
    if not isinstance(value, ast.Call):
        return False
    name = called(value)
    if name in JOINING:
        inner = [arg.value if isinstance(arg, ast.Starred) else arg for arg in value.args]
        return all(is_bounded(_element(arg), names) for arg in inner)
    if name == "wait" and isinstance(value.func, ast.Attribute) and getattr(value.func.value, "id", "") == "asyncio":
        return has_timeout(value)
    return name in BOUNDED or (name in own_coroutines() and name not in ("wait", "get", "join", "acquire"))


def _element(node: ast.expr) -> ast.expr:
    """What a comprehension makes."""
    return node.elt if isinstance(node, ast.GeneratorExp | ast.ListComp) else node


def assigned(function: ast.AST) -> Names:
    """Names that are assigned once in a function, and what they are."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def waits(node: ast.AST, limited: bool, names: Names, awaited: bool = False) -> Iterator[ast.expr]:
    """Waits under a node that nothing bounds."""
    if isinstance(node, ast.Await):
        if not limited and not is_bounded(node.value, names):
            yield node
        inside = limited or called(node.value) == "wait_for"
        for child in ast.iter_child_nodes(node):
            yield from waits(child, inside, names, awaited=True)
        return
    if isinstance(node, ast.Call) and not awaited and not limited:
        required = BLOCKING.get(ast.unparse(node.func))
        bare = isinstance(node.func, ast.Attribute) and node.func.attr in BLOCKING_METHODS
        if (required and not has_timeout(node)) or (bare and not node.args and not node.keywords):
            yield node
    inside = limited or limits(node)
    for child in ast.iter_child_nodes(node):
        starts_anew = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        known = assigned(child) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else names
        yield from waits(child, inside and not starts_anew, known)


def unbounded(text: str, tree: ast.Module) -> list[int]:
    lines = text.splitlines()
    numbers = sorted({node.lineno for node in waits(tree, False, {})})
    return [n for n in numbers if MARK not in lines[n - 1] and MARK not in lines[max(n - 2, 0)]]


def test_no_wait_is_without_a_deadline() -> None:
    found = [
        f"{file.relative_to(ROOT.parent)}:{number}: {lines[number - 1].strip()}"
        for file, lines, tree in trees()
        for number in unbounded("\n".join(lines), tree)
    ]
    assert not found, "waits that nothing bounds (say with `# waits: …` what ends one):\n" + "\n".join(found)


def test_the_lint_sees_what_it_should() -> None:
    seen = {
        "async def f(e): await e.wait()": True,
        "async def f(e):\n async with asyncio.timeout(1):\n  await e.wait()": False,
        "async def f(e): await asyncio.wait([e])": True,
        "async def f(e): await asyncio.wait([e], timeout=2)": False,
        "async def f(e): await e": True,
        "async def f(e): await e  # waits: it is set at once": False,
        "async def f(c): await asyncio.gather(*(c.call_rank(r, M) for r in c))": False,
        "async def f(es): await asyncio.gather(*es)": True,
        "async def f(c):\n es = [c.call(M) for _ in c]\n await asyncio.gather(*es)": False,
        "async def f(e): await asyncio.wait_for(e.wait(), 1)": False,
        "def f(t): t.join()": True,
        "def f(t): ','.join(t)": False,
        "def f(): ray.get(x)": True,
        "def f(): ray.get(x, timeout=3)": False,
        "def f(): subprocess.run(x)": True,
        "async def f(e):\n async with asyncio.timeout(1):\n  async def g(): await e.wait()": True,
    }
    for text, wrong in seen.items():
        assert bool(unbounded(text, ast.parse(text))) is wrong, text
