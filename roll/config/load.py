"""Reading a configuration, writing it out, and comparing two."""

from __future__ import annotations

import math
import os
import select
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any, cast

from pydantic import ValidationError

from roll.config.error_messages import (
    Mistake,
    Origin,
    format_bare_value,
    format_value,
    mistakes_of,
    origin_at,
    unknown_key,
    wrong_value,
)
from roll.config.errors import UserError
from roll.config.renames import config_of_run
from roll.config.root import is_object, moved_root, names_in, rebased_name, run_of, with_names
from roll.config.schema import Config, Section
from roll.config.schema_tree import UNKNOWN, accepts_null, child_type, dotted, section_in, type_at, unwrapped
from roll.config.secrets import KNOWN, redacted, redacted_with_references, secrets_in
from roll.config.suggest import either, near
from roll.config.yaml_document import MAX_BYTES, Document, Path, YamlError, parse, write

_OVERRIDE_CHARS = 120
_PIPE_WAIT_S = 10
_OVERRIDES_RANK = 1 << 40  # above every line number: overrides are listed after the file


def load_config(
    source: Config | str | FilePath | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Config:
    """The configuration of `source`, a YAML file, a mapping or another configuration, with `overrides` applied in order.

    Overrides are a list of `"key.sub=value"`, each value as in YAML, or a mapping of settings, with sections as mappings
    or keys with dots: `{"train": {"lr": 1e-5}}` or `{"train.lr": 1e-5}`. Names of files and code in a YAML file are
    relative to its folder, those in a mapping and in overrides to the working directory. Raises one `UserError` that
    lists every mistake, one line each.

        load_config("examples/tiny.yaml", ["train.lr=1e-5", "run=runs/a"])
        load_config({"model": "tiny", "tasks": "echo"}, {"train": {"steps": 10}})
    """
    try:
        return _load(source, overrides)
    except RecursionError:
        raise UserError("the configuration is nested too deeply, or holds itself: write plain settings") from None


def _load(source: Any, overrides: Any) -> Config:
    draft = _Draft(source)
    if isinstance(overrides, Mapping):
        for number, (name, value) in enumerate(overrides.items()):
            draft.set(name, value, Origin(_OVERRIDES_RANK + number, ""))
        return draft.finish()
    for number, text in enumerate(_override_texts(overrides)):
        draft.override(text, Origin(_OVERRIDES_RANK + number, f"override {_shortened(text)}"))
    return draft.finish()


def _shortened(text: str) -> str:
    """An override as messages show it: on one line that can be read, without secrets."""
    key, equals, value = text.partition("=")
    KNOWN.learn(value, name := key.rpartition(".")[2])
    line = f"{key}{equals}{redacted(value, name)}".replace("\n", " ")
    return line if len(line) <= _OVERRIDE_CHARS else f"{line[: _OVERRIDE_CHARS - 1]}…"


def _override_texts(overrides: Any) -> list[str]:
    """Overrides that are a list of texts, and nothing else."""
    form = 'write a list of "key.sub=value", as in ["train.lr=1e-5"], or a dict, as in {"train.lr": 1e-5}'
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        raise UserError(f"overrides is {overrides!r}: {form}")
    texts = list(overrides)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"overrides has {text!r}: {form}")
    return texts


def dump_config(config: Config) -> str:
    """Every setting as YAML, in field order; `load_config` reads it back equal, wherever it is written. Only secrets that
    are written out are left out: who loads it must give them again. `${NAME}` stays."""
    try:
        return write(redacted(config.model_copy(update={"root": config.root or os.getcwd()}).model_dump()))
    except YamlError as error:
        raise UserError(f"the configuration cannot be written as YAML: {error}") from None


def redacted_config_yaml(config_yaml: str) -> str:
    """A saved configuration, of an older version perhaps, without the secrets that are written out in it."""
    data = parse(config_yaml).data
    return write(redacted(data)) if secrets_in(data) else config_yaml


def changed_keys(a: Config, b: Config) -> list[str]:
    """Dotted names of the settings whose values differ, in field order. Where their files lie is none of them: the same
    config in another folder has not changed, nor has one with another password."""
    return [dotted(path) for path in _differing(a, b, ()) if path != ("root",)]


def _differing(a: Section, b: Section, above: Path) -> Iterator[Path]:
    for name in type(a).model_fields:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, Section) and type(left) is type(right):
            yield from _differing(left, right, (*above, name))
        elif left != right and redacted_with_references(_as_plain_data(left), name) != redacted_with_references(
            _as_plain_data(right), name
        ):
            yield (*above, name)


def _as_plain_data(value: Any) -> Any:
    """Sections under names as the mappings that they are."""
    if isinstance(value, Section):
        return value.model_dump()
    return {key: _as_plain_data(item) for key, item in value.items()} if isinstance(value, dict) else value


class _Draft:
    """A configuration while it is read: plain data, where each value was written, and the mistakes so far.

    Sections in `tree` are always written out: short forms are expanded, empty sections are empty mappings.
    """

    def __init__(self, source: Any) -> None:
        self.mistakes: list[Mistake] = []
        self.origins: dict[Path, Origin] = {}
        self.default_origin = Origin(0, "")
        self.file: FilePath | None = None
        data: Any = source
        if not isinstance(source, (str, PurePath, Mapping, Config)):
            raise UserError(
                f"a configuration is {source!r:.100} ({type(source).__name__}): write the path of a YAML file, a dict or "
                "a roll.Config"
            )
        if isinstance(source, (str, PurePath)):
            self.file = FilePath(os.path.abspath(source))
            document = _read(FilePath(source))
            data = document.data if run_of(self.file) is None else config_of_run(document.data)
            self.default_origin = Origin(0, str(source))
            self.origins = {path: self._on_line(line) for path, line in document.lines.items()}
            for path, line, first in document.repeated:
                text = f"{dotted(path)} is written twice, first on line {first}: keep one"
                self.mistakes.append(Mistake(self._on_line(line), text))
        tree = _expanded(data, Config)
        if not isinstance(tree, dict):
            raise UserError(f"{source} holds {format_value(data)}, but takes settings, each on a line: `seed: 1`")
        self.tree: dict[Any, Any] = tree

    def _on_line(self, line: int) -> Origin:
        return Origin(line, f"{self.default_origin.label}:{line}")

    def override(self, text: str, origin: Origin) -> None:
        """Apply one `key.sub=value`."""
        name, equals, raw = text.partition("=")
        name, raw = name.strip(), raw.strip()
        path: Path = tuple(name.split("."))
        if name.startswith("-"):
            return self._refuse(origin, f"an override has no dashes: write {text.lstrip('-')}")
        if not all(path):
            return self._refuse(origin, "an override is written key.sub=value, as in train.lr=1e-5")
        kind = type_at(path)
        if kind is UNKNOWN:
            return self._refuse(origin, unknown_key(path))
        if not equals or not raw:
            example = f"as in {name}={_example(path)}" if section_in(kind) is None else "as in train.lr=1e-5"
            return self._refuse(origin, f"{name} has no value: an override is written key=value, {example}")
        try:
            value = _override_value(path, raw)
        except YamlError as error:
            return self._refuse(origin, f"the value of {name} is not readable YAML: {error.problem}")
        return self._set(path, value, origin)

    def set(self, name: Any, value: Any, origin: Origin) -> None:
        """Apply one setting, or a section's settings, of a Python program."""
        path: Path = tuple(name.split(".")) if isinstance(name, str) else (name,)
        if type_at(path) is UNKNOWN:
            return self._refuse(origin, unknown_key(path))
        return self._set(path, value, origin)

    def _set(self, path: Path, value: Any, origin: Origin) -> None:
        kind = type_at(path)
        tree = _expanded(value, kind)
        if section_in(kind) and (value is None or not isinstance(tree, dict)):
            return self._refuse(origin, wrong_value(path, value))
        return self._assign(path, tree, origin)

    def _refuse(self, origin: Origin, text: str) -> None:
        self.mistakes.append(Mistake(origin, text))

    def _assign(self, path: Path, value: Any, origin: Origin) -> None:
        """Set one value; a section's settings are set one by one, so that the others stay."""
        if section_in(type_at(path)) and isinstance(value, dict):
            for key, part in value.items():
                self._assign((*path, key), part, origin)
            return
        node = self.tree
        for end in range(1, len(path)):
            inner = node.setdefault(path[end - 1], {})
            if not isinstance(inner, dict):
                self._refuse(origin, f"{dotted(path[:end])} is {format_value(inner)} and holds no other values")
                return
            node = inner
        node[path[-1]] = value
        for inside in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[inside]
        self.origins[path] = origin

    def finish(self) -> Config:
        """The validated configuration, or a `UserError` with every mistake."""
        KNOWN.learn_environment()
        KNOWN.learn(self.tree)
        for path, value in _bools_and_nans(self.tree, ()):
            kind = unwrapped(type_at(path))
            if isinstance(value, float) and kind is not float:
                text = f"{dotted(path)} is .nan, which is no value of any setting: write a number"
                self.mistakes.append(Mistake(origin_at(path, self.origins, self.default_origin), text))
            elif kind in (int, float):
                origin = origin_at(path, self.origins, self.default_origin)
                self.mistakes.append(Mistake(origin, wrong_value(path, value)))
        config = None
        try:
            config = Config.model_validate(self.tree)
        except ValidationError as error:
            self.mistakes += mistakes_of(error, self.origins, self.default_origin)
        if config is None or self.mistakes:
            ordered = sorted(self.mistakes, key=lambda mistake: mistake.origin.rank)
            raise UserError("\n".join(dict.fromkeys(map(str, ordered))))
        return self._with_root(config)

    def _with_root(self, config: Config) -> Config:
        """The config with its root, from which names in the file and in overrides are both found."""
        run = run_of(self.file)
        from_working_directory = self.file is None or self._overridden(("root",)) or (run is not None and not config.root)
        base = os.getcwd() if from_working_directory else str(cast(FilePath, self.file).parent)
        root = os.path.normpath(os.path.join(base, os.path.expanduser(config.root)))
        if run is not None:
            root = root if os.path.isdir(root) else moved_root(run) or root
            config = config if self._overridden(("run", "dir")) else _in_folder(config, run)
        found = {}
        for name in names_in(config):
            if self._overridden(name.keys):
                found[name.keys] = rebased_name(name, os.getcwd(), root)
            elif run is not None and is_object(name.value):
                found[name.keys] = os.path.join(run, name.value)
        return with_names(config.model_copy(update={"root": root}), found)

    def _overridden(self, path: Path) -> bool:
        return origin_at(path, self.origins, self.default_origin).rank >= _OVERRIDES_RANK


def _in_folder(config: Config, run: FilePath) -> Config:
    """The config of a run that may have been started from another folder than this."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run)})})


def _read(path: FilePath) -> Document:
    try:
        return parse(_bytes_of(path).decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist{_files_near(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, but a configuration is a YAML file{_files_in(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): a configuration is a YAML file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except YamlError as error:
        position = f":{error.line}" + (f":{error.column}" if error.column else "") if error.line else ""
        raise UserError(f"{path}{position}: not readable as YAML: {error.problem}") from None


def _bytes_of(path: FilePath) -> bytes:
    """What a file or a pipe holds, as much of it as a configuration may be long."""
    with open(path, "rb", buffering=0, opener=_open_nonblocking) as file:
        kind = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISFIFO(kind):
            raise UserError(f"{path} is a device, but a configuration is a YAML file")
        parts: list[bytes] = []
        while sum(map(len, parts)) <= MAX_BYTES:
            if not select.select([file], [], [], _PIPE_WAIT_S)[0]:
                raise UserError(f"{path} is a pipe that nobody has written to for {_PIPE_WAIT_S} s: write to a YAML file")
            if not (part := file.read(MAX_BYTES + 1)):
                break
            parts.append(part)
    return b"".join(parts)


def _open_nonblocking(path: str, flags: int) -> int:
    """Opens a pipe also while nobody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _yaml_files(folder: FilePath) -> list[FilePath]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _files_near(path: FilePath) -> str:
    folder = path.parent
    if not folder.exists():
        return f", nor does its folder {folder}"
    names = {file.stem: file for file in _yaml_files(folder)}
    wanted = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if found := near(wanted, list(names)):
        return f"; did you mean {either([str(names[name]) for name in found])}?"
    return _files_in(folder)


def _files_in(folder: FilePath) -> str:
    files = [str(file) for file in _yaml_files(folder)][:5]
    return f"; there is {', '.join(files)}" if files else ""


def _expanded(value: Any, kind: Any) -> Any:
    """A copy in plain types, with short forms expanded and empty sections as empty mappings; a section that
    may be null stays null."""
    section = section_in(kind)
    if isinstance(value, Section):
        value = value.model_dump()
    if section and value is None:
        return None if accepts_null(kind) else {}
    if section and section.short and not isinstance(value, (Mapping, list, tuple)):
        value = {section.short: value}
    if isinstance(value, Mapping):
        return {key: _expanded(item, child_type(kind, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_expanded(item, child_type(kind, position)) for position, item in enumerate(value)]
    if hasattr(value, "__index__") and not isinstance(value, int):
        return int(value)  # of NumPy, say
    return str(value) if isinstance(value, PurePath) else value


def _override_value(path: Path, raw: str) -> Any:
    """The value an override means: YAML, except that what goes to a text setting is taken as it was typed."""
    section = section_in(type_at(path))
    target = (*path, section.short) if section and section.short else path
    is_text = unwrapped(type_at(target)) is str
    try:
        document = parse(raw)
    except YamlError:
        if not is_text:
            raise
        return raw
    value = document.data
    for repeated, _, _ in document.repeated:
        raise YamlError(f"{dotted((*path, *repeated))} is written twice: keep one")
    as_typed = is_text and value is not None and not isinstance(value, (dict, list)) and raw[0] not in "\"'"
    return raw if as_typed else value


def _example(path: Path) -> str:
    """A setting's default as it would be written in an override."""
    section = section_in(type_at(path[:-1]))
    default = section.model_fields[str(path[-1])].get_default(call_default_factory=True) if section else 1
    return format_bare_value(default)


def _bools_and_nans(value: Any, path: Path) -> Iterator[tuple[Path, bool | float]]:
    """Every true and false, which Python would let pass for 1 and 0, and every NaN, also in options of users' code: it
    equals nothing, so that no run with one could be resumed."""
    if isinstance(value, bool) or (isinstance(value, float) and math.isnan(value)):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _bools_and_nans(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _bools_and_nans(item, (*path, position))
