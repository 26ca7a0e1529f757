from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from roll.run import atomic_open, atomic_write, to_json


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "old")
    atomic_write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "old")
    with pytest.raises(TypeError), atomic_open(tmp_path / "a") as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_json_is_valid_whatever_the_numbers() -> None:
    value = {"a": float("nan"), "b": [1.5, float("inf"), (np.float32("nan"), np.float32(2))], "c": np.arange(2)}
    text = to_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [1.5, None, [None, 2.0]], "c": [0, 1]}
    assert "\n" not in text


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})


def test_importing_the_package_is_light() -> None:
    code = "import sys, roll.run; print({'torch', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
