"""What is known of data-loader workers when host memory has run out, or one of them has died."""

import subprocess
import sys
import time
from contextlib import nullcontext
from subprocess import PIPE

import pytest

from attempts import attempt_request, failed
from command_world import CommandWorld
from robust_train.attempt.runner import run_attempt
from robust_train.features.data_loader_workers.launcher import DataLoaderWorkers, WorkersWatch
from robust_train.features.data_loader_workers.record import WorkersFinding
from robust_train.host.linux import TICK_SECONDS
from robust_train.model.events import Failed
from robust_train.model.failure import Evidence, FailureKind
from robust_train.model.spec import AttemptSpec

SPEC = AttemptSpec((), 8, 1)
HAS_WORKERS = """
import multiprocessing, sys, time

def work(ready):
    held = bytearray(b"x") * (32 << 20)
    ready.release()
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    count = int(sys.argv[1])
    for _ in range(count):
        context.Process(target=work, args=(ready,), daemon=True).start()
    for _ in range(count):
        ready.acquire()
    print("ready", flush=True)
    input()
    print("RuntimeError: DataLoader worker (pid 22) is killed by signal: Killed.", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(HAS_WORKERS)
    started = []

    def start(count):
        process = subprocess.Popen(
            [sys.executable, "program.py", str(count)], cwd=tmp_path, stdin=PIPE, stdout=PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.communicate(b"\n")


@pytest.mark.parametrize("count", [2, 0])
def test_workers_are_seen_while_an_attempt_runs(program, count):
    events = []
    process = program(count)
    watch = WorkersWatch(None, [process.pid], events.append)
    ends = time.monotonic() + 2 * TICK_SECONDS
    while time.monotonic() < ends:
        watch.poll({0: process})
        time.sleep(TICK_SECONDS / 4)
    watch.close()
    assert [event.count for event in events] == [count]
    assert [event.hold_most for event in events] == [bool(count)]


def test_an_attempt_that_ends_at_once_knows_none():
    events = []
    WorkersWatch(None, [], events.append).close()
    assert events == []


KERNEL = Evidence(library="kernel")


@pytest.mark.parametrize(
    ("kind", "evidence", "seen", "finds"),
    [
        (FailureKind.HOST_OOM, KERNEL, (0, False), (0, False)),
        (FailureKind.HOST_OOM, KERNEL, (2, True), (2, True)),
        (FailureKind.HOST_OOM, KERNEL, (None, None), (None, None)),
        # refused to one process, by a limit of its own
        (FailureKind.HOST_OOM, Evidence(library="python"), (2, True), (2, False)),
        # one has died, so there were some
        (FailureKind.WORKER_DEATH, KERNEL, (0, False), (None, False)),
        (FailureKind.COMM, KERNEL, (2, True), (None, None)),
    ],
)
def test_out_of_host_memory_comes_with_the_workers(kind, evidence, seen, finds):
    count, hold_most = seen
    attempt = failed(SPEC, kind, evidence, workers_seen=count, they_held_most=hold_most)
    finding = DataLoaderWorkers(None).evidence(attempt, ()).evidence.of(WorkersFinding)
    assert (finding.workers, finding.workers_hold_most) == finds


@pytest.mark.slow
def test_the_summary_of_a_job_has_the_workers(world):
    (world.folder / "program.py").write_text(HAS_WORKERS.replace("input()", "time.sleep(5)"))
    words = ("max_retries=0", "device=cpu", "--", sys.executable, "program.py", "2")
    ended = CommandWorld(world).run(*words)
    evidence = ended.attempts[0]["failure"]["evidence"]
    assert ended.attempts[0]["outcome"] == "worker_death"
    assert (evidence["workers"], evidence["workers_hold_most"]) == (2, False)


class Declares:
    """A trainer that supports some features, and runs out of memory."""

    def __init__(self, *features):
        self.supports = set(features)

    def __call__(self, cfg):
        raise MemoryError


@pytest.mark.parametrize(
    ("trainer", "has_workers"), [(Declares("num_workers"), True), (Declares(), False)]
)
def test_workers_that_are_not_declared_are_no_remedy(trainer, has_workers, tmp_path):
    events = []
    run_attempt(
        attempt_request(tmp_path, keys={"device": "cpu", "memory": {"samples": False}}),
        lambda: trainer,
        events.append,
        stopping=lambda stop: nullcontext(),
        process_ends=False,
    )
    (ending,) = (event for event in events if isinstance(event, Failed))
    assert ending.failure.evidence.of(WorkersFinding).no_workers is not has_workers
