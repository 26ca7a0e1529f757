"""The files of the user's code: those that a configuration names, and everything that they import.

Invariant: every file is in one of the folders of the user's code, and does not belong to Python, an installed package or
a virtual environment. Imports are read from the source, including those inside functions, so that a module that a reward
imports at its first call is found before that. A module whose name is only known at run time is found if this process has
imported it.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from roll.config.user_code import is_user_file

_EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "node_modules",
    "__pycache__",
    ".venv",
    "venv",
    ".git",
    ".tox",
    ".nox",
}
_NAME = re.compile(r"[\w*~ ][\w.*/ -]*")
"""A relative path. `..` leads out of the folder, and an absolute path is not in it."""
_MAX_NAME_CHARS = 200
_SUFFIXES = (".py", ".so", ".pyd")


def files_of_code(entries: Iterable[Path], folders: Sequence[Path]) -> list[Path]:
    """The entries and all files in `folders` that they import, directly or through others, sorted. Imports are searched
    in the folder of the importing file and in `folders`."""
    found: set[Path] = set()
    queue = [entry.resolve() for entry in entries]
    while queue:
        file = queue.pop()
        if file in found or not is_user_code(file, folders):
            continue
        found.add(file)
        if file.suffix == ".py":
            queue += _imported_by(file, folders)
    return sorted(found)


def loaded_files(folders: Sequence[Path]) -> list[Path]:
    """The files in `folders` of modules that this process has imported, sorted, without the running script."""
    files = set()
    starts = tuple(os.path.join(folder, "") for folder in folders)
    resolved_folders: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name not in ("__main__", "__mp_main__") and isinstance(file, str) and file.endswith(_SUFFIXES):
            resolved = _resolved(file, resolved_folders)
            if resolved.startswith(starts):  # asked first: thousands of modules are elsewhere
                files.add(Path(resolved))
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    files.discard(Path(script).resolve() if script else Path())
    return sorted(file for file in files if is_user_code(file, folders))


def _resolved(file: str, folders: dict[str, str]) -> str:
    """`os.path.realpath`, with the folders that are resolved already."""
    folder, name = os.path.split(file)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    resolved = os.path.join(folders[folder], name)
    return os.path.realpath(resolved) if os.path.islink(resolved) else resolved


def files_named_by(modules: Iterable[Path], folders: Sequence[Path]) -> list[Path]:
    """Files next to the modules, other than code, whose names are in the source: `Path(__file__).with_name("words.txt")`,
    `open("data/words.txt")`, `f"{split}.jsonl"`. Code that runs from a copy needs them there too."""
    found: set[Path] = set()
    for module in modules:
        texts = _texts(module)
        starts = [module.parent, *(folder for folder in folders if module.is_relative_to(folder))]
        subfolders = [start / text for start in starts for text in texts if "*" not in text and (start / text).is_dir()]
        for folder in dict.fromkeys([*starts, *subfolders]):
            for text in texts:
                matches = folder.glob(text) if "*" in text else (folder / text,)
                found |= {file.resolve() for file in matches if file.suffix not in ("", ".py") and file.is_file()}
    return sorted(file for file in found if is_user_code(file, folders))


def _texts(module: Path) -> set[str]:
    """String literals of a module that could name a file or a folder; `*` replaces the variable parts of f-strings."""
    try:
        tree = ast.parse(module.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return set()
    texts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            texts.add(re.sub(r"\*+", "*", "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value.replace("*", ""))
    return {text for text in texts if text.strip("*./") and len(text) < _MAX_NAME_CHARS and _NAME.fullmatch(text)}


def is_user_code(file: Path, folders: Sequence[Path]) -> bool:
    """Whether a file is part of the user's code."""
    return (
        not _EXCLUDED_FOLDERS & set(file.parts)  # first: a virtual environment in the folder has thousands of files
        and any(file.is_relative_to(folder) for folder in folders)
        and is_user_file(file)
        and file.is_file()
        and not _is_copy(file)
    )


def _is_copy(file: Path) -> bool:
    """Whether a file is in a run's copy of code."""
    copies = (folder for folder in file.parents if folder.name == "files" and folder.parent.name == "code")
    return any((folder.parent / "manifest.json").is_file() for folder in copies)


def packages_of(files: Sequence[Path]) -> dict[str, str]:
    """Versions of the installed distributions that the files import, by name, sorted."""
    imported = {
        name.partition(".")[0] for file in files if file.suffix == ".py" for name, dots in _imports(file) if not dots
    }
    local_names = {file.stem for file in files} | {folder.name for file in files for folder in file.parents}
    found = [distribution_of(top) for top in imported - local_names - set(sys.stdlib_module_names)]
    return dict(sorted(package for package in found if package is not None))


def distribution_of(module: str) -> tuple[str, str] | None:
    """Name and version of the installed distribution of a module."""
    top = module.partition(".")[0]
    try:
        return top, importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:  # its distribution has another name
        names = _distributions_by_module(tuple(sys.path)).get(top)
        return (names[0], importlib.metadata.version(names[0])) if names else None


@functools.lru_cache(maxsize=1)
def _distributions_by_module(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """The installed distributions of each top-level module. Reading all of them takes about 0.2 s."""
    return importlib.metadata.packages_distributions()


def _imported_by(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    for name, level in _imports(file):
        if level:
            start = file.parents[level - 1] if level <= len(file.parents) else file.parent
            yield from _module_files(name, start)
        else:
            for folder in dict.fromkeys([file.parent, *folders]):
                yield from _module_files(name, folder)


def _imports(file: Path) -> set[tuple[str, int]]:
    """The modules that a file imports, each with the number of dots before its name. `from a import b` may mean the
    module `a.b`, so both are included."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return set()
    found: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, 0) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {(module, node.level)} if module else {("", node.level)}
            found |= {(f"{module}.{alias.name}".lstrip("."), node.level) for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Call) and (name := _named_in_call(node)):
            found.add((name, 0))
    return found


def _named_in_call(node: ast.Call) -> str:
    """The module of `import_module("name")` or `__import__("name")`."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called not in ("import_module", "__import__") or not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    value = node.args[0].value
    return value if isinstance(value, str) and not value.startswith(".") else ""


def _module_files(name: str, folder: Path) -> Iterator[Path]:
    """The file of a module and those of its parent packages, as far as they are in the folder."""
    current = folder
    parts = name.split(".") if name else []
    if not parts:
        yield from _existing(folder / "__init__.py")
    for part in parts:
        yield from _existing(current / f"{part}.py", current / part / "__init__.py")
        current = current / part
        if not current.is_dir():
            return


def _existing(*files: Path) -> Iterator[Path]:
    for file in files:
        if file.is_file():
            yield file.resolve()


def common_folder(folders: Iterable[Path]) -> Path:
    """The innermost folder that contains all of them."""
    return Path(os.path.commonpath([str(folder) for folder in folders]))
