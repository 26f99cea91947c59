"""The host's line with real processes on a simulated machine.

Every interval is 600 s unless said otherwise: whoever goes on earlier than that was woken.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import Host

import warm
from robust_train.readable import MIB
from simulated_nvml import Gpu
from world import wait_until

HostWith = Callable[..., Host]


def test_jobs_share_out_the_gpus_and_the_next_waits(host_with: HostWith) -> None:
    host = host_with(Gpu(), Gpu())
    first, second = host.start(4000), host.start(4000)
    got = {member.wait_for("granted")["gpu"] for member in (first, second)}
    assert got == {host.machine.uuid(0), host.machine.uuid(1)}
    third = host.start(4000)
    sentence = third.wait_for("waiting")["sentence"]
    assert sentence.startswith("1st in queue, ")
    taken = "left: GPUs 0, 1: taken, one job per GPU (gpu_jobs_per_device=1)"
    assert sentence.endswith(taken)
    fourth = host.start(4000)
    fourth.waits_at(2)
    assert fourth.wait_for("waiting")["sentence"].startswith("2nd in queue, ")


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


def test_a_killed_waiter_loses_its_place_to_those_behind_it(host_with: HostWith) -> None:
    host = host_with(Gpu())
    running = host.start(4000)
    running.wait_for("granted")
    first, second, third = host.start(4000), host.start(4000), None
    wait_until(lambda: first.heard("waiting") and second.heard("waiting"), "both wait")
    third = host.start(4000)
    third.waits_at(3)
    head = first if first.heard("waiting")["position"] == 1 else second  # type: ignore[index]
    other = second if head is first else first
    head.kill()
    other.waits_at(1)
    other.kill()
    third.waits_at(1)
    running.end()
    third.wait_for("granted")


def test_a_newcomer_stands_in_line_although_a_gpu_looks_free(host_with: HostWith) -> None:
    host = host_with(Gpu(total_mib=40000, free_mib=20000))
    head = host.start(30000, interval=600)
    head.waits_at(1)
    newcomer = host.start(4000)
    newcomer.waits_at(2)
    assert "kept for job" in newcomer.wait_for("waiting")["sentence"]


def test_a_small_job_passes_where_that_cannot_delay_the_head(host_with: HostWith) -> None:
    host = host_with(Gpu(total_mib=40000, free_mib=20000), Gpu(total_mib=16000))
    head = host.start(30000)
    head.waits_at(1)
    small = host.start(4000)
    assert small.wait_for("granted")["gpu"] == host.machine.uuid(1)
    second_small = host.start(4000)
    second_small.waits_at(2)
    small.end()
    assert second_small.wait_for("granted")["gpu"] == host.machine.uuid(1)
    assert head.heard("granted") is None


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


def test_a_move_to_another_gpu_frees_the_old_one_for_the_next(host_with: HostWith) -> None:
    host = host_with(Gpu(), Gpu(free_mib=100))
    first = host.start(4000)
    assert first.wait_for("granted")["gpu"] == host.machine.uuid(0)
    second = host.start(4000)
    second.waits_at(1)
    assert not first.tell(f"move {host.machine.uuid(1)}", "moved")["done"], "there is no room"
    host.machine.update(1, free_mib=30000)
    assert first.tell(f"move {host.machine.uuid(1)}", "moved")["done"]
    assert second.wait_for("granted")["gpu"] == host.machine.uuid(0)
    assert not first.tell(f"move {host.machine.uuid(0)}", "moved")["done"], "it is taken by now"


def test_jobs_are_packed_by_what_they_claim_and_have_not_taken_yet(host_with: HostWith) -> None:
    host = host_with(Gpu(total_mib=40000))
    first = host.start(15000, per_device=3)
    first.wait_for("granted")
    second = host.start(15000, per_device=3)
    assert second.wait_for("granted")["free"] == 25000
    third = host.start(15000, per_device=3, wait="no")
    assert "GPU 0: 10000 of 15000 MiB free beside job" in third.wait_for("refused")["reason"]
    # both take what they claimed, and say so
    host.machine.update(0, free_mib=10000)
    for member in (first, second):
        member.tell("report 15000", "done")
    fourth = host.start(9000, per_device=3)
    assert fourth.wait_for("granted")["free"] == 10000


def test_a_request_that_nothing_could_meet_takes_no_ticket(host_with: HostWith) -> None:
    host = host_with(Gpu())
    asks = host.start(90000)
    assert "could ever give" in asks.wait_for("refused")["reason"]
    assert not host.base.exists() or host.job_files() == []


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


def test_a_job_of_two_gpus_moves_to_two_others_at_once_or_not_at_all(host_with: HostWith) -> None:
    host = host_with(Gpu(), Gpu(), Gpu(free_mib=20000))
    a, b, c = (host.machine.uuid(n) for n in range(3))
    pair = host.start(4000, count=2)
    assert set(pair.wait_for("granted")["gpus"]) == {a, b}
    other = host.start(4000)
    assert other.wait_for("granted")["gpu"] == c
    assert not pair.tell(f"move {b} {c}", "moved")["done"], "one of the two is taken"
    assert set(host.jobs()[0].gpus) == {a, b}
    pair.tell("report 3000 1", "done")
    pair.tell("report 9000 7", "done")  # there is no such rank
    assert host.jobs()[0].taken_bytes == (None, 3000 * MIB)
    other.end()
    assert pair.tell(f"move {c} {b}", "moved")["done"]
    moved = host.jobs()[0]
    assert (moved.gpus, moved.taken_bytes) == ((c, b), (None, None))
    assert host.start(4000).wait_for("granted")["gpu"] == a


def test_too_many_gpus_are_refused_at_once_in_one_line(host_with: HostWith) -> None:
    host = host_with(Gpu(), Gpu(), Gpu(total_mib=2000))
    refused = host.start(4000, count=4).wait_for("refused")
    assert refused["reason"].startswith(
        "num_gpus=4: only 2 GPUs here could ever give 4000 MiB; ask for at most num_gpus=2, or"
    )
    assert not host.base.exists() or host.job_files() == []


def test_time_up_leaves_the_line(host_with: HostWith) -> None:
    host = host_with(Gpu())
    running = host.start(4000)
    running.wait_for("granted")
    brief = host.start(4000, timeout=0.3)
    assert "within 0:01" in brief.wait_for("refused")["reason"]
    wait_until(lambda: len(host.job_files()) == 1, "its ticket is gone")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_a_stopped_waiter_keeps_its_ticket_but_holds_nobody_up(host_with: HostWith) -> None:
    host = host_with(Gpu(), Gpu(total_mib=8000))
    running, other = host.start(20000), host.start(4000, only=host.machine.uuid(1))
    running.wait_for("granted")
    other.wait_for("granted")
    stopped = host.start(4000)
    stopped.waits_at(1)
    behind = host.start(4000, interval=0.2)
    behind.waits_at(2)
    stopped.process.send_signal(signal.SIGTSTP)  # as Ctrl-Z does; never inside the registry lock
    wait_until(lambda: state_of(stopped.process.pid) == "T", "it is stopped")
    running.end()
    behind.wait_for("granted")
    other.end()
    stopped.process.send_signal(signal.SIGCONT)
    stopped.wait_for("granted")
