"""What a run tells whoever starts it: samples that fail, tasks left out, rewards that judge little or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL, TINY

from roll import Task, UserError, load_config
from roll.cli import main
from roll.data.sources import TaskSet
from roll.model.chat import ChatRenderer
from roll.model.tiny import character_tokenizer
from roll.pipeline.entrypoints import evaluate, train
from roll.pipeline.prepare import check, prepare
from roll.pipeline.prompt_filter import filter_prompts
from roll.pipeline.report import SilentReporter, StepReport

CODE = """
from roll import Task

class Mute:
    def reset(self, seed): return str(seed)
    def step(self, action): return "", float("nan"), True, False, {}

def raises(task, response):
    raise LookupError("no such page")

class Rich:
    def reset(self, seed): return str(seed)
    def step(self, action): return "more", 6e5, False, False, {}

def huge(task, response):
    return -1e308

def letters(task, response):
    return sum(character.islower() for character in response.text) / 4
"""
QUICK = [part for part in SMALL if not part.startswith("reward=")]


class Listener(SilentReporter):
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.steps: list[dict[str, str]] = []

    def warned(self, text: str) -> None:
        self.warnings.append(text)

    def stepped(self, report: StepReport) -> None:
        self.steps.append(dict(report.facts))


def mixed(folder: Path, **domains: str) -> Path:
    """A config of these domains."""
    (folder / "mine.py").write_text(CODE)
    lines = "".join(f"  {name}: {text.replace('mine.py', str(folder / 'mine.py'))}\n" for name, text in domains.items())
    (folder / "mixed.yaml").write_text(f"model: tiny\nrun: {folder / 'run'}\ndomains:\n{lines}")
    return folder / "mixed.yaml"


LETTERS = "{tasks: echo, reward: 'mine.py:letters'}"
PAGES = "{tasks: echo, reward: 'mine.py:raises'}"
MUTE = "{tasks: {source: environment, options: {name: 'mine.py:Mute', count: 8, held_out: 4}}}"


HUGE = "{tasks: echo, reward: 'mine.py:huge'}"
RICH = "{tasks: {source: environment, options: {name: 'mine.py:Rich', count: 8, held_out: 4}}}"


def test_samples_with_a_reward_beyond_all_bounds_fail_by_name(tmp_path: Path) -> None:
    listener = Listener()
    config = load_config(mixed(tmp_path, letters=LETTERS, far=HUGE, rich=RICH), [*QUICK, "eval.samples=6"])
    summary = train(config, reporter=listener)
    far, rich = (next(text for text in listener.warnings if f"'{name}'" in text) for name in ("far", "rich"))
    assert "reward invalid: the reward function 'huge' returned -1e+308, but a reward is from -1e+06 to 1e+06" in far
    assert "environment invalid: the rewards of environment " in rich
    assert "mine.py:Rich' sum to 1.2e+06, but a reward is from" in rich
    assert summary["trained_samples"] > 0


@pytest.mark.thorough
def test_a_domain_that_only_fails_is_told_of_once(tmp_path: Path) -> None:
    """The others go on, so nothing else would say it."""
    listener = Listener()
    config = load_config(mixed(tmp_path, letters=LETTERS, pages=PAGES, world=MUTE), [*QUICK, "eval.samples=6"])
    train(config, reporter=listener)
    nan = "environment invalid: step returned, as reward, nan, not a finite number"
    raised = "reward raised: LookupError: no such page (mine.py:9)"
    assert sorted(listener.warnings) == [
        f"step 0, held-out tasks: 2 of 2 samples of 'pages' could not be judged: {raised}",
        f"step 0, held-out tasks: 2 of 2 samples of 'world' could not be judged: {nan}",
    ]
    assert all(facts["failed"].endswith(" samples") for facts in listener.steps)


def test_what_fails_first_in_training_is_told_then(tmp_path: Path) -> None:
    def source(split: str) -> list[Task]:
        names = {"train": ["1", "2", "3", "4"], "held_out": ["even"]}[split]
        return [Task.ask(name, name, name) for name in names]

    def picky(task: Task, response: Any) -> float:
        if task.id == "2":
            raise ValueError("not this one")
        return len(response.text.strip()) / 4

    listener = Listener()
    few = ["rollout.groups_per_step=4", "rollout.max_replacements=0", f"run.dir={tmp_path / 'run'}"]
    train(load_config(TINY, [*SMALL, *few]), tasks=source, reward=picky, reporter=listener)
    (said,) = listener.warnings
    assert said.startswith(
        "step 1: 4 of 16 samples of 'default' could not be judged: reward raised: ValueError: not this"
    )
    assert [facts["failed"] for facts in listener.steps] == ["4 samples", "4 samples"]


def test_an_evaluation_says_what_could_not_be_judged(tmp_path: Path) -> None:
    found = evaluate(load_config(mixed(tmp_path, letters=LETTERS, pages=PAGES), [*QUICK, "eval.samples=6"]))
    assert "3 of 3 samples of 'pages' could not be judged: reward raised: LookupError: no such page" in str(found)


def of_lengths(split: str) -> Iterator[Task]:
    for length in (1, 100, 600, 1100):
        yield Task.ask(f"{split}-{length}", "7" * length, "7")


DROP = "tasks.too_long=drop"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ((DROP,), [1, 100, 600]),
        ((DROP, "rollout.max_new_tokens=512"), [1, 100]),
        ((DROP, "tasks.max_prompt_tokens=50"), [1]),
        ((DROP, "train.micro_batch_tokens=200"), [1, 100]),
    ],
)
def test_tasks_that_there_is_no_room_for_are_left_out_and_counted(overrides: tuple[str, ...], kept: list[int]) -> None:
    config = load_config(TINY, overrides)
    tasks, _ = check(config, tasks=of_lengths)
    assert [task.id for task in tasks.train] == [f"train-{length}" for length in kept]
    assert [task.id for task in tasks.held_out] == [f"held_out-{length}" for length in kept]
    (said,) = prepare(config, tasks=of_lengths).warnings
    assert said.startswith(f"{2 * (4 - len(kept))} of 8 tasks are left out, because their prompts are too long")
    assert "'train-1100'" in said


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), r"'train-1100' has 1103 tokens, but the context of 'tiny' is 1024: write tasks\.too_long=drop"),
        (("tasks.max_prompt_tokens=1000",), "has 1103 tokens: write tasks.max_prompt_tokens=1103 or more, or tasks.too_"),
        (
            (DROP, "tasks.max_prompt_tokens=2"),
            "leaves no task of .*default.* tasks.max_prompt_tokens=4 or more",
        ),
        ((DROP, "rollout.max_new_tokens=1024"), "leaves no task.*: write rollout.max_new_tokens=1020 or less$"),
    ],
)
def test_no_room_is_refused_with_what_to_write(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(load_config(TINY, overrides), tasks=of_lengths)


def test_an_engine_that_was_given_less_room_than_the_model_has_limits_prompts_too() -> None:
    shorter = ("roles.actor_infer.strategy=vllm", "roles.actor_infer.engine_args.max_model_len=512")
    config = load_config(TINY, shorter)
    tasks = TaskSet(tuple(of_lengths("train")), tuple(of_lengths("held_out")))
    longer = r"roles.actor_infer.engine_args.max_model_len=\d+ or more"
    for context, remedy in ((1024, "tasks.too_long=drop"), (2048, longer)):
        says = f"'train-1100' has 1103 tokens, but max_model_len of roles.actor_infer is 512: write {remedy}"
        with pytest.raises(UserError, match=says):
            filter_prompts(tasks, ChatRenderer(character_tokenizer(), ()), config, context)


def test_a_long_prompt_is_found_wherever_it_stands() -> None:
    """Where prompts have a limit of their own, nothing else would refuse it later."""

    def source(split: str) -> Iterator[Task]:
        for number in range(400):
            yield Task.ask(f"{split}-{number}", "7" * (60 if number == 399 else 1), "7")

    with pytest.raises(UserError, match="'train-399' has 63 tokens"):
        check(load_config(TINY, ["tasks.max_prompt_tokens=50"]), tasks=source)


def test_what_is_left_out_is_in_the_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.jsonl").write_text(
        "".join('{"question": "%s", "answer": "7"}\n' % ("7" * length) for length in (1, 2, 3, 1100))
    )
    table = f"tasks={{source: {tmp_path / 'long.jsonl'}, options: {{held_out: 1}}, too_long: drop}}"
    assert main(["plan", TINY, table]) == 0
    said = capfd.readouterr().out
    assert "1 tasks, their prompts are too long" in said
    assert "warning: 1 of 4 tasks are left out" in said


SHAPE = "{parts: {form: {name: format, options: {json: true}}, right: {name: number, weight: 0}}}"


@pytest.mark.parametrize(
    ("reward", "warned"),
    [
        (SHAPE, True),
        ("{name: length, options: {budget: 3}}", True),
        (SHAPE.replace("weight: 0", "weight: 0.5"), False),
        (SHAPE.replace("weight: 0", "weight: 0, gate: true"), False),
        ("number", False),
    ],
)
def test_a_reward_that_never_looks_at_the_answers_is_told_of(tmp_path: Path, reward: str, warned: bool) -> None:
    warnings = prepare(load_config(mixed(tmp_path, digits=f"{{tasks: echo, reward: {reward}}}"))).warnings
    told = [said for said in warnings if said.startswith("domains.digits.reward: nothing in it looks at the answers")]
    assert len(told) == len(warnings) == warned


def test_tasks_without_answers_may_be_judged_by_shape_alone() -> None:
    def source(split: str) -> list[Task]:
        return [Task.ask("1", "Write JSON.")]

    config = load_config(TINY, ["reward=format", "reward.options={json: true}"])
    assert prepare(config, tasks=source).warnings == []


@pytest.mark.parametrize("weights", ["{a: {name: number, weight: 0}}", "{a: {name: number, weight: 0, gate: true}}"])
def test_parts_that_add_up_to_nothing_are_refused(tmp_path: Path, weights: str) -> None:
    path = mixed(tmp_path, digits=f"{{tasks: echo, reward: {{parts: {weights}}}}}")
    with pytest.raises(UserError, match=r"reward\.parts \(a\) are all of weight 0, so every attempt is worth 0: give"):
        load_config(path)


def test_gates_alone_may_be_a_reward(tmp_path: Path) -> None:
    gate = "{a: {name: number, weight: 0, gate: true, gate_value: -1}}"
    assert load_config(mixed(tmp_path, digits=f"{{tasks: echo, reward: {{parts: {gate}}}}}"))


def test_a_reward_for_episodes_is_refused(tmp_path: Path) -> None:
    game = "tasks: {source: environment, options: {name: echo_turns}}"
    says = "is 'exact', but all its tasks are played in environments, whose steps say what"
    with pytest.raises(UserError, match=f"domains.game.reward {says}"):
        check(load_config(mixed(tmp_path, game=f"{{{game}, reward: exact}}", digits="{tasks: echo}")))
    episodes = ["tasks={source: environment, options: {name: echo_turns}}"]
    with pytest.raises(UserError, match=f"reward {says}"):
        check(load_config(TINY, [*episodes, "reward=exact"]))
    with pytest.raises(UserError, match="reward is a function, but all"):
        check(load_config(TINY, episodes), reward=lambda task, response: 1.0)
