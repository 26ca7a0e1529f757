"""ROLL as a library: `roll.train`, `roll.evaluate` and `roll.play`, called with Python objects.

    roll.train(model="Qwen/Qwen2.5-0.5B-Instruct", tasks=rows, reward=my_reward, train={"steps": 100})

Invariants: every setting that a configuration can express is put into the configuration, so that the run folder describes
the run; objects (functions, lists, datasets) are passed separately. Error messages are written for Python users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from roll.config import Config, RewardConfig, UserError, load_config
from roll.config.schema import DataConfig, ModelConfig, TasksConfig
from roll.data.in_memory import are_splits, given_chats, given_tasks
from roll.pipeline.output import print_line
from roll.pipeline.preflight import check_folder, check_has_rollouts, check_model, find
from roll.pipeline.signals import outside_loop
from roll.process.gc_tuning import gc_paused

if TYPE_CHECKING:
    from roll.data.chat_sources import ChatSource
    from roll.data.sources import TaskSource
    from roll.pipeline.report import Reporter
    from roll.pipeline.run_code import Code
    from roll.pipeline.sft_eval import SFTEval
    from roll.reward import RewardFn
    from roll.rollout.transcript import Transcript
    from roll.scheduler.evaluate import Evaluation

ConfigLike = Config | str | Path | Mapping[str, Any] | None
Overrides = Sequence[str] | Mapping[str, Any]


def train(
    config: ConfigLike = None,
    *,
    model: Any = None,
    tasks: Any = None,
    reward: Any = None,
    chats: Any = None,
    overrides: Overrides = (),
    resume: bool = False,
    restart: bool = False,
    code: Code | None = None,
    reporter: Reporter | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Trains a model and returns the summary of the run, which is also in its folder as `summary.json`.

        roll.train("examples/tiny.yaml", train={"steps": 5})
        roll.train(model="tiny", tasks=[{"question": "3", "answer": "3"}], reward=my_reward, run="runs/mine")

    `config`: a `roll.Config`, the path of a YAML file or a dict; without one every setting has its default.

    `model`: the name, path or hub id of a model, or a dict of the settings under `model`.

    `tasks`: the name of a source, a path, `"hf:dataset"`, a list of `roll.Task` or of dicts with `question` and `answer`,
    a `datasets.Dataset`, a data frame, a dict with `train` and `held_out` of these, a function `(split, **options)` that
    gives tasks, or a dict of the settings under `tasks`, whose `source` may be any of these.

    `reward`: the name of a built-in reward, `"file.py:name"`, a function `(task, response)` that returns a number or a
    dict of named parts, a list or a dict of several whose sum counts, or a dict of the settings under `reward`.

    `chats`: conversations to imitate, for `pipeline="sft"`: as `tasks`, of `roll.Chat` or of lists of messages.

    `overrides`: as for `roll.load_config`, a list of `"key.sub=value"` or a dict.

    `resume=True` continues from the newest checkpoint in the run folder; `restart=True` first moves an existing run
    folder aside. If code or data have changed, the run is resumed only if `code` says which to use: `"run"`, the copy in
    the run folder, or `"current"`, what is on disk now. `reporter` gets every step; without one, a line is printed per
    step.

    `settings`: sections of the configuration as dicts, and other settings: `train={"steps": 50, "lr": 1e-6}`,
    `rollout={"group_size": 8}`, `algorithm="dapo"`, `run="runs/mine"`, `seed=1`: docs/reference/config.md
    has all of them.

    Ctrl-C ends the step, saves and returns the summary, with `stopped` true; a second one raises KeyboardInterrupt.
    In a notebook, or wherever else an event loop is running, the run gets a thread of its own, and the call waits for it.
    Raises `roll.UserError` for input that cannot work, before anything is created, and `roll.RunError` if the run fails.
    """
    if resume and restart:
        raise UserError("resume=True continues a run and restart=True begins it again: write one of them")
    if code is not None and not resume:
        raise UserError(f"code is {code!r}, but a new run has only the code that is there now: leave it out")
    given = arguments(config, model, tasks, reward, chats, overrides, settings)
    check_folder(given.config, resume=resume, restart=restart)
    found = None if resume else find(given.config, **given.objects)
    check_model(given.config)
    with gc_paused():
        from roll.pipeline.entrypoints import train as run_training

    chosen: dict[str, Any] = {"resume": resume, "restart": restart, "code": code, "reporter": reporter, "found": found}
    return outside_loop(lambda: run_training(given.config, **chosen, **given.objects))


def evaluate(
    config: ConfigLike = None,
    *,
    model: Any = None,
    tasks: Any = None,
    reward: Any = None,
    chats: Any = None,
    overrides: Overrides = (),
    code: Code | None = None,
    **settings: Any,
) -> Evaluation | SFTEval:
    """Evaluates a model on held-out tasks, or with `pipeline="sft"` on held-out conversations. Nothing is written.

        roll.evaluate("runs/mine")
        roll.evaluate(model="tiny", tasks=rows, reward="number", eval={"samples": 100})

    The arguments are those of `roll.train`; `config` may also be the folder of a run: then its newest checkpoint is
    evaluated, with the code that the run keeps unless `code` is `"current"`.
    """
    given = arguments(_of_run(config, code), model, tasks, reward, chats, overrides, settings)
    found = find(given.config, **given.objects)
    check_model(given.config)
    with gc_paused():
        from roll.pipeline.entrypoints import evaluate as run_evaluation

    return outside_loop(lambda: run_evaluation(given.config, **given.objects, found=found))


def play(
    config: ConfigLike = None,
    episodes: int = 4,
    *,
    model: Any = None,
    tasks: Any = None,
    reward: Any = None,
    overrides: Overrides = (),
    code: Code | None = None,
    **settings: Any,
) -> list[Transcript]:
    """Rolls out a model on tasks for inspection: messages, rewards, and which tokens would be trained on.

        for transcript in roll.play("runs/mine", episodes=2):
            print(transcript.task, transcript.reward)

    The arguments are those of `roll.train`; `config` may also be the folder of a run. Nothing is trained or written.
    """
    if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 1:
        raise UserError(f"episodes is {episodes!r}: write how many attempts to make, as in episodes=4")
    given = arguments(_of_run(config, code), model, tasks, reward, None, overrides, settings)
    check_has_rollouts(given.config)
    found = find(given.config, **given.objects)
    check_model(given.config)
    with gc_paused():
        from roll.pipeline.entrypoints import play as run_play

    return outside_loop(lambda: run_play(given.config, episodes, **given.objects, found=found))


@dataclass(frozen=True)
class Arguments:
    """A run as requested in Python: a configuration, and the objects that no configuration can hold."""

    config: Config
    reward: RewardFn | None = None
    tasks: TaskSource | None = None
    chats: ChatSource | None = None

    @property
    def objects(self) -> dict[str, Any]:
        """The objects that were given."""
        named = {"reward": self.reward, "tasks": self.tasks, "chats": self.chats}
        return {name: given for name, given in named.items() if given is not None}


@dataclass
class _SortedArguments:
    """Settings of the configuration, and objects."""

    settings: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


def arguments(
    config: ConfigLike,
    model: Any,
    tasks: Any,
    reward: Any,
    chats: Any,
    overrides: Overrides,
    settings: Mapping[str, Any],
) -> Arguments:
    """Sorts the arguments into settings of the configuration and objects."""
    found = _SortedArguments(dict(settings))
    if model is not None:
        found.settings["model"] = _model(model)
    if tasks is not None:
        _sort_source(found, "tasks", tasks, TasksConfig, given_tasks)
    if chats is not None:
        if "data" in settings:
            raise UserError("chats and data are both given, and each says what to imitate: write one of them")
        _sort_source(found, "chats", chats, DataConfig, given_chats)
    if reward is not None:
        _sort_reward(found, reward)
    loaded = load_config({} if config is None else config, found.settings)
    if overrides != ():
        loaded = load_config(loaded, overrides)
    return Arguments(loaded, **found.objects)


def _model(model: Any) -> Any:
    if isinstance(model, str | PurePath):
        return {"path": os.fspath(model)}
    if isinstance(model, Mapping | ModelConfig):
        return model
    if hasattr(model, "save_pretrained"):
        raise UserError(
            f"model is a {type(model).__name__}, but a run loads its model itself: write model.save_pretrained(folder) "
            "and tokenizer.save_pretrained(folder), and give the folder"
        )
    raise UserError(
        f"model is {model!r:.100} ({type(model).__name__}): write the name, the path or the hub id of a model, or a dict "
        "of settings, as in {'path': 'tiny', 'dtype': 'fp32'}"
    )


def _sort_source(
    found: _SortedArguments,
    what: str,
    given: Any,
    section: type[TasksConfig | DataConfig],
    source_of: Callable[[Any], Any],
) -> None:
    """Sorts the source of tasks or conversations: a name or settings, or an object instead of a name."""
    key = "tasks" if section is TasksConfig else "data"
    written: dict[str, Any] = {}
    if isinstance(given, section):
        given = given.model_dump()
    if isinstance(given, Mapping) and not are_splits(given) and set(given) & set(section.model_fields):
        written = dict(given)
        given = written.pop("source", None)
    if isinstance(given, str | PurePath):
        written = {"options": {}, **written, "source": os.fspath(given)}
    elif given is not None:
        written = {"options": {}, **written}
        found.objects[what] = source_of(given)
    found.settings[key] = written


def _sort_reward(found: _SortedArguments, given: Any) -> None:
    """Sorts the reward: a name or settings; a function; or several of these."""
    defaults = {"name": RewardConfig().name, "options": {}, "parts": {}}
    if isinstance(given, RewardConfig):
        given = given.model_dump()
    if isinstance(given, str | PurePath):
        found.settings["reward"] = {**defaults, "name": os.fspath(given)}
    elif isinstance(given, Mapping) and set(given) & set(RewardConfig.model_fields):
        _sort_reward_settings(found, dict(given))
    elif isinstance(given, Mapping | list | tuple):
        parts = dict(given) if isinstance(given, Mapping) else _named(given)
        _sort_reward_settings(found, {"parts": parts})
    elif callable(given):
        found.settings["reward"] = defaults
        found.objects["reward"] = given
    else:
        raise UserError(
            f"reward is {given!r:.100} ({type(given).__name__}): write the name of a reward, a function (task, response) "
            "that returns a number, a list or a dict of these, or a dict of settings, as in {'name': 'math'}"
        )


def _named(given: Sequence[Any]) -> dict[str, Any]:
    """Rewards by their own names."""
    parts: dict[str, Any] = {}
    for position, reward in enumerate(given):
        named = reward.get("name") if isinstance(reward, Mapping) else reward
        name = named if isinstance(named, str) else getattr(named, "__name__", "")
        name = name.rpartition(":")[2]
        if not name.isidentifier():
            raise UserError(f"reward[{position}] is {reward!r:.60}, which has no name: write a dict of rewards by name")
        if name in parts:
            raise UserError(f"reward has two rewards named {name!r}: write a dict of rewards by other names")
        parts[name] = reward
    return parts


def _sort_reward_settings(found: _SortedArguments, written: dict[str, Any]) -> None:
    """Sorts settings of the reward, in which functions may replace names."""
    if callable(written.get("name")):
        found.objects["reward"] = _with_options(written.pop("name"), written.pop("options", {}))
        written = {"name": RewardConfig().name, "options": {}, "parts": {}, **written}
    elif "name" in written:
        written = {"options": {}, "parts": {}, **written}
    elif "parts" in written:
        written = {"name": "", "options": {}, **written}
    parts = written.get("parts")
    if not isinstance(parts, Mapping):
        found.settings["reward"] = written
        return
    if not parts and not written.get("name"):
        raise UserError("reward is empty: write at least one reward")
    functions = {name: function for name, part in parts.items() if callable(function := _function_of(part))}
    named = {name: _with_label(part) for name, part in parts.items()}
    if not functions:
        found.settings["reward"] = {**written, "parts": named}
        return
    from roll.reward.in_memory import check_no_roles, compose_given

    check_no_roles(named)
    load_config({"reward": {"parts": named}})  # refuses wrong weights and gates
    rest = {key: value for key, value in written.items() if key not in ("name", "options", "parts")}
    found.settings["reward"] = {"name": RewardConfig().name, "options": {}, "parts": {}, **rest}
    found.objects["reward"] = compose_given(named, functions)


def _function_of(part: Any) -> Any:
    return part.get("name") if isinstance(part, Mapping) else part


def _with_label(part: Any) -> dict[str, Any]:
    """A part's settings with the label of its function instead of the function."""
    settings = dict(part) if isinstance(part, Mapping) else {"name": part}
    if isinstance(settings.get("name"), PurePath):
        settings["name"] = os.fspath(settings["name"])
    if callable(function := settings.get("name")):
        settings["name"] = getattr(function, "__qualname__", type(function).__qualname__)
    return settings


def _with_options(function: Any, options: Any) -> Any:
    from functools import partial

    return partial(function, **options) if options else function


def _of_run(config: ConfigLike, code: Code | None) -> ConfigLike:
    """The config of a run's folder with the run's newest checkpoint as the model; any other config unchanged."""
    if not isinstance(config, str | PurePath) or not Path(config).is_dir():
        if code is not None:
            raise UserError(
                f"code is {code!r}, but it says which code of a run is used, and this is no run: leave it out"
            )
        return config
    from roll.pipeline.run_code import config_of_run

    found, message = config_of_run(Path(config), code=code)
    if message:
        print_line(message)
    return found
