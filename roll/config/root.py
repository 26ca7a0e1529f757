"""Names of files and code in a configuration, and the folder that they are found from.

Names in a YAML file are relative to the folder of that file, its root; names in a mapping given in Python, and in
overrides, to the working directory. A model and a run are also looked for in the working directory, where runs are
written. `names_in` lists every setting that names such a thing: what is found, recorded or compared is found, recorded
and compared for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from roll.config.algorithm import AlgorithmConfig
from roll.config.domains import DomainConfig, SourceConfig
from roll.config.reward import RewardPart, RewardRule
from roll.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from roll.config.section import Section
from roll.config.settings import RunConfig
from roll.config.user_code import find_file, named_in_options, working_copy
from roll.config.workers import RoleConfig, RoleModel
from roll.config.yaml_document import Path as Keys

Kind: TypeAlias = Literal["code", "file", "dataset", "model", "run"]
"""`code` is `module:name` or `file.py:name`; a `dataset` is a folder or one of the hub; a `model` is a folder, a file or
one of the hub; a `run` is the folder of one."""

BUILTIN_MODELS = ("tiny", "smollm2-135m")
"""Models that no folder is looked for."""
HUB = "hf:"
TABLE_FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
_LIBRARIES = ("gem", "gymnasium", "hf", "reasoning_gym")
"""What stands before a colon without being a module of the user's."""


@dataclass(frozen=True)
class Name:
    """A setting that names a file or code."""

    keys: Keys
    value: str
    kind: Kind

    @property
    def setting(self) -> str:
        """The dotted name of the setting."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys).removeprefix(".")

    @property
    def file(self) -> str:
        """The file that it names as it is written; empty for a module, whose file is where Python finds it."""
        if self.kind != "code":
            return self.value.removeprefix(HUB)
        module_or_file = self.value.rpartition(":")[0]
        return module_or_file if is_file_of_code(module_or_file) else ""


def is_code(name: str) -> bool:
    """Whether a name is one of user code: `module:name` or `file.py:name`."""
    module_or_file, _, attribute = name.rpartition(":")
    return bool(module_or_file and attribute) and name.partition(":")[0] not in _LIBRARIES


def is_object(name: str) -> bool:
    """Whether a name is one of an object that a run was given in Python and keeps: `code/reward.pkl:near`."""
    return name.rpartition(":")[0].endswith(".pkl")


def is_file_of_code(module_or_file: str) -> bool:
    """Whether what stands before the colon is a file, not a module."""
    return module_or_file.endswith(".py") or "/" in module_or_file


def root_of(config: Config) -> str:
    """The folder that the config's names are found from, on this machine."""
    return str(working_copy(config.root))


def run_of(file: Path | None) -> Path | None:
    """The folder of the run whose config.yaml a file is; None if it is none."""
    if file is None or file.name != "config.yaml":
        return None
    marks = ("ledger.log", ".lock", "code")
    return file.parent if any((file.parent / mark).exists() for mark in marks) else None


def moved_root(run: Path) -> str | None:
    """Where the root of a run is now if its project has been moved together with the run; None if it is not there."""
    try:
        manifest = json.loads((run / "code" / "manifest.json").read_bytes())
        root = os.path.normpath(run / manifest["root_from_run"])
        files = [os.path.join(root, manifest["base"], file["path"]) for file in manifest["files"]]
    except (OSError, RecursionError, ValueError, KeyError, TypeError):
        return None
    return root if os.path.isdir(root) and (not files or any(map(os.path.isfile, files))) else None


def names_in(config: Config) -> list[Name]:
    """Every setting that names a file or code, in field order. What comes with ROLL is not named so."""
    return list(_walk(config, ()))


def with_names(config: Config, values: Mapping[Keys, str]) -> Config:
    """The config with other values of some of its names."""
    for keys, value in values.items():
        config = cast(Config, _replaced(config, keys, value))
    return config


def with_absolute_paths(config: Config) -> Config:
    """The config as workers can follow it whatever their working directory is: its root is absolute, and so are the
    models and chat templates that are on this machine."""
    root = root_of(config)
    found = {}
    for name in names_in(config):
        if name.kind == "model" and (path := find_local(name.value, root)) is not None:
            found[name.keys] = str(path)
        elif name.keys[-1] == "chat_template":
            found[name.keys] = str(find_file(name.value, root))
    return with_names(config.model_copy(update={"root": root}), found)


def find_local(name: str, root: str | os.PathLike[str] | None) -> Path | None:
    """A model's or run's folder or file: one beside the YAML, or else in the working directory; None if there is none."""
    if not name or name in BUILTIN_MODELS:
        return None
    for folder in (working_copy(root), Path.cwd()):
        path = Path(os.path.normpath(folder / Path(name).expanduser()))
        if path.exists():
            return path
    return None


def rebased_name(name: Name, folder: str, root: str) -> str:
    """A name that is relative to `folder`, written so that it is found from `root`: `f.py:x` as `../f.py:x`."""
    file = name.file
    if name.kind in ("dataset", "model") and (not os.path.exists(os.path.join(folder, os.path.expanduser(file)))):
        return name.value
    if name.kind == "code" and not file:
        module_or_file, _, attribute = name.value.rpartition(":")
        module = Path(folder, f"{module_or_file}.py")
        if "." in module_or_file or not module.is_file():
            return name.value
        return f"{os.path.relpath(module, root)}:{attribute}"
    if not file or os.path.isabs(os.path.expanduser(file)):
        return name.value
    moved = os.path.relpath(os.path.join(folder, file), root)
    before, _, after = name.value.rpartition(file)
    return f"{before}{moved}{after}"


def _walk(section: Section, above: Keys) -> Iterator[Name]:
    if isinstance(section, SourceConfig | DataConfig):
        yield from _names_in_source(section, above)
    elif isinstance(section, RewardRule | RewardPart) and is_code(section.name):
        yield Name((*above, "name"), section.name, "code")
    elif isinstance(section, ModelConfig | RoleModel):
        yield from _names_in_model(section, above)
    elif isinstance(section, RolloutConfig | AlgorithmConfig | DomainConfig | RunConfig | RoleConfig | Config):
        yield from _code_in(section, above)
    for key in type(section).model_fields:
        yield from _walk_value(getattr(section, key), (*above, key))


def _walk_value(value: Any, keys: Keys) -> Iterator[Name]:
    if isinstance(value, Section):
        yield from _walk(value, keys)
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, Section):
                yield from _walk(item, (*keys, key))
    elif isinstance(value, tuple | list):
        for position, item in enumerate(value):
            if isinstance(item, Section):
                yield from _walk(item, (*keys, position))


def _names_in_model(model: ModelConfig | RoleModel, above: Keys) -> Iterator[Name]:
    if model.path and model.path not in BUILTIN_MODELS:
        yield Name((*above, "path"), model.path, "model")
    if model.chat_template is not None:
        yield Name((*above, "chat_template"), model.chat_template, "file")


def _code_in(section: Section, above: Keys) -> Iterator[Name]:
    for key in ("filter", "task_order", "policy", "early_stop", "loss", "name", "pipeline", "strategy", "trackers"):
        value = getattr(section, key, None)
        if isinstance(value, str) and is_code(value):
            yield Name((*above, key), value, "code")
        elif isinstance(value, tuple):
            yield from (Name((*above, key, n), item, "code") for n, item in enumerate(value) if is_code(item))


def _names_in_source(source: SourceConfig | DataConfig, above: Keys) -> Iterator[Name]:
    name, options = source.source, source.options
    if name.startswith(HUB) or ("/" in name and not name.endswith(TABLE_FILES) and ":" not in name):
        yield Name((*above, "source"), name, "dataset")
    elif name.endswith(TABLE_FILES):
        yield Name((*above, "source"), name, "file")
    elif is_code(name):
        yield Name((*above, "source"), name, "code")
    held_out = options.get("held_out")
    if isinstance(held_out, str) and held_out.endswith(TABLE_FILES) and not is_code(name):
        yield Name((*above, "options", "held_out"), held_out, "file")
    if name in ("environment", "demonstrations"):
        yield from _of_environment(options, (*above, "options"))
    elif name == "dagger":
        runs = options.get("runs")
        if isinstance(runs, str):
            yield Name((*above, "options", "runs"), runs, "run")
        elif isinstance(runs, list | tuple):
            yield from (Name((*above, "options", "runs", n), run, "run") for n, run in enumerate(runs))


def _of_environment(options: Mapping[str, Any], above: Keys) -> Iterator[Name]:
    name = options.get("name")
    if not isinstance(name, str):
        return
    if is_code(name):
        yield Name((*above, "name"), name, "code")
    for option, kind in named_in_options(name).items():
        value = options.get(option)
        if isinstance(value, str) and value and (kind == "file" or is_code(value)):
            yield Name((*above, option), value, kind)


def _replaced(node: Any, keys: Keys, value: str) -> Any:
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, Section):
        return node.model_copy(update={str(key): _replaced(getattr(node, str(key)), rest, value)})
    if isinstance(node, dict):
        return {**node, key: _replaced(node[key], rest, value)}
    items = [_replaced(item, rest, value) if position == key else item for position, item in enumerate(node)]
    return tuple(items) if isinstance(node, tuple) else items
