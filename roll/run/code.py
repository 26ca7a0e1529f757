"""The code that a run was trained with, kept in its folder.

    runs/run/code/
      manifest.json    every piece of user code: its setting, name, file and digest; packages; data files
      files/           copies of the user's modules, with the project's folders
      reward.pkl       a reward that was passed in Python; also tasks.pkl and chats.pkl
      before_step_12/  the former content, until the run resumed with other code at step 12

The user's code is: the modules in the folder of the configuration, and in the folders of other files that it names.
Installed packages are recorded by name and version, never copied. Data files are recorded by digest, never copied.

A run's folder must be trusted like code: evaluating or resuming the run executes these files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from roll.atomic_files import atomic_write, to_json
from roll.config.errors import UserError
from roll.config.file_modes import inherit_folder_mode_recursively
from roll.config.root import Name, is_object, names_in, root_of, with_names
from roll.config.schema import Config
from roll.config.user_code import find_file, imports_from, is_user_file
from roll.config.validation import has_rewards
from roll.config.version import __version__
from roll.run.code_digest import digest_of, file_of, source_of
from roll.run.code_files import (
    common_folder,
    distribution_of,
    files_named_by,
    files_of_code,
    is_user_code,
    loaded_files,
    packages_of,
)

FOLDER, MANIFEST, FILES = "code", "manifest.json", "files"
FORMAT = 1
MAX_BYTES = 32 << 20
"""Maximum size of the code that a run copies; larger modules are recorded by their digest only."""
_MAX_DATA_BYTES = 4 << 20
"""Maximum size of a copied data file that code reads; for a larger one the copy has a link."""
FULL_DIGEST_BYTES = 1 << 30
"""Data files up to this size are hashed completely, larger ones by their first and last `_END_BYTES`."""
_END_BYTES = 64 << 20
_KEY_PACKAGES = ("torch", "transformers", "numpy", "ray", "vllm")
SETTINGS = {"reward": ("reward", "name"), "tasks": ("tasks", "source"), "chats": ("data", "source")}
"""The settings that objects passed in Python replace."""
Given = Mapping[str, Any]
"""Objects passed in Python, by `reward`, `tasks` and `chats`."""


@dataclass(frozen=True)
class Piece:
    """A piece of user code, and the setting that names it."""

    setting: str
    name: str
    """As written in the configuration; for an object, its Python name."""
    kind: Literal["file", "package", "object"]
    qualified_name: str = ""
    file: str = ""
    """Its file; relative paths are in `files/`."""
    digest: str = ""
    """Digest of the file, or of an object's code."""
    package: str = ""
    """The installed distribution that it is from, with its version."""
    pickle: str = ""
    """For an object, its pickle in this folder; empty if it could not be pickled."""
    written: str = ""
    """For an object, the value in the configuration that it replaces."""
    source: str = ""
    """For an object, its source if there is one."""

    @property
    def label(self) -> str:
        """The setting and the name in short: `reward near.py:near`."""
        return f"{self.setting.removesuffix('.name').removesuffix('.source')} {self.name}"


@dataclass(frozen=True)
class CodeFile:
    """A module of the user's."""

    path: str
    digest: str
    bytes: int
    serves: tuple[str, ...] = ()
    """The settings whose code it belongs to; empty for a module that the process imported for another reason."""
    copied: bool = True
    compared: bool = True
    """Whether a run resumes only with the same file. A script is not compared, because the objects that it passes are;
    nor is a file that code names, because the code may write it as well as read it."""


@dataclass(frozen=True)
class DataFile:
    """A data file that the configuration names."""

    setting: str
    path: str
    """As written in the configuration."""
    digest: str
    bytes: int


@dataclass(frozen=True)
class CodeManifest:
    root: str
    """The configuration's folder when the run was started."""
    base: str
    """The folder that file paths are relative to, as a path from the root."""
    root_from_run: str
    """The root as a path from the run's folder."""
    folders: tuple[str, ...] = ()
    """The folders that modules are imported from, as paths from the base."""
    pieces: tuple[Piece, ...] = ()
    files: tuple[CodeFile, ...] = ()
    data: tuple[DataFile, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    from_step: int = 0
    """The step from which this code was used."""
    before: tuple[str, ...] = ()
    """Folders next to this manifest with the code used before."""
    format: int = FORMAT

    @property
    def root_in_base(self) -> str:
        root = Path(self.root)
        return os.path.relpath(root, os.path.normpath(root / self.base))


@dataclass(frozen=True)
class Difference:
    """Something that has changed since the run was started."""

    what: str
    is_data: bool = False

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Recording:
    """The code of a run, ready to be written."""

    manifest: CodeManifest
    sources: Mapping[str, Path]
    """Files to copy, by their path in `files/`."""
    pickles: Mapping[str, bytes]
    warnings: tuple[str, ...] = ()
    """Warnings about what could not be kept."""

    @classmethod
    def of(cls, config: Config, given: Given, run: Path, previous: RunCode | None = None) -> Recording:
        """The code of a prepared config and of the objects given with it, as the files are now. An object that is not
        given is that of `previous`, the code that the run recorded before."""
        given = {name: value for name, value in given.items() if value is not None}
        root = Path(root_of(config)).resolve()
        names = [name for name in names_in(config) if not _is_replaced(name, given)]
        code = [(name, _file_of(name, root)) for name in names if name.kind == "code"]
        folders = list(dict.fromkeys([root, *_folders_outside(code, given, root)]))
        base = common_folder(folders)
        pieces, files_by_setting = _pieces(code, root, base, folders)
        objects, pickles, warnings = _objects(config, given, files_by_setting)
        for piece in previous.objects if previous is not None else []:
            if OBJECT_OF_SETTING[piece.setting] not in given and previous is not None:
                objects.append(piece)
                pickles |= {piece.pickle: (previous.folder / piece.pickle).read_bytes()} if piece.pickle else {}
        script = _script()
        files = [file for file in _all_files(files_by_setting, folders) if not file.is_relative_to(run.resolve())]
        uncompared = {*files_named_by(files, folders), *([script] if script else [])}
        files += sorted(file for file in uncompared - {*files, script} if not file.is_relative_to(run.resolve()))
        recorded, sources, too_large = _code_files(files, files_by_setting, base, uncompared)
        if too_large:
            warnings.append(
                f"the run keeps no copy of {', '.join(too_large)}: its code may have {MAX_BYTES >> 20} MB, so they are "
                "recorded by digest only"
            )
        manifest = CodeManifest(
            root=str(root),
            base=os.path.relpath(base, root),
            root_from_run=os.path.relpath(root, run.resolve()),
            folders=tuple(os.path.relpath(folder, base) for folder in folders),
            pieces=(*pieces, *objects),
            files=recorded,
            data=tuple(_data_files(names, root)),
            packages=_versions(files),
        )
        return cls(manifest, sources, pickles, tuple(warnings))

    def write(self, run: Path) -> None:
        """Writes it into a run's folder that has no code yet."""
        temporary = run / f".{FOLDER}.new"
        self._write_to(temporary, self.manifest)
        temporary.rename(run / FOLDER)

    def replace(self, run: Path, from_step: int) -> None:
        """Replaces the code in a run's folder; the former code is kept inside it."""
        temporary, current = run / f".{FOLDER}.new", run / FOLDER
        old = RunCode.open(run)
        name = f"before_step_{from_step}"
        before = () if old is None else old.manifest.before
        while name in before:
            name += "_again"
        self._write_to(temporary, replace(self.manifest, from_step=from_step, before=(*before, *([name] if old else []))))
        if old is not None:
            for former in before:
                shutil.move(current / former, temporary / former)
            current.rename(temporary / name)
        temporary.rename(current)

    def _write_to(self, folder: Path, manifest: CodeManifest) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / FILES / manifest.root_in_base).mkdir(parents=True)
        for path, source in self.sources.items():
            copy = folder / FILES / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        for file in manifest.files:
            if not file.copied and not file.compared:  # large data that the code reads: a link to it
                copy = folder / FILES / file.path
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(os.path.normpath(Path(manifest.root) / manifest.base / file.path))
        for name, content in self.pickles.items():
            atomic_write(folder / name, content)
        atomic_write(folder / MANIFEST, to_json(asdict(manifest), indent=True) + "\n")
        inherit_folder_mode_recursively(folder)


@dataclass(frozen=True)
class RunCode:
    """The code in a run's folder."""

    folder: Path
    manifest: CodeManifest

    @classmethod
    def open(cls, run: Path) -> RunCode | None:
        """The code of the run at `run`; None if the run recorded none."""
        folder = Path(os.path.abspath(run / FOLDER))
        temporary = folder.with_name(f".{FOLDER}.new")
        if not folder.exists() and (temporary / MANIFEST).is_file() and any(temporary.glob("before_step_*")):
            folder = temporary  # a crash came between the two renames
        try:
            found = json.loads((folder / MANIFEST).read_bytes())
            if found["format"] != FORMAT:
                raise UserError(f"{folder / MANIFEST} is of format {found['format']}: use the ROLL that wrote it")
            return cls(folder, _manifest(found))
        except FileNotFoundError:
            return None
        except (RecursionError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / MANIFEST} is damaged: {error}") from error

    @property
    def objects(self) -> list[Piece]:
        return [piece for piece in self.manifest.pieces if piece.kind == "object"]

    @property
    def label(self) -> str:
        """The pieces in short: `reward near.py:near, tasks mine.py:tasks`."""
        return ", ".join(piece.label for piece in self.manifest.pieces)

    def with_objects(self, config: Config, given: Given | None = None) -> Config:
        """The config with the objects that the run was given in Python, as the run keeps them; those in `given`
        need not be kept."""
        for piece in self.objects:
            name = OBJECT_OF_SETTING[piece.setting]
            if not piece.pickle and name not in (given or {}):
                raise UserError(
                    f"the run was given {name} in Python ({piece.name}), which could not be kept in {self.folder}: pass "
                    f"{name} again"
                )
            config = _with_object(config, name, f"{self.folder / f'{name}.pkl'}:{piece.name}")
        return config

    def with_recorded_code(self, config: Config) -> Config:
        """The config with all code from the run's copy. Data files, and code that the run was not trained with, keep
        their paths."""
        recorded = {(piece.setting, piece.name) for piece in self.manifest.pieces if piece.kind != "object"}
        files, root = self.folder / FILES, root_of(config)
        names: dict[Any, str] = {}
        for name in names_in(config):
            if name.kind == "code" and (name.setting, name.value) in recorded:
                piece = next(p for p in self.manifest.pieces if (p.setting, p.name) == (name.setting, name.value))
                if name.file and os.path.isabs(os.path.expanduser(name.file)) and piece.kind == "file":
                    names[name.keys] = f"{files / piece.file}:{name.value.rpartition(':')[2]}"
            elif name.file and (name.kind in ("code", "file") or find_file(name.file, root).exists()):
                moved = str(find_file(name.file, root))
                before, _, after = name.value.rpartition(name.file)
                names[name.keys] = f"{before}{moved}{after}"
        copied = os.path.normpath(files / self.manifest.root_in_base)
        return self.with_objects(with_names(config, names).model_copy(update={"root": copied}))

    def differences(self, config: Config, given: Given) -> list[Difference]:
        """What has changed: code files and objects by their digests, and data files."""
        given = {name: value for name, value in given.items() if value is not None}
        root = Path(root_of(config)).resolve()
        found = [*self._changed_files(root), *self._changed_objects(given), *self._changed_data(config, root)]
        return list(dict.fromkeys(found))

    def _changed_files(self, root: Path) -> Iterator[Difference]:
        base = Path(os.path.normpath(root / self.manifest.base))
        for file in self.manifest.files:
            if not file.compared:
                continue
            current_file = base / file.path
            serves = f" ({', '.join(file.serves)})" if file.serves else ""
            if not current_file.is_file():
                yield Difference(f"{current_file}{serves} is gone")
            elif _digest(current_file) != file.digest:
                yield Difference(f"{current_file}{serves} has changed")

    def _changed_objects(self, given: Given) -> Iterator[Difference]:
        recorded = {piece.setting: piece for piece in self.objects}
        for name, value in given.items():
            setting = ".".join(SETTINGS[name])
            previous = recorded.get(setting)
            if previous is None:
                now = next((p.name for p in self.manifest.pieces if p.setting == setting), "what the configuration names")
                yield Difference(f"{name} is now given in Python ({object_name(value)}), but was {now}")
            elif digest_of(value) != previous.digest:
                origin = f" of {previous.file}" if previous.file else ""
                yield Difference(
                    f"{name}, {object_name(value)}, is not the {previous.name}{origin} that the run was given"
                )

    def _changed_data(self, config: Config, root: Path) -> Iterator[Difference]:
        now = {name.setting: name for name in names_in(config)}
        for data in self.manifest.data:
            if data.setting not in now:
                continue
            file = find_file(now[data.setting].file, root)
            if not file.is_file():
                yield Difference(f"{file} ({data.setting}) is gone", True)
            elif file.stat().st_size != data.bytes or _digest(file) != data.digest:
                yield Difference(f"{file} ({data.setting}) has changed", True)


def reward_of(config: Config, code: RunCode | None) -> str | None:
    """The reward of a run in short; None if it has none."""
    for piece in code.objects if code is not None else []:
        if piece.setting == "reward.name":
            return f"{piece.name} (given in Python)"
    if not has_rewards(config):
        return None
    rules = {f"{name}: ": domain.reward for name, domain in config.domains.items()} or {"": config.reward}
    return ", ".join(f"{name}{rule.label}" for name, rule in rules.items())


OBJECT_OF_SETTING = {".".join(keys): name for name, keys in SETTINGS.items()}


def object_name(value: Any) -> str:
    """The Python name of a function or an object."""
    name: str = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name


def config_to_save(config: Config, given: Given) -> Config:
    """The config as saved in a run's folder: an object that was given is named in it."""
    for name, value in given.items():
        if value is not None:
            config = _with_object(config, name, f"{FOLDER}/{name}.pkl:{object_name(value)}")
    kept = {name.keys: name.value for name in names_in(config) if is_object(name.value)}
    relative = {keys: "/".join((FOLDER, *Path(value).parts[-1:])) for keys, value in kept.items()}
    return with_names(config, relative)


def load_object(name: str) -> Any:
    """Loads an object that a run keeps, given its absolute name. Executes its code."""
    import pickle

    file = Path(name.rpartition(":")[0])
    code = RunCode.open(file.parent.parent)
    folders = [] if code is None else [code.folder / FILES / folder for folder in reversed(code.manifest.folders)]
    copied = [Path(os.path.normpath(folder)) for folder in folders if folder.is_dir()]
    try:
        with imports_from(*copied):
            return pickle.loads(file.read_bytes())
    except Exception as error:
        raise UserError(f"{file} cannot be loaded ({type(error).__name__}: {error}): pass it in Python again") from error


def _with_object(config: Config, name: str, value: str) -> Config:
    section, key = SETTINGS[name]
    updates: dict[str, Any] = {key: value}
    if name == "reward":
        updates |= {"options": {}, "parts": {}}
    changed = getattr(config, section).model_copy(update=updates)
    return config.model_copy(update={section: changed})


def _is_replaced(name: Name, given: Given) -> bool:
    return is_object(name.value) or name.keys[0] in {SETTINGS[name][0] for name in given}


def _file_of(name: Name, root: Path) -> Path | None:
    """The file of user code; None for a module without a file."""
    if name.file:
        return find_file(name.file, root).resolve()
    file = getattr(sys.modules.get(name.value.rpartition(":")[0]), "__file__", None)
    return None if file is None else Path(file).resolve()


def _folders_outside(code: Iterable[tuple[Name, Path | None]], given: Given, root: Path) -> Iterator[Path]:
    """Folders of the user's code outside the root: those of files that the config names, and those of the modules of
    given objects."""
    for name, file in code:
        if name.file and file is not None and not file.is_relative_to(root) and is_user_file(file):
            yield file.parent
    for value in given.values():
        file = file_of(value)
        if file is not None and not file.is_relative_to(root):
            module = getattr(value, "__module__", None) or type(value).__module__
            depth = 0 if module == "__main__" else module.count(".") + (file.name == "__init__.py")
            yield file.parents[depth] if depth < len(file.parents) else file.parent


def _pieces(
    code: Iterable[tuple[Name, Path | None]], root: Path, base: Path, folders: Sequence[Path]
) -> tuple[list[Piece], dict[str, Path]]:
    """The pieces that the config names, and the user's files among them by setting."""
    pieces, files_by_setting = [], {}
    for name, file in code:
        attribute = name.value.rpartition(":")[2]
        if file is not None and is_user_code(file, folders):
            files_by_setting[name.setting] = file
            path = str(file.relative_to(base))
            pieces.append(Piece(name.setting, name.value, "file", attribute, path, _digest(file)))
        else:
            found = distribution_of(name.value.rpartition(":")[0])
            package = " ".join(found) if found else ""
            digest = _digest(file) if file is not None and file.is_file() else ""
            pieces.append(Piece(name.setting, name.value, "package", attribute, str(file or ""), digest, package))
    return pieces, files_by_setting


def _objects(
    config: Config, given: Given, files_by_setting: dict[str, Path]
) -> tuple[list[Piece], dict[str, bytes], list[str]]:
    """The given objects, their pickles, and warnings about what could not be kept; adds their files to
    `files_by_setting`."""
    import cloudpickle

    pieces: list[Piece] = []
    pickles: dict[str, bytes] = {}
    warnings: list[str] = []
    for name, value in given.items():
        setting, file = ".".join(SETTINGS[name]), file_of(value)
        section, key = SETTINGS[name]
        pickle_name = f"{name}.pkl"
        try:
            pickles[pickle_name] = cast(bytes, cloudpickle.dumps(value))
        except Exception as error:
            pickle_name = ""
            warnings.append(
                f"the run cannot keep {name} ({object_name(value)}: {type(error).__name__}: {error}): to evaluate or "
                f"resume it, pass {name} again"
            )
        if file is not None:
            files_by_setting[setting] = file
        qualified = f"{getattr(value, '__module__', type(value).__module__)}.{object_name(value)}"
        written = str(getattr(getattr(config, section), key))
        piece = Piece(setting, object_name(value), "object", qualified, str(file or ""), digest_of(value))
        pieces.append(replace(piece, pickle=pickle_name, written=written, source=source_of(value)))
    return pieces, pickles, warnings


def _all_files(files_by_setting: Mapping[str, Path], folders: Sequence[Path]) -> list[Path]:
    return sorted({*files_of_code(files_by_setting.values(), folders), *loaded_files(folders)})


def _code_files(
    files: Sequence[Path], files_by_setting: Mapping[str, Path], base: Path, uncompared: Collection[Path]
) -> tuple[tuple[CodeFile, ...], dict[str, Path], list[str]]:
    """The records of the files, the files to copy, and the names of those that are too large."""
    of_setting = {setting: set(files_of_code([file], [base])) for setting, file in files_by_setting.items()}
    recorded, sources, too_large, budget = [], {}, [], MAX_BYTES
    for file in files:
        path, size = str(file.relative_to(base)), file.stat().st_size
        serves = tuple(setting for setting, setting_files in of_setting.items() if file in setting_files)
        fits = size <= min(budget, MAX_BYTES if file.suffix == ".py" else _MAX_DATA_BYTES)
        if fits:
            sources[path] = file
            budget -= size
        elif file not in uncompared:
            too_large.append(path)
        recorded.append(CodeFile(path, _digest(file), size, serves, copied=fits, compared=file not in uncompared))
    return tuple(recorded), sources, too_large


def _script() -> Path | None:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve() if file else None


def _data_files(names: Iterable[Name], root: Path) -> Iterator[DataFile]:
    for name in names:
        if name.kind == "file":
            file = find_file(name.file, root)
            if file.is_file():
                yield DataFile(name.setting, name.value, _digest(file), file.stat().st_size)


def _digest(file: Path) -> str:
    """Digest of a file's content; for more than a gigabyte, of its two ends and its size."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= FULL_DIGEST_BYTES:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        ends = hashlib.sha256(opened.read(_END_BYTES))
        opened.seek(-_END_BYTES, os.SEEK_END)
        ends.update(opened.read())
        ends.update(str(size).encode())
        return f"ends:{ends.hexdigest()}"


def _versions(files: Sequence[Path]) -> dict[str, str]:
    """Versions of Python, of the packages that training depends on, and of those that the user's code imports."""
    found = {"python": platform.python_version(), "roll": __version__}
    for package in _KEY_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | packages_of(files)


def _manifest(found: dict[str, Any]) -> CodeManifest:
    fields = dict(found)
    fields["pieces"] = tuple(Piece(**piece) for piece in found["pieces"])
    fields["files"] = tuple(CodeFile(**{**file, "serves": tuple(file["serves"])}) for file in found["files"])
    fields["data"] = tuple(DataFile(**data) for data in found["data"])
    for key in ("folders", "before"):
        fields[key] = tuple(found[key])
    return CodeManifest(**fields)
