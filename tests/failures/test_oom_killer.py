"""The kernel's counts of its kills, in file trees as kernels and containers show them."""

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
IN_DOCKER = V1_MOUNTS.replace(" / /sys/fs/cgroup/memory", " /docker/4fe1 /sys/fs/cgroup/memory")
HYBRID_MOUNTS = V1_MOUNTS + (
    "41 31 0:38 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate\n"
)
V1 = "11:cpu,cpuacct:{0}\n9:memory:{0}\n1:name=systemd:{0}\n"
SLICE = "user.slice/user-1000.slice"
ROOTLESS = f"{SLICE}/user@1000.service/app.slice/train.scope"
V2 = (f"0::/{ROOTLESS}\n", V2_MOUNT)
STEP = "/slurm/uid_1000/job_77/step_0"
EVENTS, CONTROL, VMSTAT = "memory.events", "memory.oom_control", "../../../proc/vmstat"

TEXTS = {
    # ``oom`` may rise without a kill
    EVENTS: "low 0\nhigh 0\nmax 812\noom {}\noom_kill {}\noom_group_kill 0\n",
    CONTROL: "oom_kill_disable 0\nunder_oom {}\noom_kill {}\n",
    VMSTAT: "nr_free_pages {}\noom_kill {}\nnuma_hit 77\n",
    "cgroup.procs": "{}{}\n",
}

# its cgroups and mounts; kills before and after by the file below /sys/fs/cgroup; what is known
CASES = {
    "a count that rose": (*V2, {f"{ROOTLESS}/{EVENTS}": (2, 3)}, True),
    "a count that stands": (*V2, {f"{ROOTLESS}/{EVENTS}": (2, 2)}, False),
    "a kill in another cgroup": (
        *V2,
        {f"{ROOTLESS}/{EVENTS}": (2, 2), f"user.slice/{EVENTS}": (7, 8), VMSTAT: (0, 1)},
        False,
    ),
    "a cgroup without a controller counts as its parent": (
        *V2,
        {f"{ROOTLESS}/cgroup.procs": (1, 1), f"{SLICE}/{EVENTS}": (0, 1)},
        True,
    ),
    "a container with a cgroup namespace": ("0::/\n", V2_MOUNT, {EVENTS: (0, 1)}, True),
    "v1": (V1.format(STEP), V1_MOUNTS, {f"memory{STEP}/{CONTROL}": (0, 1)}, True),
    "a v1 container, under the machine's name": (
        V1.format("/docker/4fe1"),
        IN_DOCKER,
        {f"memory/{CONTROL}": (0, 1)},
        True,
    ),
    "a hybrid, where the controller is": (
        V1.format("/job") + "0::/system.slice\n",
        HYBRID_MOUNTS,
        {f"memory/job/{CONTROL}": (4, 5), f"unified/system.slice/{EVENTS}": (0, 0)},
        True,
    ),
    "a hybrid, where the controller is not": (
        V1.format("/job") + "0::/system.slice\n",
        HYBRID_MOUNTS,
        {f"memory/job/{CONTROL}": (4, 4), f"unified/system.slice/{EVENTS}": (0, 1)},
        False,
    ),
    "the machine's count can only clear": ("", "", {VMSTAT: (0, 1)}, None),
    "a cgroup outside of the namespace": (
        "0::/../../elsewhere\n",
        V2_MOUNT,
        {EVENTS: (0, 1), VMSTAT: (0, 1)},
        None,
    ),
}


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(("cgroups", "mounts", "files", "killed"), CASES.values(), ids=CASES)
def test_our_cgroups_counts_reveal_a_kill(tmp_path, cgroups, mounts, files, killed):
    write(tmp_path / "proc/self/cgroup", cgroups)
    write(tmp_path / "proc/self/mountinfo", mounts)
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)

    def counts(moment):
        for name, kills in {VMSTAT: (0, 0), **files}.items():
            text = TEXTS[VMSTAT if name == VMSTAT else name.rpartition("/")[2]]
            # a limit that was hit is no kill
            write(folder / name, text.format(5 + moment, kills[moment]))

    counts(0)
    watch = OomKillWatch(tmp_path)
    assert watch.has_killed() is False
    counts(1)
    assert watch.has_killed() is killed


def test_unreadable_counts_mean_unknown(tmp_path):
    """On this machine no process was killed."""
    assert OomKillWatch(tmp_path).has_killed() is None
    assert OomKillWatch().has_killed() in (False, None)
