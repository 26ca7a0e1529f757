"""Runs the code blocks of a page, in page order, in a folder like a checkout's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from doc_blocks import ROOT, blocks_of

ROLL = """\
#!{python}
import sys
from roll.cli import main
arguments = sys.argv[1:]
if arguments and arguments[0] == "train":  # short, unless the command says how long
    for name, value in (("train.steps", 2), ("eval.samples", 8), ("threads", 1)):
        if not any(argument.startswith(name + "=") for argument in arguments):
            arguments.append(f"{{name}}={{value}}")
sys.exit(main(arguments))
"""


def prepare(folder: Path) -> None:
    """Puts the examples and the programs `roll` and `python` into a folder."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    programs = folder / ".programs"
    programs.mkdir()
    (programs / "roll").write_text(ROLL.format(python=sys.executable))
    (programs / "roll").chmod(0o755)
    for name in ("python", "python3"):
        (programs / name).symlink_to(sys.executable)


def run(folder: Path, command: list[str], what: str, status: int = 0) -> None:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(folder / ".programs"), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == status, f"{what}: exit status {done.returncode}\n{done.stdout}{done.stderr}"


def run_page(page: str, folder: Path) -> int:
    """Runs the page's `cpu` blocks; the number of those that ran."""
    ran, before = 0, ""
    for block in blocks_of(page):
        if name := block.value("file"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(block.text)
        if block.language == "python" and block.place:
            before = before + block.text if block.has("continues") else block.text
        if block.place != "cpu" or block.has("excerpt") or name:
            continue
        status = int(block.value("status") or 0)
        if block.language == "python":
            script = folder / f"block_{block.line}.py"
            script.write_text(before)
            run(folder, [sys.executable, script.name], str(block), status)
        elif block.language in ("bash", "sh"):
            run(folder, ["bash", "-euo", "pipefail", "-c", block.text], str(block), status)
        else:
            continue
        ran += 1
    return ran
