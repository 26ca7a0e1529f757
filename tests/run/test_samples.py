from __future__ import annotations

import pytest

from roll.config.errors import RunError, UserError
from roll.run import RunFolder, read_samples, write_samples


def test_what_is_written_is_read_and_replaced(folder: RunFolder) -> None:
    rows = [{"id": "a", "text": "line\nline\u2028", "reward": 1.0, "tokens": [1, 2]}, {"id": "b", "text": "ünï"}]
    path = write_samples(folder, 10, iter(rows))
    assert path.relative_to(folder.path).as_posix() == "samples/step-000010.jsonl"
    assert read_samples(folder, 10) == rows
    write_samples(folder, 10, rows[:1])
    assert read_samples(folder, 10) == rows[:1]


def test_a_step_without_samples_is_the_users_error(folder: RunFolder) -> None:
    with pytest.raises(UserError, match=r"run\.save_samples=true"):
        read_samples(folder, 1)
    write_samples(folder, 3, [])
    with pytest.raises(UserError, match="step 1: it has steps 3 to 3"):
        read_samples(folder, 1)


def test_a_damaged_file_is_named(folder: RunFolder) -> None:
    write_samples(folder, 1, [{}]).write_text("{")
    with pytest.raises(RunError, match=r"step-000001\.jsonl is damaged"):
        read_samples(folder, 1)
