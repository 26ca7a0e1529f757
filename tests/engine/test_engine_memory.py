"""What memory there is, as the kernel's files say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roll.engine.memory import Container, containers, free_bytes, free_of_machine, machine_bytes

MIB = 1 << 20


def group(path: Path, limit: str, held: int, files: int, first: bool = False) -> None:
    """The files of a control group of either version."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if first else ("memory.max", "memory.current")
    path.mkdir(parents=True, exist_ok=True)
    (path / names[0]).write_text(f"{limit}\n")
    (path / names[1]).write_text(f"{held}\n")
    total = f"total_inactive_file {files}\n" if first else ""
    (path / "memory.stat").write_text(f"anon 1\ninactive_file {0 if first else files}\n{total}")


def test_a_limit_is_found_in_any_group_around_the_process(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/jobs/mine\n")
    group(tmp_path / "groups" / "jobs" / "mine", "max", 7, 0)
    group(tmp_path / "groups" / "jobs", str(300 * MIB), 200 * MIB, 50 * MIB)
    group(tmp_path / "groups", str(900 * MIB), 400 * MIB, 0)
    group(tmp_path, str(MIB), MIB, 0)  # above the root of the groups, and none of ours
    found = list(containers(tmp_path / "groups", tmp_path / "self"))
    assert found == [Container(300 * MIB, 150 * MIB), Container(900 * MIB, 400 * MIB)]


def test_groups_of_the_first_version_and_those_of_no_limit(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("7:cpu:/far\n4:memory:/jobs/mine\n1:name=systemd:/\n0::/\n")
    group(tmp_path / "memory" / "jobs" / "mine", str(2**63 - 4096), 5, 0, first=True)
    group(tmp_path / "memory" / "jobs", str(500 * MIB), 80 * MIB, 30 * MIB, first=True)
    assert list(containers(tmp_path, tmp_path / "self")) == [Container(500 * MIB, 50 * MIB)]


def test_within_a_container_the_root_of_its_groups_is_its_own(tmp_path: Path) -> None:
    """The path may be one that only the host can see."""
    (tmp_path / "self").write_text("0::/kubepods/pod1/box\n")
    group(tmp_path, str(64 * MIB), 10 * MIB, 0)
    assert list(containers(tmp_path, tmp_path / "self")) == [Container(64 * MIB, 10 * MIB)]


def test_a_system_without_such_files_has_no_containers_and_all_its_memory(tmp_path: Path) -> None:
    assert list(containers(tmp_path, tmp_path / "none")) == []
    assert free_of_machine(tmp_path / "none") >= machine_bytes()
    (tmp_path / "meminfo").write_text("MemTotal:       24643328 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n")
    assert free_of_machine(tmp_path / "meminfo") == 2 * MIB


def test_what_is_free_here_is_some_of_what_is_here() -> None:
    assert 0 < free_bytes(torch.device("cpu")) <= machine_bytes()


@pytest.mark.gpu
def test_what_is_free_of_a_gpu_counts_what_torch_keeps_for_later() -> None:
    device = torch.device("cuda", 0)
    before = free_bytes(device)
    taken = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    assert before - free_bytes(device) == pytest.approx(256 * MIB, abs=32 * MIB)
    del taken  # it stays reserved
    assert free_bytes(device) == pytest.approx(before, abs=32 * MIB)
