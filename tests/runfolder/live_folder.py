"""Run folders of jobs that are alive, here or on another host, and of jobs that died."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from plans import folder_in
from robust_train.folder.state import Summary
from robust_train.host.signals import SignalWatch
from robust_train.model.errors import JobInterrupted
from world import ROOT, SUPPORT

_HOLD = """
import sys, time
from pathlib import Path
from live_folder import open_folder
with open_folder(Path(sys.argv[1])) as folder:
    print(folder.token, flush=True)
    while True:
        folder.tick()
        time.sleep(0.02)
"""


@contextlib.contextmanager
def open_folder(run_dir, name="a job", sweep=None):
    """A run folder that this process holds, until a signal comes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (
        SignalWatch() as signals,
        signals.hand_signals_to(_interrupt),
        folder_in(run_dir, signals, name, sweep) as folder,
    ):
        yield folder


def ended(run_dir, name, status, result=None, **how):
    """A job that has ended; its id."""
    with open_folder(run_dir, name) as folder:
        Summary(status, run_dir, result=result).write()
        folder.record_end(status, how.get("reason"), how.get("code"))
    return folder.state.id


def died(run_dir, name="clip", *, with_the_host=False):
    """A job whose launcher could not record how it ended; its id."""
    with open_folder(run_dir, name) as folder:
        state = replace(folder.state, resume_command=f"cd /w && train hydra.run.dir={run_dir}")
        before = psutil.boot_time() - 100 if with_the_host else state.since
    content = asdict(replace(state, state="running", updated=before))
    (run_dir / "state.json").write_text(json.dumps(content))
    return state.id


@contextlib.contextmanager
def another_launcher(run_dir):
    """A process that holds a run folder, ticks, and can be killed."""
    run_dir.mkdir(parents=True, exist_ok=True)
    hold = [sys.executable, "-c", _HOLD, str(run_dir)]
    environ = os.environ | {"PYTHONPATH": f"{SUPPORT}:{ROOT / 'src'}:{Path(__file__).parent}"}
    with subprocess.Popen(hold, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def _interrupt(signum):
    raise JobInterrupted(signum)


def change_json(path, **changes):
    """Write other values into a file, in place: its lock stays."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


def as_on_another_host(run_dir):
    """Let the folder look like that of a job of another host on the same disk."""
    for name in ("lock", "state.json"):
        change_json(run_dir / name, host="another-host.example")
