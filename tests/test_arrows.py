"""Imports go one way: a folder of `roll` may import itself and lower tiers, nothing else.

`cli → simulation → pipeline → {scheduler, rollout, workers, devices} → {algorithm, strategy, env, reward, weight_sync} →
{engine, model, cluster} → run → ledger → {process, sandbox, atomic_files} → data → config`. Imports inside functions
count; those for type checkers only do not. No module imports itself through others, not even for type checkers.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import roll

pytestmark = pytest.mark.lint

ROOT = Path(roll.__file__).parent

TIERS = [
    {"__init__", "api", "cli"},
    {"simulation"},
    {"pipeline"},
    {"scheduler"},
    {"rollout"},
    {"workers", "devices"},
    {"algorithm", "strategy", "env", "reward", "weight_sync"},
    {"engine", "model", "cluster"},
    {"run"},
    {"ledger"},
    {"atomic_files", "process", "sandbox"},
    {"data"},
    {"config"},
]
TIER = {name: number for number, names in enumerate(TIERS) for name in names}

WITHIN_A_TIER = {
    ("strategy", "algorithm"): "a trainer computes the loss it is sent",
    ("strategy", "weight_sync"): "weights leave a trainer and enter an engine",
    ("engine", "model"): "the engine's cache is one of the model's attention plans",
}
"""Arrows between folders of one tier, and why they are there."""


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str

    @property
    def source(self) -> str:
        """The folder, or the file beside the folders, that imports."""
        return self.file.relative_to(ROOT).with_suffix("").parts[0]

    @property
    def target(self) -> str:
        """The folder of `roll` that is imported; the whole name if it is none."""
        package, *rest = self.module.split(".")
        return rest[0] if package == "roll" and rest else self.module

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT.parent)}:{self.line} imports {self.module}"


def names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "imports are absolute"
    module = node.module or ""
    return [f"roll.{alias.name}" for alias in node.names] if module == "roll" else [module]


def imports_of(file: Path, node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for module in names(node):
            yield Import(file, node.lineno, module)
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = iter(node.orelse)
    for child in children:
        yield from imports_of(file, child)


@cache
def all_imports() -> list[Import]:
    files = sorted(ROOT.rglob("*.py"))
    return [found for file in files for found in imports_of(file, ast.parse(file.read_text(encoding="utf-8")))]


def inside() -> list[Import]:
    """Imports of one part of `roll` by another."""
    of_roll = [found for found in all_imports() if found.module.partition(".")[0] == "roll"]
    return [found for found in of_roll if found.source != found.target]


def test_every_part_of_the_library_has_a_tier() -> None:
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert parts <= set(TIER)


def test_the_library_does_not_use_its_own_front_door() -> None:
    assert [str(found) for found in inside() if found.target not in TIER] == []


def test_imports_go_down_only() -> None:
    up = [found for found in inside() if TIER.get(found.target, 99) < TIER[found.source]]
    assert [str(found) for found in up] == []


def test_imports_within_a_tier_are_listed_with_a_reason() -> None:
    level = [found for found in inside() if TIER.get(found.target) == TIER[found.source]]
    assert [str(found) for found in level if (found.source, found.target) not in WITHIN_A_TIER] == []
    assert {(found.source, found.target) for found in level} == set(WITHIN_A_TIER), "a listed arrow is used by nobody"
    assert not {(target, source) for source, target in WITHIN_A_TIER} & set(WITHIN_A_TIER)


def test_the_cluster_knows_no_role() -> None:
    assert {found.target for found in inside() if found.source == "cluster"} <= {"process", "data", "config"}


def test_ray_is_imported_in_the_cluster_only() -> None:
    users = [found for found in all_imports() if found.module.partition(".")[0] == "ray"]
    assert [str(found) for found in users if found.source != "cluster"] == []


def test_vllm_is_imported_in_one_file_only() -> None:
    users = {found.file for found in all_imports() if found.module.partition(".")[0] == "vllm"}
    assert len(users) <= 1
    assert all(file.is_relative_to(ROOT / "strategy" / "infer") for file in users)


MODULES = {".".join(("roll", *file.relative_to(ROOT).with_suffix("").parts)): file for file in ROOT.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): file for name, file in MODULES.items()}


def imports_of_module(node: ast.AST) -> Iterator[str]:
    """The modules of `roll` that are imported outside functions, also those for type checkers only.

    `from roll.x import y` imports `roll.x`, and `roll.x.y` if that is a module.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in MODULES)
        elif isinstance(child, ast.ImportFrom):
            members = (f"{child.module}.{alias.name}" for alias in child.names)
            yield from (name for name in (child.module, *members) if name in MODULES)
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_of_module(child)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for neighbour in sorted(graph.get(node, ())):
            if neighbour not in number:
                visit(neighbour)
            if neighbour in stack:
                lowest[node] = min(lowest[node], lowest[neighbour])
        if lowest[node] == number[node]:
            start = stack.index(node)
            components.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return [component for component in components if len(component) > 1]


def test_no_modules_import_each_other_not_even_for_types() -> None:
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}
    graph = {name: set(imports_of_module(tree)) - {name} for name, tree in trees.items()}
    assert sum(map(len, graph.values())) > len(graph), "the check sees imports"
    assert cycles(graph) == []


def test_the_check_sees_cycles() -> None:
    source = """
from roll.run import checkpoint
if TYPE_CHECKING:
    import roll.cli
class X:
    from roll.data.batch import Batch
def f():
    import roll.model
"""
    found = list(imports_of_module(ast.parse(source)))
    assert found == ["roll.run", "roll.run.checkpoint", "roll.cli", "roll.data.batch"]
    assert cycles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}) == [
        ["d", "e"],
        ["a", "b", "c"],
    ]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


HEAVY = {"torch", "transformers", "ray", "vllm", "matplotlib"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("roll", {*HEAVY, "numpy", "pydantic"}),
        ("roll.config.load", {*HEAVY, "numpy"}),
        ("roll.reward.grader_main", {*HEAVY, "numpy", "pydantic"}),
        ("roll.env.env_server", {*HEAVY, "numpy", "pydantic"}),
        ("roll.cluster", HEAVY),
        ("roll.cluster.ray_actor", {*HEAVY, "pydantic"} - {"ray"}),
        ("roll.cli", HEAVY),
    ],
)
def test_what_starts_often_or_first_imports_nothing_heavy(module: str, unwanted: set[str]) -> None:
    assert not unwanted & imported_by(f"import {module}")


def test_a_rollout_worker_is_made_without_torch() -> None:
    script = """
from roll.cluster import WorkerPlacement
from roll.config.schema import Config
from roll.rollout.worker import RolloutWorker
RolloutWorker(WorkerPlacement("rollout"), Config(model="tiny"), None)
"""
    assert not (HEAVY - {"transformers"}) & imported_by(script)


@pytest.mark.parametrize(
    ("theirs", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["by default", "a count of theirs", "a policy of theirs"],
)
def test_threads_that_wait_let_others_have_the_core_unless_users_say_otherwise(
    theirs: dict[str, str], spins: str | None
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names} | theirs
    script = "import sys, roll, os; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent, env=environment)
    assert done.stdout.split() == ["False", str(spins)]


def imported_by(script: str) -> set[str]:
    """The packages that a process has after it ran the script."""
    script += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return set(done.stdout.split())


def test_the_check_sees_imports_wherever_they_hide() -> None:
    source = """
import roll.run
if TYPE_CHECKING:
    import roll.cli
else:
    from roll import data
def f():
    try:
        from roll.engine.cache import SlotCache
    except ImportError:
        import vllm
"""
    file = ROOT / "model" / "x.py"
    found = list(imports_of(file, ast.parse(source)))
    assert [(each.source, each.target) for each in found] == [
        ("model", "run"),
        ("model", "data"),
        ("model", "engine"),
        ("model", "vllm"),
    ]
