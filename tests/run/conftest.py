from __future__ import annotations

from pathlib import Path

import pytest

from roll.run import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "seed: 0\n")
