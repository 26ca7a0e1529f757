"""The examples and the README do what they say."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll import check, load_config, train
from roll.config.algorithm import RECIPES
from roll.pipeline.report import SilentReporter

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ALGORITHMS = sorted((EXAMPLES / "algorithms").glob("*.yaml"))
README = ROOT / "README.md"

BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text() if README.is_file() else "", re.DOTALL | re.MULTILINE)
SCRIPTS = [block for block in BLOCKS if "import roll" in block]
EXCERPTS = [block for block in BLOCKS if "import roll" not in block]


def _title(block: str) -> str:
    return block.strip().splitlines()[-1].strip()[:40]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder like a fresh checkout's, as far as examples are concerned."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads(path: Path) -> None:
    config = load_config(path)
    assert config.run.dir.startswith("runs/"), "examples put their runs where git ignores them"
    assert path.read_text().startswith("# "), "an example says what it shows"


def test_every_algorithm_has_an_example() -> None:
    assert {path.stem for path in ALGORITHMS} == set(RECIPES)


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_an_algorithms_example_is_ready_to_run(path: Path) -> None:
    config = load_config(path)
    assert (config.algorithm.name, config.run.dir) == (path.stem, f"runs/algorithms/{path.stem}")
    check(config)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_every_example_script_compiles(path: Path) -> None:
    compile(path.read_text(), str(path), "exec")


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "accuracy"), [(40, 0.5), (80, 0.9)])
def test_the_tiny_example_learns(checkout: Path, steps: int, accuracy: float) -> None:
    """Half of it, and as it is."""
    summary = train(load_config("examples/tiny.yaml", [f"train.steps={steps}"]), reporter=SilentReporter())
    assert summary["reward_before"] <= 0.3
    assert summary["reward_after"] >= accuracy
    assert summary["run"] == str(checkout / "runs" / "tiny")


def test_the_pipeline_in_the_readme_is_the_example() -> None:
    assert (EXAMPLES / "by_hand.py").read_text() in (EXAMPLES.parent / "README.md").read_text()


@pytest.mark.parametrize("block", EXCERPTS, ids=_title)
def test_excerpts_in_the_readme_are_python(block: str) -> None:
    compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=_title)
def test_the_scripts_of_the_readme_run_as_pasted(checkout: Path, block: str) -> None:
    (checkout / "pasted.py").write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "pasted.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
