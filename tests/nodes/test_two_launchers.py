"""One job, two launchers on this machine: the real commands, connections and collectives."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from simulated_nvml import Gpu, Machine
from two_nodes import ON_THE_CPU, nodes_of, run_both
from world import Ended, World, is_running, wait_until


def run_trainer(world: World, trainer: str, *keys: str, only_node_1: tuple[str, ...] = ()):
    target = f"trainer._target_=node_trainers.{trainer}"
    return run_both(world, target, *keys, only_node_1=only_node_1)


def train(world: World, trainer: str):
    """Start both; return their processes once all ranks train."""
    words = (f"trainer._target_=node_trainers.{trainer}", *ON_THE_CPU)
    processes = [one.start(*words) for one in nodes_of(world)]
    trains = [world.run_dir / f"rank-{rank}-trains" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in trains), "training on both nodes")
    return processes


def family(process) -> list[int]:
    return [one.pid for one in psutil.Process(process.pid).children(recursive=True)]


@pytest.mark.proves("functions (`run.micro_batches`)", "several machines", "new attempt")
def test_memory_that_runs_out_on_node_1_halves_the_batch_of_both(world: World):
    world.with_environ({"MALLOC_MMAP_THRESHOLD_": "65536"})
    keys = ("+runs_out=true", "training.batch_size=32", "training.num_workers=0")
    leader, follower = run_trainer(world, "four_steps", *keys)
    assert leader.returncode == follower.returncode == 0, leader.output + follower.output
    first, second = leader.attempts
    assert (first["outcome"], first["action"]) == ("host_oom", "halve_batch")
    assert "rank 1" in first["reason"]
    assert (first["ranks"], first["batch_size"], second["batch_size"]) == (2, 32, 16)
    assert first["effective_batch_size"] == second["effective_batch_size"] == 64
    assert second["start_step"] == 2
    assert leader.summary["result"] == {"ranks": 2, "about": [4, 32], "total": 32.0}
    names = {path.name for path in world.run_dir.iterdir()}
    assert {"attempt-1.log", "attempt-1.node1.log", "attempt-2.node1.log"} <= names
    assert "leader.json" not in names
    assert (
        "MemoryError" in (world.run_dir / "attempt-1.node1.log").read_text()
        or "allocate" in (first["message"])
    )


def test_other_commands_on_the_nodes_are_refused_in_one_line_on_each(world: World):
    ends = run_trainer(world, "four_steps", only_node_1=("training.epochs=3",))
    for ended in ends:
        ended.was_refused(["node 1", "training.epochs=3", "all nodes"])


@pytest.mark.slow
def test_a_bug_on_node_1_ends_the_job_with_its_traceback_on_node_0(world: World):
    leader, follower = run_trainer(world, "has_a_bug_on_node_1")
    assert (leader.returncode, follower.returncode) == (1, 1), leader.output + follower.output
    assert "KeyError: 'a key that is not there'" in leader.stderr
    assert "(rank 1)" in leader.summary["reason"]
    assert "(rank 1)" in follower.stderr
    assert "Traceback" not in follower.output


@pytest.mark.slow
def test_each_node_reserves_gpus_of_its_own(
    world: World, cuda_machine_with: Callable[..., Machine]
):
    """Both share this host and its queue, so they have one GPU each; memory runs out on node 1."""
    world.with_environ(cuda_machine_with(Gpu(), Gpu()).environ)
    keys = ("num_nodes=2", "training.batch_size=16", "training.num_workers=0")
    words = ("trainer._target_=node_trainers.runs_out_of_gpu_memory_on_node_1", *keys)
    leader, follower = nodes_of(world)
    processes = leader.start(*words), follower.start(*words)
    ended = follower.end(processes[1])
    assert ended.returncode == 0, ended.output
    ended = leader.end(processes[0])
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("device_oom", "halve_batch")
    assert "on another node (rank 1)" in first["reason"]
    assert (second["batch_size"], second["effective_batch_size"]) == (8, 32)
    own, other = (one for one in ended.summary["result"])
    assert own != other
    assert own == first["gpu_uuids"][0]


@pytest.mark.slow
def test_other_versions_are_refused_in_one_line_on_each(world: World, tmp_path: Path):
    info = tmp_path / "other" / "robust_train-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: robust-train\nVersion: 9.9\n")
    words = ("trainer._target_=node_trainers.four_steps", *ON_THE_CPU)
    leader, follower = nodes_of(world)
    follower.alone = True
    follower.environ["PYTHONPATH"] = f"{info.parent}:{follower.environ['PYTHONPATH']}"
    processes = leader.start(*words), follower.start(*words)
    for one, process in zip((follower, leader), reversed(processes), strict=True):
        one.end(process).was_refused(["robust-train=9.9", "all nodes"])


@pytest.mark.slow
def test_nodes_without_a_shared_folder_say_so(world: World):
    words = ("trainer._target_=node_trainers.four_steps", *ON_THE_CPU)
    leader, follower = nodes_of(world)
    follower.run_dir = world.folder / "elsewhere"
    limit = "gpu_wait_timeout_minutes=0.05"
    processes = leader.start(*words, limit), follower.start(*words, limit)
    ended = leader.end(processes[0])
    assert ended.returncode == 75
    assert "on a disk that all nodes see" in ended.stderr
    ended = follower.end(processes[1])
    assert ended.returncode == 75
    assert "on a disk that all nodes see" in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher_ends_the_other_with_75_and_leaves_nothing(world: World, killed: int):
    processes = train(world, "until_stopped")
    pids = [pid for process in processes for pid in family(process)]
    assert pids
    os.kill(processes[killed].pid, signal.SIGKILL)
    ended = world.end(processes[1 - killed])
    processes[killed].communicate()
    assert ended.returncode == 75, ended.output
    assert f"node {killed}" in ended.output
    assert "is lost" in ended.output
    wait_until(lambda: not any(map(is_running, pids)), "everything of the job has ended", 20)


@pytest.mark.slow
def test_a_killed_rank_of_node_1_is_named_and_all_go_on_from_the_checkpoint(world: World):
    processes = train(world, "is_killed_once")
    ended = world.end(processes[0])
    assert world.end(processes[1]).returncode == ended.returncode == 0, ended.output
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("interrupted", "retry")
    assert "killed by SIGKILL" in first["message"]
    assert second["start_step"] == 3


@pytest.mark.slow
def test_a_hang_on_node_1_is_reported_with_the_stacks_of_both_nodes(world: World):
    hangs = ("stall_timeout_minutes=0.05", "retry_pause_seconds=0.1")
    leader, follower = run_trainer(world, "hangs_on_node_1", *hangs)
    assert leader.returncode == follower.returncode == 0, leader.output + follower.output
    first, second = leader.attempts
    assert "no progress" in first["message"]
    assert "rank 1 at node_trainers.py:" in first["message"]
    assert "_waits_for_ever" in first["message"]
    assert second["start_step"] == 2
    there = (world.run_dir / "attempt-1.node1.stacks").read_text()
    assert "_waits_for_ever" in there
    assert "all_reduce" in (world.run_dir / "attempt-1.stacks").read_text()
    (ended, _) = [event for event in leader.journal if event["event"] == "attempt_ended"]
    for what in ("hangs_on_node_1", "all_reduce", "_waits_for_ever"):
        assert what in ended["evidence"]["traceback"]
    assert len([e for e in leader.journal if e["event"] == "stalled"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_on_any_node_stops_all_ranks_at_the_same_step_with_a_checkpoint(
    world: World, asked: int
):
    processes = train(world, "until_stopped")
    processes[asked].send_signal(signal.SIGTERM)
    ends = [world.end(process) for process in processes]
    assert [one.returncode for one in ends] == [143, 143], ends[0].output + ends[1].output
    steps = [(world.run_dir / f"rank-{rank}-stopped").read_text() for rank in range(2)]
    assert steps[0] == steps[1]
    assert (world.run_dir / "checkpoints" / steps[0]).exists()
    assert ends[0].summary["status"] == "interrupted"


@pytest.fixture(params=["10.77.41.{}/24", "fd77::{}/64"], ids=["IPv4", "IPv6"])
def two_hosts(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Two network namespaces that a cable joins."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    names = "rt-test-a", "rt-test-b"
    done: list[subprocess.CompletedProcess[bytes]] = []

    def ip(words: str) -> None:
        done.append(subprocess.run(["ip", *words.split()], capture_output=True))

    try:
        for name in names:
            ip(f"netns add {name}")
        ip("link add rt-va type veth peer name rt-vb")
        for number, name in enumerate(names, start=1):
            link = f"rt-v{name[-1]}"
            ip(f"link set {link} netns {name}")
            nodad = ["nodad"] if ":" in request.param else []
            ip(" ".join((f"-n {name} addr add {request.param.format(number)} dev {link}", *nodad)))
            ip(f"-n {name} link set {link} up")
            ip(f"-n {name} link set lo up")
        if any(one.returncode for one in done):
            pytest.skip("this kernel or sandbox allows no network namespaces")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_a_pulled_cable_ends_both_nodes_with_75_and_leaves_nothing(
    world: World, two_hosts: tuple[str, str]
):
    words = ("trainer._target_=node_trainers.until_stopped", *ON_THE_CPU)
    processes = []
    for node, name in enumerate(two_hosts):
        environ = {**world.environ, "ROBUST_TRAIN_NODE_RANK": str(node)}
        command = ["ip", "netns", "exec", name, *world.command(*words)]
        pipe = subprocess.PIPE
        options = {"cwd": world.folder, "env": environ, "stdout": pipe, "stderr": pipe}
        processes.append(subprocess.Popen(command, text=True, **options))
    trains = [world.run_dir / f"rank-{rank}-trains" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in trains), "training on both nodes")
    pids = list(itertools.chain.from_iterable(family(process) for process in processes))
    subprocess.run(["ip", "-n", two_hosts[1], "link", "set", "rt-vb", "down"], check=True)
    for process in processes:
        stdout, stderr = process.communicate(timeout=60)
        ended = Ended(process.returncode, stdout, stderr, world.run_dir)
        assert ended.returncode == 75, ended.output
        assert "is lost" in ended.output
    wait_until(lambda: not any(map(is_running, pids)), "everything of the job has ended", 20)
