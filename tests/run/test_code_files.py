"""Which files the user's code consists of, and digests of code that are the same in every process."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.run.code_digest import digest_of, file_of, source_of
from roll.run.code_files import distribution_of, files_named_by, files_of_code, is_user_code, loaded_files, packages_of


def project(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / (name.replace("__slash__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def names(files: list[Path], folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in files]


def test_imports_are_followed_wherever_they_stand(tmp_path: Path) -> None:
    project(
        tmp_path,
        near="import helper, json, numpy\ndef f():\n    from pkg.inner import deep\n    import later",
        helper="from importlib import import_module\nrules = import_module('rules')",
        later="",
        rules="",
        unused="",
        pkg__slash____init__="",
        pkg__slash__inner__slash____init__="from . import sibling\nfrom ..top import thing",
        pkg__slash__inner__slash__deep="",
        pkg__slash__inner__slash__sibling="",
        pkg__slash__top="thing = 1",
        pkg__slash__unused="",
    )
    assert names(files_of_code([tmp_path / "near.py"], [tmp_path]), tmp_path) == [
        "helper.py",
        "later.py",
        "near.py",
        "pkg/__init__.py",
        "pkg/inner/__init__.py",
        "pkg/inner/deep.py",
        "pkg/inner/sibling.py",
        "pkg/top.py",
        "rules.py",
    ]


def test_a_file_that_is_no_python_or_imports_itself_is_no_trouble(tmp_path: Path) -> None:
    project(tmp_path, a="import b", b="import a", c="def (:")
    assert names(files_of_code([tmp_path / "a.py"], [tmp_path]), tmp_path) == ["a.py", "b.py"]
    assert names(files_of_code([tmp_path / "c.py"], [tmp_path]), tmp_path) == ["c.py"]


@pytest.mark.parametrize("inside", [".venv/lib/site-packages", "node_modules", ".git", "venv/lib", "__pycache__"])
def test_what_is_installed_is_never_the_users(tmp_path: Path, inside: str) -> None:
    project(tmp_path / inside, thing="")
    project(tmp_path, near="import thing")
    folders = [tmp_path, tmp_path / inside]
    assert names(files_of_code([tmp_path / "near.py"], folders), tmp_path) == ["near.py"]
    assert not is_user_code(Path(os.__file__), [Path("/")])
    assert not is_user_code(Path(pytest.__file__), [Path("/")])


def test_a_module_whose_name_is_made_at_run_time_is_found_once_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, dynamic_near="import importlib\nimportlib.import_module('dynamic_' + 'rules')", dynamic_rules="")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    assert names(files_of_code([tmp_path / "dynamic_near.py"], [tmp_path]), tmp_path) == ["dynamic_near.py"]
    __import__("dynamic_near")
    assert names(loaded_files([tmp_path]), tmp_path) == ["dynamic_near.py", "dynamic_rules.py"]


def test_versions_of_packages_that_the_code_imports(tmp_path: Path) -> None:
    project(tmp_path, near="import yaml, json, helper\nfrom numpy import array", helper="")
    found = packages_of([tmp_path / "near.py", tmp_path / "helper.py"])
    assert {name.lower() for name in found} == {"numpy", "pyyaml"}
    assert distribution_of("numpy.linalg") == ("numpy", found["numpy"])
    assert distribution_of("no_such_package_at_all") is None


SCRIPT = """
import functools
LIMIT = {limit}
RULES = {{"b": 2, "a": 1, "c": frozenset(["x", "y", "z", "w"])}}

def inner(x):
    {comment}
    return min(x, LIMIT)

def outer(task, response, *, width={width}):
    return inner(width) + RULES["a"]

class Rule:
    bonus = {bonus}
    def __init__(self, n): self.n = n
    def __call__(self, task, response): return self.n + self.bonus

made = lambda task, response: outer(task, response) {plus}
def closed(n):
    def within(task, response): return n
    return within
from roll.run.code_digest import digest_of
for value in (outer, Rule({n}), made, closed({n}), functools.partial(outer, width={n}), Rule({n}).__call__):
    print(digest_of(value))
"""
HASH_SEEDS = itertools.count(1)
USUAL = {"limit": 5, "comment": "", "width": 3, "bonus": 0.5, "plus": "+ 1", "n": 7}


def digests(folder: Path, stdin: bool = False, **changes: object) -> list[str]:
    text = SCRIPT.format(**{**USUAL, **changes})
    file = folder / "script.py"
    file.write_text(text)
    environment = {**os.environ, "PYTHONHASHSEED": str(next(HASH_SEEDS))}  # another order of sets in each process
    command = [sys.executable, *(["-"] if stdin else [str(file)])]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


@pytest.mark.parametrize("stdin", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_digest_is_the_same_in_every_process_and_another_for_other_code(tmp_path: Path, stdin: bool) -> None:
    """The rows of digests: a function, an object, a lambda, a closure, a partial, a method."""
    usual = digests(tmp_path, stdin)
    assert len(set(usual)) == 6
    assert digests(tmp_path, stdin) == usual
    assert digests(tmp_path, stdin, comment="# a comment changes nothing") == usual
    changed = {
        "limit": [True, False, True, False, True, False],
        "width": [True, False, True, False, True, False],
        "bonus": [False, True, False, False, False, True],
        "plus": [False, False, True, False, False, False],
        "n": [False, True, False, True, True, True],
    }
    for name, expected in changed.items():
        now = digests(tmp_path, stdin, **{name: "" if name == "plus" else 11})
        assert [a != b for a, b in zip(usual, now, strict=True)] == expected, name


def test_digests_of_what_refers_to_itself_end() -> None:
    def recursive(n: int) -> Any:
        return recursive(n - 1) if n else []

    circle: list[Any] = []
    circle.append(circle)
    assert digest_of(recursive) == digest_of(recursive)
    assert digest_of(circle) == digest_of(circle)


def test_the_source_and_the_file_of_code() -> None:
    wrapped: Callable[..., Any] = functools.partial(names, folder=Path())
    assert source_of(names).startswith("def names(")
    assert source_of(wrapped) == source_of(names)
    assert file_of(names) == file_of(wrapped) == Path(__file__).resolve()
    assert source_of(len) == ""
    assert file_of(len) is None
    assert file_of(os.path.join) is None
    nowhere: dict[str, Any] = {}
    exec("def f(task, response): return 1", nowhere)
    assert (source_of(nowhere["f"]), file_of(nowhere["f"])) == ("", None)


def test_files_that_code_names_are_found_beside_it(tmp_path: Path) -> None:
    module = tmp_path / "near.py"
    module.write_text(
        "from pathlib import Path\n"
        "HERE = Path(__file__).parent\n"
        "WORDS = HERE.joinpath('words.txt').read_text()\n"
        "def tasks(split, kind): return open(HERE / 'data' / f'{split}{kind}.jsonl')\n"
        "TEXT = 'not a file'\nABSENT = 'absent.txt'\nOUTSIDE = '../outside.txt'\nANY = f'{TEXT}{ABSENT}'\n"
    )
    (tmp_path / "data").mkdir()
    for name in ("words.txt", "data/train1.jsonl", "data/test.jsonl", "other.txt", "data/other.txt", "../outside.txt"):
        (tmp_path / name).write_text("x")
    assert names(files_named_by([module], [tmp_path]), tmp_path) == ["data/test.jsonl", "data/train1.jsonl", "words.txt"]


def test_what_another_run_keeps_is_no_code_of_the_project(tmp_path: Path) -> None:
    for folder in ("code/files", "mine/code/files"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "near.py").write_text("")
    (tmp_path / "code" / "manifest.json").write_text("{}")
    assert not is_user_code(tmp_path / "code" / "files" / "near.py", [tmp_path])
    assert is_user_code(tmp_path / "mine" / "code" / "files" / "near.py", [tmp_path])
