"""Data-loader workers as the launcher sees them: in the process tree of an attempt."""

import subprocess
import sys

import pytest

from robust_train.host.memory import Workers, find_workers

HOLDS = """
import multiprocessing, sys, time
of_parent, each, count = map(int, sys.argv[1:4])
method = sys.argv[4]

def work(ready, mib):
    held = bytearray(b"x") * (mib << 20)
    ready.release()
    time.sleep(60)

if __name__ == "__main__":
    held = bytearray(b"x") * (of_parent << 20)
    context = multiprocessing.get_context(method)
    ready = context.Semaphore(0)
    for _ in range(count):
        context.Process(target=work, args=(ready, each), daemon=True).start()
    for _ in range(count):
        ready.acquire()
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def started(tmp_path):
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("of_parent", "each", "count", "method", "workers"),
    [
        (1, 60, 2, "fork", Workers(2, hold_most=True)),
        (60, 1, 2, "spawn", Workers(2, hold_most=False)),
        # a fork's copy of its parent's memory does not count as the fork's
        (60, 1, 3, "fork", Workers(3, hold_most=False)),
        (1, 1, 0, "fork", Workers()),
    ],
)
def test_workers_and_the_memory_they_hold_are_counted(
    tmp_path, started, of_parent, each, count, method, workers
):
    (tmp_path / "holds.py").write_text(HOLDS)
    program = [sys.executable, "holds.py", str(of_parent), str(each), str(count), method]
    # a shell between is no worker, as a script's is none
    command = ["sh", "-c", '"$@"; true', "sh", *program]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout.readline() == "ready\n"

    assert find_workers([process.pid]) == workers
