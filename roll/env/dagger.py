"""DAgger: the expert's actions in the states that a policy visited.

A policy that imitates demonstrations makes mistakes and then reaches states that the expert never visited. So the expert
labels the states that the policy itself visits, the policy is trained on these labels, and then it plays again.

    the lake: P . .   the policy: up   the lake: You did not move. P . .   the policy: right   …

gives these conversations; the parts in brackets are trained on:

    the lake: P . .   [down]
    the lake: P . .   the policy: up   the lake: You did not move. P . .   [down]

Every visited state is a conversation of its own, with the policy's own actions before it, and only its last answer is
trained on. States in which the expert has no advice are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll.config.errors import UserError
from roll.config.load import load_config
from roll.config.root import find_local, is_object, root_of, with_absolute_paths
from roll.config.schema import Config
from roll.data.chat import Chat
from roll.data.domains import load_domains
from roll.data.sources import Split, TaskSet, load_tasks
from roll.data.task import EnvSpec, Message, Task
from roll.data.tokenlog import TokenLog
from roll.env.demonstrations import demonstration
from roll.env.expert_play import ExpertTurn, check_expert, turns
from roll.model.chat import ChatRenderer
from roll.model.find import find_model
from roll.model.loading import load_tokenizer, stop_ids_of
from roll.run import RunFolder, read_samples
from roll.run.code import RunCode, load_object
from roll.run.samples import steps_with_samples


def dagger(
    split: Split,
    runs: str | Sequence[str],
    last_steps: int = 0,
    demonstrations: int = 0,
    held_out: float = 0.05,
    root: str = "",
) -> Iterator[Chat]:
    """A chat source: the expert's labels for the states in the samples of some runs, from their `last_steps` last steps
    (0: all). As many `demonstrations` of the first run's training tasks are added. A share `held_out` of the tasks,
    evenly spaced, is held out with all its states."""
    if not 0 <= held_out < 1 or last_steps < 0 or demonstrations < 0:
        raise UserError(
            f"data.options: held_out={held_out}, last_steps={last_steps}, demonstrations={demonstrations}: write a share "
            "from 0 to below 1, and numbers not below 0"
        )
    folders = [
        RunFolder.open(find_local(run, root) or Path(run).expanduser())
        for run in ([runs] if isinstance(runs, str) else runs)
    ]
    if not folders:
        raise UserError("data.options: runs names no run: write the folder of one, or a list of them")
    numbers: dict[str, int] = {}
    seen: set[tuple[str, ...]] = set()
    for folder in folders:
        window = _config(folder).env.window
        for task, actions in _episodes(folder, last_steps):
            number = numbers.setdefault(task.id, len(numbers))
            if (int((number + 1) * held_out) > int(number * held_out)) != (split == "held_out"):
                continue
            assert task.environment is not None, "it has actions in one"
            for turn in labels(task.environment, _replay(actions), task.messages, window=window):
                contents = tuple(message["content"] for message in turn.with_advice)
                if contents not in seen:
                    seen.add(contents)
                    yield Chat(f"{task.id}/{len(seen)}", turn.with_advice, tools=turn.tools, learn="last")
    if split == "train":
        yield from _demonstrations(folders[0], demonstrations)


def labels(
    spec: EnvSpec,
    policy: Callable[[Sequence[Message]], str | None],
    opening: tuple[Message, ...] = (),
    max_turns: int = 100,
    window: int = 0,
) -> Iterator[ExpertTurn]:
    """The states of an episode that a policy visits and that the expert has advice for. The policy gets the conversation
    so far, limited by `window`, and returns an action, or None to stop."""
    for turn in turns(spec, lambda turn: policy(turn.messages), opening, max_turns, window):
        if turn.advice is not None:
            yield turn


def _replay(actions: Sequence[str]) -> Callable[[Sequence[Message]], str | None]:
    remaining = iter(actions)
    return lambda messages: next(remaining, None)


def _episodes(folder: RunFolder, last_steps: int) -> Iterator[tuple[Task, list[str]]]:
    """The episodes of a run: the task of each, and the policy's actions."""
    config = _config(folder)
    tasks = _tasks(folder, config)
    source = find_model(str(folder.path))
    tokenizer = load_tokenizer(source, with_absolute_paths(config).model)
    renderer = ChatRenderer(tokenizer, stop_ids_of(tokenizer, source))
    for step in steps_with_samples(folder)[-last_steps:]:
        for row in read_samples(folder, step):
            task = tasks.get(row["task"])
            if task is not None:
                yield task, [renderer.text(ids) for ids in _responses(row)]


def _responses(row: Mapping[str, Any]) -> Iterator[list[int]]:
    log = TokenLog.from_loss_mask(row["ids"], np.asarray(row["loss_mask"], np.bool_))
    return (segment.ids.tolist() for segment in log.segments if segment.kind == "response")


def _tasks(folder: RunFolder, config: Config) -> dict[str, Task]:
    """The tasks of a run that have an environment, by id."""
    found = _task_set(config)
    tasks = {task.id: task for task in (*found.held_out, *found.train) if task.environment is not None}
    if not tasks:
        raise UserError(f"data.options: no task of the run in {folder.path} is played in an environment")
    for spec in {task.environment.name: task.environment for task in tasks.values() if task.environment}.values():
        check_expert(spec)
    return tasks


def _task_set(config: Config) -> TaskSet:
    if config.domains:
        return load_domains(config.domains, root_of(config))
    stored_source = load_object(config.tasks.source) if is_object(config.tasks.source) else None
    return load_tasks(config.tasks, stored_source, root_of(config))


def _config(folder: RunFolder) -> Config:
    """The config of a run with the code that it was trained with."""
    config, code = load_config(folder.config_path), RunCode.open(folder.path)
    return config if code is None or not code.manifest.pieces else code.with_recorded_code(config)


def _demonstrations(folder: RunFolder, count: int) -> Iterator[Chat]:
    config = _config(folder)
    for task in [task for task in _task_set(config).train if task.environment is not None][:count]:
        assert task.environment is not None
        yield from demonstration(f"{task.id}/shown", task.environment, task.messages, window=config.env.window)
