"""Several launches in one process, as in a notebook."""

import subprocess
import sys
from pathlib import Path

from simulated_nvml import Gpu
from two_gpu_machine import A, B

_BEGIN = """
import os, signal, threading
import psutil
import robust_train

def launch(number):
    cfg = {"device": "cpu", "auto_device": False, "trainer": {}}
    summary = robust_train.launch("trainers.returns_its_pid", cfg, run_dir=f"run-{number}")
    return summary.result
"""


def run(world, code):
    surroundings = {"cwd": world.folder, "env": world.environ, "timeout": 120}
    program = [sys.executable, "-c", _BEGIN + code]
    done = subprocess.run(program, capture_output=True, text=True, **surroundings)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_one_launch_after_the_other_leaves_nothing_behind(world):
    code = """
handlers = lambda: [signal.getsignal(s) for s in (1, 2, 10, 12, 15)]
before = handlers()
pids = {launch(1), launch(2)}
assert handlers() == before
assert threading.active_count() == 1, threading.enumerate()
print(len(pids), psutil.Process().children(recursive=True))
"""
    assert run(world, code) == "2 []"


def test_launches_in_two_threads_take_a_gpu_each(world, machine_with):
    """Each of what a process has once (NVML, the call that hangs) serves both."""
    world.with_environ(machine_with(Gpu(uuid=A), Gpu(uuid=B)).environ)
    code = """
import time
from pathlib import Path

def train(cfg):
    Path(f"{cfg.me} trains").touch()
    while not all(Path(f"{other} trains").exists() for other in (1, 2)): time.sleep(0.05)
    return os.environ["CUDA_VISIBLE_DEVICES"]

def on_a_gpu(me):
    results[me] = robust_train.launch(train, {"me": me}, run_dir=f"run-{me}").result

results = {}
work = [threading.Thread(target=on_a_gpu, args=(me,)) for me in (1, 2)]
for thread in work: thread.start()
for thread in work: thread.join()
print(*sorted(results.values()))
"""
    assert run(world, code).split() == [A, B]


def test_importing_the_package_registers_no_fork_hooks(world):
    code = """
import os
hooks = []
os.register_at_fork = lambda **given: hooks.append(given)
import robust_train.launcher.job, robust_train.cli.jobs
ours = [h for h in hooks if any(f.__module__.startswith("robust_train") for f in h.values())]
print(ours)
"""
    assert run(world, code) == "[]"
    assert not Path(world.folder / "run-1").exists()
