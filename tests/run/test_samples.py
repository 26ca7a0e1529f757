from __future__ import annotations

import pytest

from roll.config.errors import RunError, UserError
from roll.run import RunFolder, drop_samples_after, read_samples, write_samples


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


def named(*ids: str) -> list[dict[str, str]]:
    return [{"sample": id, "text": f"said {id}"} for id in ids]


def test_parts_are_read_as_one_in_the_order_of_their_samples(folder: RunFolder) -> None:
    path = write_samples(folder, 10, named("2.1", "10.0", "11.3"), part=0)
    assert path.relative_to(folder.path).as_posix() == "samples/step-000010.part-0.jsonl"
    write_samples(folder, 10, named("2.10", "2.0"), part=12)
    write_samples(folder, 10, [], part=3)
    write_samples(folder, 11, named("12.0"), part=0)
    write_samples(folder, 100, named("99.0"), part=0)
    assert read_samples(folder, 10) == named("2.0", "2.1", "2.10", "10.0", "11.3")
    assert read_samples(folder, 11) == named("12.0")


def test_a_part_is_replaced_alone(folder: RunFolder) -> None:
    for part, id in ((0, "0.0"), (1, "1.0")):
        write_samples(folder, 4, named(id), part=part)
    write_samples(folder, 4, named("7.0"), part=0)
    assert read_samples(folder, 4) == named("1.0", "7.0")


def test_steps_in_parts_are_among_the_known_ones_and_a_damaged_part_is_named(folder: RunFolder) -> None:
    for part in (0, 1):
        write_samples(folder, 3, named(f"{part}.0"), part=part)
    write_samples(folder, 5, named("9.0"))
    with pytest.raises(UserError, match="step 4: it has steps 3 to 5"):
        read_samples(folder, 4)
    (folder.samples_dir / "step-000003.part-1.jsonl").write_text("{")
    with pytest.raises(RunError, match=r"step-000003\.part-1\.jsonl is damaged"):
        read_samples(folder, 3)


def test_steps_after_a_checkpoint_are_dropped_whole_and_in_parts(folder: RunFolder) -> None:
    drop_samples_after(folder, 0)
    for step in (9, 10, 11, 100):
        write_samples(folder, step, named("0.0"), part=0)
        write_samples(folder, step, named("1.0"), part=1)
    write_samples(folder, 8, named("0.0"))
    write_samples(folder, 12, named("0.0"))
    drop_samples_after(folder, 10)
    left = sorted(path.name for path in folder.samples_dir.iterdir())
    assert left == [
        "step-000008.jsonl",
        "step-000009.part-0.jsonl",
        "step-000009.part-1.jsonl",
        "step-000010.part-0.jsonl",
        "step-000010.part-1.jsonl",
    ]
    drop_samples_after(folder, -1)
    assert not list(folder.samples_dir.iterdir())


def test_a_step_written_anew_by_fewer_workers_has_nothing_of_the_undone_attempt(folder: RunFolder) -> None:
    for part in range(3):
        write_samples(folder, 5, named(f"{part}.0"), part=part)
    drop_samples_after(folder, 4)
    write_samples(folder, 5, named("8.0"), part=0)
    write_samples(folder, 5, named("7.0"), part=1)
    assert read_samples(folder, 5) == named("7.0", "8.0")
    drop_samples_after(folder, 4)
    write_samples(folder, 5, named("6.0"))
    assert read_samples(folder, 5) == named("6.0")
