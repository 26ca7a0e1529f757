from __future__ import annotations

from pathlib import Path

import pytest
from ledger_model import lives, write

from roll.run import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "seed: 0\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.log"
    write(path, lives(60))
    return path
