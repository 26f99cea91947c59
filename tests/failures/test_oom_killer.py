"""The kernel's counts of its kills, in file trees as kernels and containers show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from robust_train.host.memory import OomKillWatch

V2_MOUNT = (
    "36 25 0:30 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 "
    "rw,nsdelegate,memory_recursiveprot\n"
)
V1_MOUNTS = (
    "25 23 0:6 / /dev rw,nosuid,relatime shared:2 - devtmpfs udev rw,size=16384k\n"
    "31 23 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755\n"
    "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw shared:15 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory\n"
)
V1_CGROUPS = "11:cpu,cpuacct:{path}\n9:memory:{path}\n1:name=systemd:{path}\n"
HYBRID_MOUNTS = V1_MOUNTS + (
    "41 31 0:38 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate\n"
)
ROOTLESS = "/user.slice/user-1000.slice/user@1000.service/app.slice/train.scope"


def events(oom_kill: int) -> str:
    """``memory.events`` of cgroup v2; ``oom`` may rise without a kill."""
    return f"low 0\nhigh 0\nmax 812\noom {oom_kill + 3}\noom_kill {oom_kill}\noom_group_kill 0\n"


def oom_control(oom_kill: int) -> str:
    """``memory.oom_control`` of cgroup v1."""
    return f"oom_kill_disable 0\nunder_oom 1\noom_kill {oom_kill}\n"


class Machine:
    """The files of a machine below a folder."""

    def __init__(self, root: Path, cgroups: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", cgroups)
        self.write("proc/self/mountinfo", mounts)
        self.other_kills(0)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def other_kills(self, count: int) -> None:
        self.write("proc/vmstat", f"nr_free_pages 812\noom_kill {count}\nnuma_hit 77\n")

    def watch(self) -> OomKillWatch:
        return OomKillWatch(self.root)


@pytest.fixture
def v2(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path, f"0::{ROOTLESS}\n", V2_MOUNT)
    machine.write(f"/sys/fs/cgroup{ROOTLESS}/memory.events", events(2))
    machine.write("/sys/fs/cgroup/user.slice/memory.events", events(7))
    return machine


def test_a_count_that_rose_is_a_kill(v2: Machine) -> None:
    watch = v2.watch()
    v2.write(f"/sys/fs/cgroup{ROOTLESS}/memory.events", events(3))

    assert watch.killed() is True


def test_a_count_that_stands_is_no_kill(v2: Machine) -> None:
    assert v2.watch().killed() is False


def test_a_limit_that_was_hit_without_a_kill_is_no_kill(v2: Machine) -> None:
    watch = v2.watch()
    v2.write(f"/sys/fs/cgroup{ROOTLESS}/memory.events", events(2).replace("oom 5", "oom 9"))

    assert watch.killed() is False


def test_a_kill_in_another_cgroup_is_not_ours(v2: Machine) -> None:
    watch = v2.watch()
    v2.write("/sys/fs/cgroup/user.slice/memory.events", events(8))
    v2.other_kills(1)

    assert watch.killed() is False


def test_a_cgroup_without_a_memory_controller_is_counted_with_the_one_above(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, f"0::{ROOTLESS}\n", V2_MOUNT)
    machine.write(f"/sys/fs/cgroup{ROOTLESS}/cgroup.procs", "1\n")
    machine.write("/sys/fs/cgroup/user.slice/user-1000.slice/memory.events", events(0))
    watch = machine.watch()
    machine.write("/sys/fs/cgroup/user.slice/user-1000.slice/memory.events", events(1))

    assert watch.killed() is True


def test_a_container_with_a_cgroup_namespace_sees_its_own_counts_at_the_top(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, "0::/\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/memory.events", events(0))
    watch = machine.watch()
    assert watch.killed() is False
    machine.write("/sys/fs/cgroup/memory.events", events(1))

    assert watch.killed() is True


def test_v1_counts_in_oom_control(tmp_path: Path) -> None:
    path = "/slurm/uid_1000/job_77/step_0"
    machine = Machine(tmp_path, V1_CGROUPS.format(path=path), V1_MOUNTS)
    machine.write(f"/sys/fs/cgroup/memory{path}/memory.oom_control", oom_control(0))
    watch = machine.watch()
    assert watch.killed() is False
    machine.write(f"/sys/fs/cgroup/memory{path}/memory.oom_control", oom_control(1))

    assert watch.killed() is True


def test_a_v1_container_shows_its_part_of_the_hierarchy_under_the_machines_name(
    tmp_path: Path,
) -> None:
    mounts = V1_MOUNTS.replace(" / /sys/fs/cgroup/memory", " /docker/4fe1 /sys/fs/cgroup/memory")
    machine = Machine(tmp_path, V1_CGROUPS.format(path="/docker/4fe1"), mounts)
    machine.write("/sys/fs/cgroup/memory/memory.oom_control", oom_control(0))
    watch = machine.watch()
    machine.write("/sys/fs/cgroup/memory/memory.oom_control", oom_control(1))

    assert watch.killed() is True


def test_in_a_hybrid_the_memory_is_counted_where_its_controller_is(tmp_path: Path) -> None:
    cgroups = V1_CGROUPS.format(path="/job") + "0::/system.slice\n"
    machine = Machine(tmp_path, cgroups, HYBRID_MOUNTS)
    machine.write("/sys/fs/cgroup/memory/job/memory.oom_control", oom_control(4))
    machine.write("/sys/fs/cgroup/unified/system.slice/memory.events", events(0))
    watch = machine.watch()
    machine.write("/sys/fs/cgroup/unified/system.slice/memory.events", events(1))
    assert watch.killed() is False
    machine.write("/sys/fs/cgroup/memory/job/memory.oom_control", oom_control(5))

    assert watch.killed() is True


def test_nothing_readable_is_not_known(tmp_path: Path) -> None:
    assert OomKillWatch(tmp_path).killed() is None


def test_without_a_cgroup_the_machines_count_can_only_clear(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", "")
    watch = machine.watch()
    assert watch.killed() is False
    machine.other_kills(1)

    assert watch.killed() is None


def test_a_cgroup_outside_of_the_namespace_is_not_known(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/../../elsewhere\n", V2_MOUNT)
    machine.write("/sys/fs/cgroup/memory.events", events(0))
    watch = machine.watch()
    machine.write("/sys/fs/cgroup/memory.events", events(1))
    machine.other_kills(1)

    assert watch.killed() is None


def test_here_a_process_that_was_not_killed_is_not_said_to_be() -> None:
    assert OomKillWatch().killed() in (False, None)
