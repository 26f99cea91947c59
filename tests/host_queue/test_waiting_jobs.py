"""The host's line with real processes on a simulated machine.

Every interval is 600 s unless said otherwise: whoever goes on earlier than that was woken.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

from hosts import Host

import warm
from simulated_nvml import Gpu
from world import wait_until

HostWith = Callable[..., Host]


def test_the_next_goes_when_one_ends_and_the_others_move_up(host_with: HostWith) -> None:
    host = host_with(Gpu())
    running = host.start(4000)
    running.wait_for("granted")
    waiting = []
    for place in (1, 2, 3):
        waiting.append(host.start(4000))
        waiting[-1].waits_at(place)
    running.end()
    waiting[0].wait_for("granted")
    waiting[1].waits_at(1)
    assert waiting[1].heard("granted") is None
    waiting[0].end()
    waiting[1].wait_for("granted")
    waiting[1].end()
    waiting[2].wait_for("granted")
    waiting[2].end()
    assert host.job_files() == []


def test_a_killed_launcher_keeps_its_gpu_until_its_child_is_gone_too(host_with: HostWith) -> None:
    host = host_with(Gpu())
    running = host.start(4000)
    child = running.wait_for("granted")["child"]
    waiting = host.start(4000)
    waiting.waits_at(1)
    running.kill()
    late = host.start(4000, wait="no")
    assert "gpu_jobs_per_device=1" in late.wait_for("refused")["reason"]
    assert waiting.heard("granted") is None
    os.kill(child, signal.SIGKILL)
    waiting.wait_for("granted")
    assert len(host.job_files()) == 1, "what the dead job left was swept away"


def test_a_job_comes_back_to_its_old_queue_position(host_with: HostWith) -> None:
    host = host_with(Gpu())
    early = host.start(4000, interval=0.5)
    early.wait_for("granted")
    late = host.start(4000)
    late.waits_at(1)
    host.machine.update(0, free_mib=100)  # a stranger was faster
    assert early.process.stdin is not None
    early.process.stdin.write("rejoin\n")
    early.process.stdin.flush()
    early.waits_at(1)
    late.waits_at(2)
    host.machine.update(0, free_mib=40000)
    wait_until(lambda: sum(said["event"] == "granted" for said in early.said) == 2, "its turn")
    late.waits_at(1)
    assert late.heard("granted") is None


def test_two_jobs_that_want_every_gpu_go_one_after_the_other(host_with: HostWith) -> None:
    host = host_with(Gpu(), Gpu(), Gpu())
    every = {host.machine.uuid(n) for n in range(3)}
    both = [host.start(4000, count=3), host.start(4000, count=3)]
    wait_until(lambda: any(m.heard("granted") for m in both), "one has all of them")
    first, second = sorted(both, key=lambda m: m.heard("granted") is None)
    second.waits_at(1)
    sentence = second.wait_for("waiting")["sentence"]
    assert "left: 0 of 3 GPUs available; GPUs 0, 1, 2: taken, one job per GPU (" in sentence
    small = host.start(4000)
    small.waits_at(2)
    assert [set(job.gpus) for job in host.jobs()] == [every, set(), set()]
    table = warm.robust_train("queue", environ=host.machine.environment())
    rows = [re.split(r"  +", row.strip()) for row in table.stdout.splitlines()[1:4]]
    assert [row[1:4] + row[5:7] for row in rows] == [
        ["-", "running", "test", "3 × 4000", "GPU 0, 1, 2"],
        ["1", "waiting", "test", "3 × 4000", "-"],
        ["2", "waiting", "test", "4000", "-"],
    ], table.stdout
    first.end()
    assert set(second.wait_for("granted")["gpus"]) == every
    assert small.heard("granted") is None
    second.end()
    small.wait_for("granted")
