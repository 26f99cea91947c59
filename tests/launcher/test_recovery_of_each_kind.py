"""Each kind of failure meets its remedy, end to end, with the reason in journal and summary."""

import json
import os
import signal

import pytest

from simulated_nvml import Gpu
from two_gpu_machine import A, B
from world import parent_of, wait_for_text, wait_until

FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 512.00 MiB is free. Of the allocated memory 12.00 GiB is allocated by PyTorch, and 8.00 "
    "GiB is reserved by PyTorch but unallocated."
)
PLAIN_OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"


class Script:
    """What the attempts of a test's trainer do, and what they were given."""

    def __init__(self, world):
        self.world = world
        files = {"failures", "attempts", "allocator"}
        world.environ |= {f"{name.upper()}_FILE": str(world.folder / name) for name in files}
        self.failures, self.attempts_file = world.folder / "failures", world.folder / "attempts"

    def run(self, *lines, overrides=(), trainer="fails_by_script"):
        self.failures.write_text("\n".join(lines))
        target = f"trainer._target_=failing_trainers.{trainer}"
        return self.world.run(target, "retry_pause_seconds=0.1", *overrides, code=0)

    @property
    def given(self):
        return [json.loads(line) for line in self.attempts_file.read_text().splitlines()]


@pytest.fixture
def script(world):
    return Script(world)


def actions(ended):
    return [attempt["action"] for attempt in ended.attempts]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("failure", "expected", "gpus", "workers"),
    [
        # an illegal address costs a process, and twice at the same step the GPU
        (f"40 {ILLEGAL_ADDRESS}", "retry switch_gpu none", [A, A, B], [2, 2, 2]),
        # a killed data-loader worker means fewer workers, then none
        ("3 worker", "fewer_workers fewer_workers none", [A, A, A], [2, 1, 0]),
    ],
)
def test_the_next_attempt_uses_what_the_remedy_says(script, failure, expected, gpus, workers):
    ended = script.run(failure, failure, overrides=("training.num_workers=2",))
    assert " ".join(actions(ended)) == expected
    assert [given["gpu"] for given in script.given] == gpus
    assert {given["batch_size"] for given in script.given} == {64}
    assert [given["num_workers"] for given in script.given] == workers
    # without workers nothing is loaded ahead, whatever the key says
    assert [given["prefetch_factor"] for given in script.given] == [max(n, 1) for n in workers]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("failure", "starts_with", "action", "then"),
    [
        (f"3 {FRAGMENTED}", "False", "expandable_segments", "True"),
        ("- CUDA driver error: unknown error", "True", "no_expandable_segments", "False"),
    ],
)
def test_fragmentation_gets_expandable_segments(script, failure, starts_with, action, then):
    """A driver that refuses them gets none."""
    keys = ("memory.expandable_segments=false",) if starts_with == "False" else ()
    ended = script.run(failure, overrides=keys, trainer="fails_by_script_beside_torch")
    assert actions(ended) == [action, "none"]
    allocator = (script.world.folder / "allocator").read_text().splitlines()
    assert allocator == [f"expandable_segments:{value}" for value in (starts_with, then)]
    first, second = script.given
    assert first["batch_size"] == second["batch_size"]


def test_memory_taken_by_others_is_waited_for(world, script, cuda_machine_with):
    """The batch stays the same."""
    machine = cuda_machine_with(Gpu(uuid=A, total_mib=24000, free_mib=20000))
    world.with_environ(machine.environ)
    script.failures.write_text(f"3 {PLAIN_OOM}")
    world.environ["GO_FILE"] = str(world.folder / "go")
    process = world.start(
        "trainer._target_=failing_trainers.fails_by_script_when_told",
        "gpu_check_interval_seconds=0.1",
    )
    wait_until(script.attempts_file.exists, "the first attempt runs")
    machine.update(0, free_mib=12000)
    (world.folder / "go").touch()
    journal = world.run_dir / "journal.jsonl"
    wait_until(lambda: '"wait"' in journal.read_text(), "the launcher waits for the room")
    machine.update(0, free_mib=20000)
    ended = world.end(process, code=0)
    assert actions(ended) == ["wait", "none"]
    assert [attempt["batch_size"] for attempt in ended.attempts] == [64, 64]
    assert "other processes took 8000 MiB" in ended.attempts[0]["reason"]


def test_no_size_is_repeated_when_splitting_fails(world):
    world.environ["BATCH_BUDGETS"] = json.dumps({"cpu": 1})
    ended = world.train("splits_within_a_budget", code=1)
    # every size down to min_batch_size was tried inside the step: nothing is left to halve
    assert [attempt["outcome"] for attempt in ended.attempts] == ["device_oom"]
    assert "cpu at micro-batch 64 down to 4" in ended.summary["reason"]


def test_a_job_that_never_saves_is_eventually_refused(world, ready):
    """Preempted by SIGTERM, then killed without a word: the next launch has its own exit code."""
    command = ("trainer._target_=trainers.never_looks_whether_to_stop", "max_launches=2")
    for signum, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = world.start(*command)
        wait_for_text(ready, "the trainer runs")
        process.send_signal(signum)
        world.end(process, code)
        ready.unlink()
    ended = world.run(*command, code=76)
    (line,) = ended.stderr.splitlines()
    assert "launches in a row without a new checkpoint" in line
    assert not ready.exists(), "nothing was started"


@pytest.mark.usefixtures("two_gpus")
def test_user_rules_come_before_ours(script):
    """A GPU that they blame is excluded."""
    rules = "retry.rules=[{exception: RuntimeError, message: lost my disk, then: retry, times: 1}"
    rules += ",{message: 'Xid 79', then: exclude_gpu}]"
    ended = script.run("4 I lost my disk", "9 Xid 79 here", overrides=(rules,))
    assert actions(ended) == ["retry", "switch_gpu", "none"]
    assert [given["gpu"] for given in script.given] == [A, A, B]
    assert f"{A} is excluded for 30 min for all jobs of this host" in ended.output
    first, second, _ = ended.attempts
    assert "retry.rules[0] (1 of 1)" in first["reason"]
    assert "retry.rules[1] (1 of 3): exclude_gpu" in second["reason"]


def test_gradient_checkpointing_fits_the_smallest_batch(world):
    """Real limits of memory; gradients are the same, and the trainer's source says that it heeds
    the key.
    """
    world.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    target = "trainer._target_=limited_trainers.checkpoints_within_a_limit"
    batch = ("training.batch_size=8", "min_batch_size=8", "training.num_workers=0")
    ended = world.run(target, *batch, code=0)
    assert [a["outcome"] for a in ended.attempts] == ["host_oom", "completed"]
    assert actions(ended) == ["gradient_checkpointing", "none"]
    assert "8 with gradient checkpointing: the same gradients" in ended.attempts[0]["reason"]
    result = ended.summary["result"]
    assert result["short_of_memory"] == result["at_ease"]
    assert result["checkpointed"] is True
    assert world.run(target, *batch, "training.gradient_checkpointing=false").returncode == 1


def test_submitit_requeues_a_preempted_job_which_resumes(world, ready, monkeypatch):
    submitit = pytest.importorskip("submitit")
    from trainers import RequeuedJob

    monkeypatch.setenv("READY_FILE", str(ready))
    monkeypatch.setenv("PYTHONPATH", world.environ["PYTHONPATH"])
    executor = submitit.LocalExecutor(world.folder / "queue")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(RequeuedJob(), world.run_dir)
    attempt = int(wait_for_text(ready, "the trainer runs"))
    launcher = parent_of(attempt)
    # as Slurm does when the job is preempted; submitit's local executor can only do it on time-out
    os.kill(launcher, submitit.JobEnvironment._usr_sig())
    assert job.result() == "continued from when-preempted", job.stderr()
