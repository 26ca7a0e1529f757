"""Selects the files of a folder that Ray sends to the nodes of a cluster: code and small data, without run folders and,
if the folder is too large, without model weights.

Ray packs the folder into one archive, hashes it and rejects 512 MiB and more (older versions 500).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from roll.config.errors import UserError

NOT_SENT = (
    *("runs", ".git", ".hg", ".venv", "venv", "node_modules", "__pycache__"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints", ".tox", "wandb"),
)
"""Names of folders that are never sent, at any depth."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack", ".distcp")
"""Suffixes of model files, which are left out if the folder would be too large with them."""
MOST_BYTES = 400 << 20
"""Limit of the unpacked size. Ray's limit is 512 MiB packed; the files are mostly text, which compresses well."""
_RUN = frozenset({"config.yaml", "ledger.log"})
_SHOWN = 5


def excluded(folder: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """The exclusions of a folder as lines of a .gitignore: caches and environments, run folders, and model files if the
    rest is too large."""
    found = [*NOT_SENT, *(_line(run, folder) + "/" for run in _runs(folder))]
    sizes = _sizes(folder)
    if sum(sizes.values()) <= most_bytes:
        return found
    return [*found, *(_line(file, folder) for file in sizes if file.suffix.lower() in WEIGHTS)]


def too_large_error(folder: Path, limit: str) -> UserError:
    """The error for a folder that Ray rejected as too large; it names the largest entries."""
    sizes: Counter[Path] = Counter()
    for file, size in _sizes(folder).items():
        if file.suffix.lower() not in WEIGHTS:
            sizes[folder / file.relative_to(folder).parts[0]] += size
    largest = ", ".join(f"{path.name} ({size / 2**20:,.0f} MiB)" for path, size in sizes.most_common(_SHOWN))
    return UserError(
        f"{folder} is too large to be sent to the nodes of the cluster ({limit}); the largest in it: {largest}. Move "
        "what workers do not need elsewhere, or name it in ray.runtime_env, as in ray.runtime_env={excludes: [/data]}, "
        "or in a .gitignore there"
    )


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folders that may be sent, each with its files. Run folders are skipped."""
    for path, folders, files in os.walk(folder):
        if set(files) >= _RUN and Path(path) != folder:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in NOT_SENT]
        yield Path(path), files


def _runs(folder: Path) -> list[Path]:
    found = []
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_SENT]
        if set(files) >= _RUN and Path(path) != folder:
            folders.clear()
            found.append(Path(path))
    return sorted(found)


def _sizes(folder: Path) -> dict[Path, int]:
    """Every file that may be sent, with its size in bytes."""
    sizes = {}
    for path, names in _walk(folder):
        for name in names:
            try:
                sizes[path / name] = (path / name).stat().st_size
            except OSError:  # deleted in the meantime, or a broken link
                continue
    return sizes


def _line(path: Path, folder: Path) -> str:
    """A path as a line of a .gitignore: relative to the folder, with special characters escaped."""
    name = path.relative_to(folder).as_posix()
    return "/" + "".join(f"\\{char}" if char in "*?[]!# \\" else char for char in name)
