"""The code that a run was trained with: recorded, kept, used to evaluate it, and compared before it is resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from thorough import but

import roll
from roll.cli import main
from roll.config import UserError, load_config
from roll.pipeline.report import SilentReporter
from roll.run import RunFolder
from roll.run.code import RunCode

CONFIG = """
model: tiny
run: {dir: RUN, tensorboard: false, curve: false, trace: false, checkpoint_every: 1}
threads: 1
tasks: echo
reward: REWARD
rollout: {groups_per_step: 2, group_size: 2, max_new_tokens: 1, filter: none}
train: {steps: 1, lr: 1e-3}
eval: {every: 0, samples: 2, show: 0}
"""
NEAR = """
import helper

def near(task, response):
    from rules.inner import worth
    return worth() + helper.MORE
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that nothing is in; imports of a test are undone after it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = dict(sys.modules)
    yield tmp_path / "elsewhere"
    for name in set(sys.modules) - set(modules):
        if name.partition(".")[0] in ("helper", "rules", "near") or name.startswith("roll_user_"):
            del sys.modules[name]


def make_project(folder: Path, worth: float = 0.25, reward: str = "near.py:near", run: str = "") -> Path:
    """A project with a reward of three modules, one of them imported when the reward is first called."""
    (folder / "rules").mkdir(parents=True)
    (folder / "near.py").write_text(NEAR)
    (folder / "helper.py").write_text("MORE = 0.5\n")
    (folder / "rules" / "__init__.py").write_text("")
    (folder / "rules" / "inner.py").write_text(f"def worth(): return {worth}\n")
    (folder / "unused.py").write_text("")
    config = folder / "a.yaml"
    config.write_text(CONFIG.replace("RUN", run or str(folder / "run")).replace("REWARD", reward))
    return config


def train(config: Path | str, *overrides: str, **given: Any) -> dict[str, Any]:
    return roll.train(load_config(config, overrides), reporter=SilentReporter(), **given)


def rewards(run: Path) -> set[float]:
    """The rewards of all samples that trained the run."""
    rows = [json.loads(line) for file in sorted((run / "samples").iterdir()) for line in file.read_text().splitlines()]
    return {row["reward"] for row in rows}


def evaluated(run: Path | str, capfd: pytest.CaptureFixture[str], *options: str) -> tuple[str, str]:
    """What `roll eval` prints, and what it says beside that."""
    capfd.readouterr()
    assert main(["eval", str(run), *options]) == 0
    said = capfd.readouterr()
    return said.out, said.err


@pytest.mark.parametrize("reward", but({"near.py:near"}, ["near.py:near", "near:near"]))
def test_a_run_keeps_the_users_modules_and_is_evaluated_with_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], reward: str
) -> None:
    project = tmp_path / "project"
    train(make_project(project, reward=reward))
    kept = project / "run" / "code" / "files"
    files = sorted(str(file.relative_to(kept)) for file in kept.rglob("*.py"))
    assert files == ["helper.py", "near.py", "rules/__init__.py", "rules/inner.py"]
    manifest = json.loads((project / "run" / "code" / "manifest.json").read_text())
    assert [(piece["setting"], piece["name"]) for piece in manifest["pieces"]] == [("reward.name", reward)]
    assert {"python", "roll", "torch", "transformers"} <= manifest["packages"].keys()
    summary = RunFolder.open(project / "run").read_summary()
    assert summary is not None
    assert summary["reward"] == reward

    (project / "rules" / "inner.py").write_text("def worth(): return 0.125\n")
    out, err = evaluated(project / "run", capfd)
    assert "held-out reward 0.750" in out
    assert f"using the code the run was trained with: {project / 'run' / 'code'} (reward {reward})" in " ".join(
        err.split()
    )
    out, err = evaluated(project / "run", capfd, "--code", "current")
    assert "held-out reward 0.625" in out
    assert f"using the code as it is now, found from {project}" in " ".join(err.split())
    (project / "near.py").unlink()
    assert "held-out reward 0.750" in evaluated(project / "run", capfd)[0]


def test_rollouts_of_a_run_use_its_code_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    train(make_project(project))
    shutil.rmtree(project / "rules")
    capfd.readouterr()
    assert main(["rollout", str(project / "run"), "--episodes", "2", "--json"]) == 0
    said = capfd.readouterr()
    assert [transcript["reward"] for transcript in json.loads(said.out)] == [0.75, 0.75]
    assert "using the code the run was trained with" in said.err


def given_rewards() -> dict[str, Callable[..., Any]]:
    class Worth:
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, task: Any, response: Any) -> float:
            return self.value

    def closed(task: Any, response: Any) -> float:
        return value

    value = 0.375
    typed: dict[str, Any] = {"__name__": "__main__"}
    exec("VALUE = 0.375\ndef typed(task, response): return VALUE\n", typed)
    return {
        "closure": closed,
        "lambda": lambda task, response: 0.375,
        "object": Worth(0.375),
        "without a file": typed["typed"],
    }


@pytest.mark.parametrize("kind", but({"closure"}, ["closure", "lambda", "object", "without a file"]))
def test_a_reward_given_in_python_is_kept_and_used(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    run = tmp_path / "run"
    config = make_project(tmp_path / "project", reward="number", run=str(run))
    reward = given_rewards()[kind]
    train(config, reward=reward)
    assert rewards(run) == {0.375}
    name = getattr(reward, "__qualname__", type(reward).__qualname__)
    assert f"name: code/reward.pkl:{name}" in " ".join((run / "config.yaml").read_text().replace("'", "").split())
    out, err = evaluated(run, capfd)
    assert "held-out reward 0.375" in out
    assert f"(reward {name})" in err
    assert "held-out reward 0.375" in evaluated(run, capfd, "--code", "current")[0]
    assert main(["ledger", str(run)]) == 0
    assert f"reward: {name} (given in Python)" in capfd.readouterr().out

    # Resumed from the command line there is no other code than the run's; from Python it is compared.
    assert main(["train", str(config), "train.steps=2", "--resume", "--plain"]) == 0
    assert f"using the reward that the run was given in Python: {name}" in capfd.readouterr().out
    assert rewards(run) == {0.375}
    train(config, "train.steps=3", reward=given_rewards()[kind], resume=True)
    with pytest.raises(UserError, match=r"reward, .*test_a_reward.*lambda.*, is not the .* that the run was given"):
        train(config, "train.steps=4", reward=lambda task, response: 0.5, resume=True)
    with pytest.raises(UserError, match=r"reward\.name is 'math', but the run was given its reward in Python"):
        train(config, "train.steps=4", "reward=math", resume=True)
    train(config, "train.steps=4", reward=lambda task, response: 0.5, resume=True, code="current")
    assert rewards(run) == {0.375, 0.5}
    assert "held-out reward 0.500" in evaluated(run, capfd)[0]


@pytest.mark.thorough
def test_a_reward_of_a_script_is_kept_with_the_modules_beside_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project, run = tmp_path / "project", tmp_path / "run"
    config = make_project(project, reward="number", run=str(run))
    script = project / "start.py"
    script.write_text(
        "import sys, roll\nimport near as module\nBASE = 0.125\n"
        "def mine(task, response):\n    from rules.inner import worth\n    return BASE + worth()\n"
        "if __name__ == '__main__':\n"
        "    resume, which = len(sys.argv) > 2, getattr(module, sys.argv[1], mine)\n"
        f"    config = roll.load_config({str(config)!r}, ['train.steps=2'] if resume else [])\n"
        "    roll.train(config, reward=which, resume=resume)\n"
    )
    for which, value in (("mine", "0.375"), ("near", "0.750")):
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run([sys.executable, str(script), which], check=True, cwd=tmp_path, capture_output=True)
        script.write_text(script.read_text() + "# a line more changes nothing\n")
        subprocess.run([sys.executable, str(script), which, "resume"], check=True, cwd=tmp_path, capture_output=True)
        moved = tmp_path / f"moved_{which}"
        project.rename(moved)
        assert f"held-out reward {value}" in evaluated(run, capfd)[0]
        moved.rename(project)
    script.write_text(script.read_text().replace("BASE = 0.125", "BASE = 0.25"))
    shutil.rmtree(run)
    subprocess.run([sys.executable, str(script), "mine"], check=True, cwd=tmp_path, capture_output=True)
    script.write_text(script.read_text().replace("BASE = 0.25", "BASE = 0.5"))
    again = [sys.executable, str(script), "mine", "resume"]
    refused = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "reward, mine, is not the mine" in refused.stderr


def test_resuming_with_other_code_is_refused_and_names_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    config, run = make_project(project), project / "run"
    train(config)
    (project / "unused.py").write_text("changed = True\n")
    train(config, "train.steps=2", resume=True)
    (project / "helper.py").write_text("MORE = 0.25\n")
    (project / "rules" / "inner.py").unlink()
    before = sorted((run / "code").rglob("*"))
    assert main(["train", str(config), "train.steps=3", "--resume"]) == 2
    said = " ".join(capfd.readouterr().err.split())
    assert f"{project / 'helper.py'} (reward.name) has changed" in said
    assert f"{project / 'rules' / 'inner.py'} (reward.name) is gone" in said
    assert "near.py" not in said
    assert "--code run" in said
    assert "--code current" in said
    assert sorted((run / "code").rglob("*")) == before

    assert main(["train", str(config), "train.steps=3", "--resume", "--plain", "--code", "run"]) == 0
    assert "using the code the run was trained with" in capfd.readouterr().out
    assert rewards(run) == {0.75}
    with pytest.raises(UserError, match="was trained with other code"):
        train(config, "train.steps=4", resume=True)

    (project / "rules" / "inner.py").write_text("def worth(): return 0.125\n")
    train(config, "train.steps=4", resume=True, code="current")
    assert rewards(run) == {0.75, 0.375}
    recorded = RunCode.open(run)
    assert recorded is not None
    assert (recorded.manifest.from_step, recorded.manifest.before) == (3, ("before_step_3",))
    assert (run / "code" / "before_step_3" / "files" / "helper.py").read_text() == "MORE = 0.5\n"
    assert (run / "code" / "files" / "helper.py").read_text() == "MORE = 0.25\n"
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [(e["step"], e["key"]) for e in events if e["event"] == "changed" and e["key"] == "code"] == [(3, "code")]
    assert "held-out reward 0.375" in evaluated(run, capfd)[0]
    train(config, "train.steps=5", resume=True)
    (project / "helper.py").write_text("MORE = 0.125\n")
    train(config, "train.steps=6", resume=True, code="current")
    recorded = RunCode.open(run)
    assert recorded is not None
    assert recorded.manifest.before == ("before_step_3", "before_step_5")


def test_the_refusal_comes_before_torch_is_imported(tmp_path: Path) -> None:
    project = tmp_path / "project"
    config = make_project(project)
    train(config)
    (project / "near.py").write_text(NEAR + "\n# changed\n")
    program = (
        "import sys\nfrom roll.cli import main\n"
        f"status = main(['train', {str(config)!r}, '--resume'])\n"
        "print(status, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]


@pytest.mark.thorough
def test_a_moved_project_is_the_same_project(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project, moved = tmp_path / "project", tmp_path / "moved" / "deeper"
    make_project(project)
    train(project / "a.yaml")
    moved.parent.mkdir()
    project.rename(moved)
    run = moved / "run"
    assert main(["train", str(run / "config.yaml"), "train.steps=2", "--resume", "--plain"]) == 0
    assert (run / "samples").is_dir()
    assert not project.exists()
    assert "held-out reward 0.750" in evaluated(run, capfd, "--code", "current")[0]
    assert main(["train", str(moved / "a.yaml"), f"run.dir={run}", "train.steps=3", "--resume", "--plain"]) == 0
    assert "warning: using the code" not in capfd.readouterr().out
    shutil.copytree(run, tmp_path / "only_the_run")
    shutil.rmtree(moved)
    assert "held-out reward 0.750" in evaluated(tmp_path / "only_the_run", capfd)[0]
    copied = tmp_path / "only_the_run" / "config.yaml"
    assert main(["train", str(copied), "train.steps=4", "--resume", "--plain"]) == 0
    assert "using the code the run was trained with" in capfd.readouterr().out


@pytest.mark.thorough
def test_files_of_the_same_name_and_code_outside_the_folder_of_the_config(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    for folder, value in (("a", 0.25), ("b/c", 0.5)):
        (project / folder).mkdir(parents=True)
        (project / folder / "helper.py").write_text(f"VALUE = {value}\n")
        (project / folder / "near.py").write_text("import helper\ndef near(task, response): return helper.VALUE\n")
    parts = f"{{parts: {{first: '../a/near.py:near', second: '{project}/b/c/near.py:near'}}}}"
    (project / "configs").mkdir()
    config = project / "configs" / "a.yaml"
    config.write_text(CONFIG.replace("RUN", str(tmp_path / "run")).replace("REWARD", parts))
    train(config)
    assert rewards(tmp_path / "run") == {0.75}
    kept = tmp_path / "run" / "code" / "files"
    assert sorted(str(file.relative_to(kept)) for file in kept.rglob("*.py")) == [
        *("a/helper.py", "a/near.py", "b/c/helper.py", "b/c/near.py"),
    ]
    shutil.rmtree(project)
    out, err = evaluated(tmp_path / "run", capfd)
    assert "held-out reward 0.750" in out
    assert "reward.parts.first ../a/near.py:near" in err


def test_tasks_and_data_files_are_recorded_and_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    config = make_project(project)
    data = project / "tasks.jsonl"
    data.write_text("".join(json.dumps({"question": str(n), "answer": str(n)}) + "\n" for n in range(20)))
    text = config.read_text().replace("tasks: echo", "tasks: tasks.jsonl")
    config.write_text(text)
    train(config)
    manifest = json.loads((project / "run" / "code" / "manifest.json").read_text())
    assert [(row["setting"], row["path"], row["bytes"]) for row in manifest["data"]] == [
        ("tasks.source", "tasks.jsonl", data.stat().st_size)
    ]
    assert "held-out reward 0.750" in evaluated(project / "run", capfd)[0]
    data.write_text(data.read_text().replace("17", "18"))
    for code in (None, "run"):
        with pytest.raises(UserError, match=r"tasks\.jsonl \(tasks\.source\) has changed"):
            train(config, "train.steps=2", resume=True, code=code)
    with pytest.raises(UserError, match="code is 'old': write run or current"):
        train(config, "train.steps=2", resume=True, code="old")
    train(config, "train.steps=2", resume=True, code="current")
    train(config, "train.steps=3", resume=True)


def test_files_beside_the_code_that_it_reads_are_kept_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    config = make_project(project, run=str(tmp_path / "run"))
    (project / "words").mkdir()
    (project / "words" / "held_out.txt").write_text("00 11 22 33")
    (project / "words" / "train.txt").write_text("44 55 66 77")
    (project / "asked.py").write_text(
        "from pathlib import Path\nimport roll\n"
        "def asked(split):\n"
        "    words = (Path(__file__).parent / 'words' / f'{split}.txt').read_text().split()\n"
        "    return [roll.Task.ask(word, word, word) for word in words]\n"
    )
    config.write_text(config.read_text().replace("tasks: echo", "tasks: asked.py:asked"))
    train(config)
    shutil.rmtree(project)
    assert "│ 00 " in evaluated(tmp_path / "run", capfd, "eval.show=2")[0]


def test_tasks_given_in_python_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_project(tmp_path / "project", run=str(tmp_path / "run"))

    def tasks(split: str) -> list[roll.Task]:
        return [roll.Task.ask(f"{split}{n}", f"{n}{n}", n) for n in range(4)]

    train(config, tasks=tasks)
    out, err = evaluated(tmp_path / "run", capfd, "eval.show=2")
    assert "│ 00 " in out
    assert "tasks test_tasks_given_in_python_are_kept.<locals>.tasks" in " ".join(err.split())


@pytest.mark.thorough
def test_tasks_that_cannot_be_kept_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = make_project(tmp_path / "project", run=str(tmp_path / "run"))
    open_file = (tmp_path / "elsewhere" / "x").open("w")

    def tasks(split: str) -> list[roll.Task]:
        open_file.flush()
        return [roll.Task.ask(f"{split}{n}", f"{n}", n) for n in range(4)]

    roll.train(load_config(config), tasks=tasks)
    assert "the run cannot keep tasks" in capfd.readouterr().out
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "could not be kept" in capfd.readouterr().err
    train(config, "train.steps=2", tasks=tasks, resume=True)


@pytest.mark.thorough
def test_losses_filters_and_environments_are_code_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "losses.py").write_text(
        "from roll.algorithm import TokenLoss\n"
        "def plain(streams): return TokenLoss(-streams.advantage * streams.current, {})\n"
    )
    (project / "keep.py").write_text("def all_of_them(group): return None\n")
    (project / "worlds.py").write_text(
        "class World:\n"
        "    def __init__(self, worth=0.5): self.worth = worth\n"
        "    def reset(self, seed): return 'say something'\n"
        "    def step(self, action): return '', self.worth, True, False, {}\n"
    )
    (project / "a.yaml").write_text(
        CONFIG.replace("RUN", str(tmp_path / "run"))
        .replace("tasks: echo", "tasks: {source: environment, options: {name: 'worlds.py:World', count: 8, held_out: 4}}")
        .replace("reward: REWARD", "algorithm: {loss: 'losses.py:plain', correction: none}")
        .replace("filter: none", "filter: 'keep.py:all_of_them'")
    )
    train(project / "a.yaml")
    recorded = RunCode.open(tmp_path / "run")
    assert recorded is not None
    assert {piece.setting: piece.file for piece in recorded.manifest.pieces} == {
        "tasks.options.name": "worlds.py",
        "rollout.filter": "keep.py",
        "algorithm.loss": "losses.py",
    }
    shutil.rmtree(project)
    assert "held-out reward 0.500" in evaluated(tmp_path / "run", capfd)[0]
    config = tmp_path / "run" / "config.yaml"
    assert main(["train", str(config), "train.steps=2", "--resume", "--plain"]) == 0


@pytest.mark.thorough
def test_a_run_of_before_is_resumed_with_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    config = make_project(project)
    train(config)
    shutil.rmtree(project / "run" / "code")
    assert main(["train", str(config), "train.steps=2", "--resume", "--plain"]) == 0
    assert "does not record the code it was trained with" in capfd.readouterr().out
    recorded = RunCode.open(project / "run")
    assert recorded is not None
    assert (recorded.manifest.from_step, recorded.manifest.before) == (1, ())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "{config}", "--code", "run"], "write --resume too"),
        (["eval", "{config}", "--code", "run"], "is a file: leave it out"),
        (["train", "{config}", "--resume", "--code", "new"], "code is 'new'"),
    ],
)
def test_code_that_means_nothing_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    config = make_project(tmp_path / "project", reward="number")
    assert main([argument.format(config=config) for argument in arguments]) == 2
    assert says in " ".join(capfd.readouterr().err.split())
    assert not os.path.exists(tmp_path / "project" / "run")


@pytest.mark.thorough
def test_a_run_is_evaluated_with_other_code_that_an_override_names(
    tmp_path: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    train(make_project(project))
    (elsewhere / "other.py").write_text("def flat(task, response): return 0.1\n")
    assert "held-out reward 0.100" in evaluated(project / "run", capfd, "reward=other.py:flat")[0]
