"""Where groups are found and how they are made, of both versions, in folders that stand for the kernel's."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from roll.sandbox import Limits, best, cgroups
from roll.sandbox.cgroups import Cgroup, CgroupPool, Cgroups, NoCgroups, find, sweep

LIMITS = Limits(memory_mb=100, scratch_bytes=1 << 20, processes=5)
BYTES = (100 << 20) + (1 << 20) + (16 << 20)

FILES = {
    1: {
        "tasks": "",
        "cgroup.procs": "",
        "memory.limit_in_bytes": "",
        "memory.memsw.limit_in_bytes": "",
        "memory.usage_in_bytes": "0\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "pids.max": "max\n",
    },
    2: {
        "cgroup.procs": "",
        "cgroup.controllers": "memory pids\n",
        "cgroup.subtree_control": "",
        "memory.max": "max\n",
        "memory.swap.max": "max\n",
        "memory.oom.group": "0\n",
        "memory.current": "0\n",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\noom_group_kill 0\n",
        "pids.max": "max\n",
    },
}
"""What the kernel puts into a new group."""


class Machine:
    """Folders in the place of the kernel's. As there, a new folder has files, which do not keep it from being removed."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.version, self.read_only = root, 1, set[Path]()
        self.mounts = ""
        monkeypatch.setattr(cgroups, "os", self)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        if Path(path).parent in self.read_only:
            raise PermissionError(13, "Permission denied", path)
        os.mkdir(path, mode)
        for name, text in FILES[self.version].items():
            Path(path, name).write_text(text)

    def rmdir(self, path: str) -> None:
        if Path(path, "cgroup.procs").read_text():
            raise OSError(16, "Device or resource busy", path)
        shutil.rmtree(path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def v1(machine: Machine) -> tuple[str, str]:
    """The texts of a machine whose memory and processes are counted by version 1, beside an idle version 2."""
    for name in ("memory/job/step", "pids", "unified"):
        (machine.root / name).mkdir(parents=True)
    mounts = "\n".join(
        f"{n} 23 0:{n} / {machine.root}/{name} rw,relatime shared:9 - {kind} {kind} rw,{options}"
        for n, (name, kind, options) in enumerate(
            [("unified", "cgroup2", "x"), ("memory", "cgroup", "memory"), ("pids", "cgroup", "pids")]
        )
    )
    return f"1 1 0:1 / / rw - ext4 /dev/x rw\n{mounts}\n", "4:memory:/job/step\n8:pids:/\n0::/\n"


def v2(machine: Machine, own: str = "/user/app/scope", handed_down: str = "user/app") -> tuple[str, str]:
    """The texts of a machine with version 2 only; groups down to one hand memory down."""
    machine.version = 2
    folder = machine.root
    for part in ["", *own.strip("/").split("/")]:
        folder = folder / part
        folder.mkdir(exist_ok=True)
        for name, text in FILES[2].items():
            (folder / name).write_text(text)
        if (machine.root / handed_down).is_relative_to(folder):
            (folder / "cgroup.subtree_control").write_text("memory pids\n")
    (folder / "cgroup.procs").write_text("4711\n")
    return f"30 23 0:26 / {machine.root} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n", f"0::{own}\n"


class TestFind:
    def test_version_1_takes_the_runs_own_group(self, machine: Machine) -> None:
        found = find(*v1(machine))
        assert found == Cgroups(1, f"{machine.root}/memory/job/step", f"{machine.root}/pids")

    def test_version_1_goes_up_to_a_group_that_can_be_written(self, machine: Machine) -> None:
        texts = v1(machine)
        machine.read_only = {machine.root / "memory/job/step", machine.root / "pids"}
        assert find(*texts) == Cgroups(1, f"{machine.root}/memory/job", "")

    def test_version_1_in_a_container_sees_only_its_own_part(self, machine: Machine) -> None:
        (machine.root / "memory").mkdir()
        mounts = f"1 1 0:1 /docker/abc {machine.root}/memory rw - cgroup cgroup rw,memory\n"
        assert find(mounts, "4:memory:/docker/abc\n") == Cgroups(1, f"{machine.root}/memory", "")
        assert find(mounts, "4:memory:/elsewhere\n") == Cgroups(1, f"{machine.root}/memory", "")

    def test_version_2_takes_a_group_above_that_hands_memory_down(self, machine: Machine) -> None:
        texts = v2(machine)
        (machine.root / "user/app/scope/cgroup.controllers").write_text("pids\n")
        folder = f"{machine.root}/user/app"
        assert find(*texts) == Cgroups(2, folder, folder)

    def test_version_2_has_an_empty_group_hand_memory_down(self, machine: Machine) -> None:
        found = find(*v2(machine, "/", ""))
        assert found == Cgroups(2, str(machine.root), str(machine.root))
        texts = v2(machine, "/own", "nothing")
        (machine.root / "own/cgroup.controllers").write_text("memory\n")
        assert find(*texts) == Cgroups(2, f"{machine.root}/own", "")
        assert (machine.root / "own/cgroup.subtree_control").read_text() == "+memory"

    def test_why_there_are_none(self, machine: Machine) -> None:
        texts = v1(machine)
        machine.read_only = {machine.root / name for name in ("memory/job/step", "memory/job", "memory")}
        refused = find(*texts)
        assert isinstance(refused, NoCgroups)
        assert refused.why == f"no control group can be created in {machine.root}/memory/job/step: Permission denied"
        nothing = find("1 1 0:1 / / rw - ext4 /dev/x rw\n", "0::/\n")
        assert isinstance(nothing, NoCgroups)
        assert nothing.why == "no control group hierarchy is mounted"


@pytest.fixture(params=[1, 2])
def found(request: pytest.FixtureRequest, machine: Machine) -> Cgroups:
    texts = v1(machine) if request.param == 1 else v2(machine)
    machine.mounts = texts[0]
    if request.param == 2:
        (machine.root / "user/app/scope/cgroup.controllers").write_text("")
    made = find(*texts)
    assert isinstance(made, Cgroups)
    return made


def read(group: Cgroup, name: str) -> str:
    return next(Path(folder, name) for folder in group.folders if Path(folder, name).exists()).read_text()


class TestGroups:
    def test_limits_are_written_once(self, found: Cgroups) -> None:
        groups = CgroupPool(found)
        memory = "memory.limit_in_bytes" if found.version == 1 else "memory.max"
        with groups.group(LIMITS) as group:
            assert read(group, memory) == str(BYTES)
            assert Path(group.folders[-1], "pids.max").read_text().startswith("5")
            Path(group.folders[0], memory).write_text("as it was")
        with groups.group(LIMITS) as again:
            assert again is group
            assert read(group, memory) == "as it was"
        with groups.group(dataclasses.replace(LIMITS, memory_mb=50)) as again:
            assert read(again, memory).startswith(str(BYTES - (50 << 20)))
        groups.close()
        assert not any(map(os.path.exists, group.folders))

    def test_a_process_joins_every_hierarchy(self, found: Cgroups) -> None:
        with CgroupPool(found).group(LIMITS) as group:
            for fd in group.join_fds:
                os.write(fd, b"0")
            name = "tasks" if found.version == 1 else "cgroup.procs"
            joined = [Path(folder, name) for folder in group.folders]
            assert [path.read_text() for path in joined] == ["0"] * len(found.folders)
            for path in joined:
                path.write_text("")

    def test_a_group_whose_program_ran_out_is_not_used_again(self, found: Cgroups) -> None:
        groups = CgroupPool(found)
        with groups.group(LIMITS) as group:
            assert not group.ran_out()
            events = Path(group.folders[0], "memory.oom_control" if found.version == 1 else "memory.events")
            events.write_text(events.read_text().replace("oom_kill 0", "oom_kill 2"))
            assert group.ran_out()
        assert not os.path.exists(group.folders[0])

    def test_a_group_that_still_holds_memory_is_not_used_again(self, found: Cgroups) -> None:
        with CgroupPool(found).group(LIMITS) as group:
            usage = "memory.usage_in_bytes" if found.version == 1 else "memory.current"
            Path(group.folders[0], usage).write_text(f"{BYTES // 2}\n")
        assert not os.path.exists(group.folders[0])

    def test_a_group_that_has_vanished_is_no_error(self, found: Cgroups) -> None:
        groups = CgroupPool(found)
        with groups.group(LIMITS) as group:
            for folder in group.folders:
                shutil.rmtree(folder)
        with groups.group(LIMITS) as other:
            assert other is not group

    def test_an_idle_group_that_holds_more_than_a_new_limit_is_not_used(
        self, found: Cgroups, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        groups = CgroupPool(found)
        with groups.group(LIMITS) as group:
            pass

        def busy(limits: Limits) -> None:
            raise OSError(16, "Device or resource busy")

        monkeypatch.setattr(group, "limit", busy)
        with groups.group(LIMITS) as other:
            assert other is not group
        assert not os.path.exists(group.folders[0])

    def test_only_groups_of_the_dead_are_swept(self, found: Cgroups, machine: Machine) -> None:
        elsewhere = Path(found.memory).parent / "another-job"
        elsewhere.mkdir()
        dead = [Path(place, "roll-sandbox-dead") for place in (*found.folders, str(elsewhere))]
        others = [Path(found.memory, "not-ours")]
        for path in (*dead, *others):
            cgroups.os.mkdir(str(path))
        groups = CgroupPool(found)
        with groups.group(LIMITS) as group:
            assert sweep(machine.mounts) == 2
            assert all(map(os.path.exists, group.folders))
        assert not any(path.exists() for path in dead)
        assert all(path.exists() for path in others)


@pytest.mark.parametrize("version", [1, 2])
def test_the_kernel_has_a_process_of_another_user_join_by_a_descriptor(version: int) -> None:
    """Also of a version that does not count memory here: joining is the same."""
    mounts = [mount for mount in cgroups._mounts(Path("/proc/self/mountinfo").read_text()) if mount.version == version]
    if os.geteuid() != 0 or not mounts:
        pytest.skip(f"no control groups of version {version} for root here")
    mount = next((mount for mount in mounts if "memory" in mount.controllers), mounts[0])
    own = cgroups._own_group(mount, Path("/proc/self/cgroup").read_text())
    folder = os.path.join(own, f"test-sandbox-{secrets.token_hex(8)}")
    try:
        os.mkdir(folder)
    except OSError as error:
        pytest.skip(f"no control group can be created in {own}: {error}")
    try:
        fd = os.open(f"{folder}/{'tasks' if version == 1 else 'cgroup.procs'}", os.O_WRONLY)
        source = f"import os; os.write({fd}, b'0'); print(open('/proc/self/cgroup').read())"
        command = [best().python.path, "-c", source]
        done = subprocess.run(command, capture_output=True, text=True, user=65534, group=65534, pass_fds=[fd], timeout=60)
        os.close(fd)
        assert os.path.basename(folder) in done.stdout, done.stderr
    finally:
        os.rmdir(folder)
