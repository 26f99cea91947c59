"""Every kind of job ends or resumes whatever happens to it, and leaves nothing behind.

The same command then completes it, with the weights of a job to which nothing happened. A cell of
the matrix is a kind of job and an event, ``script-SIGKILL of process 2``. Every test starts the
real command. The default suite runs :data:`DIAGONAL`; ``just test-all`` runs the whole matrix.

Kinds of jobs (``jobs_of_each_kind.py``):
    function: a function with ``run.backward``, on a simulated GPU.
    ranks: the same function in two ranks, each on its simulated GPU.
    sweep: the same function as the only job of a sweep that uses the GPU queue.
    script: a program that the launcher starts, with ``{batch_size}`` in its arguments.
    vision: the built-in trainer, on the CPU.
    lightning, transformers, accelerate: a trainer of that framework, on the CPU.
    … in ranks: the same job in two ranks on the CPU.
    … in shards: the same in two ranks that shard model and optimizer by FSDP2.

Events (``what_happens.py``); "to" says who receives a signal, and otherwise the command does:
    SIGTERM: it saves and ends; the command is then repeated as it was.
    SIGTERM then half the batch: repeated with half the micro-batch, accumulated twice.
    SIGTERM then one rank: repeated with one rank in place of two.
    SIGTERM then a new job: repeated with ``resume=false``.
    SIGTERM to all, SIGKILL to all: to every process of the job at once.
    SIGKILL of process N, SIGSTOP of process N: to one process, the latter for a second. Process 0
        is the innermost (the script, or the process of the trainer), the last is the command.
    full disk, no inodes, read-only disk, failing disk: the folder of the job takes no files until
        someone is notified of it.
    slow disk: each synchronisation takes a second while the job is stopped.
    unreadable folder: after a kill, the records of its checkpoints are unreadable for a while.
    blocked stdout: no one reads its output, which is more than a pipe holds.
    second launcher: the same command is started again while the job runs.
    neighbour: another user holds the locks that can be held, and plants files in the queue.
    pruned: a sweep ends the job early.
    another user waits: a user without GPUs queues, and the time slice of the job is over.
    requested checkpoint, requested half batch: asked for by ``robust-train`` from outside.
    out of memory in a step: the step is repeated in parts.
    out of memory: between two steps, so that the next attempt has half the batch.
    hang: a rank no longer trains.
    losses that are not finite: from the first checkpoint on.
    bug: the trainer raises an error of its own.

An event is *held* if the job trains, has saved and is stopped there until the event lets it
continue; otherwise the trainer meets it by itself. It is *exact* if the weights are the same to the
bit afterwards; otherwise they differ by rounding. A kind *splits* if it repeats a step in parts and
saves on request. A kind is *like* another if it learns the same weights.
"""

import contextlib
import json
import math
import os
import re

import psutil
import pytest
from filelock import FileLock
from jobs_of_each_kind import KINDS, Day
from what_happens import EVENTS

import warm
from robust_train.folder.checkpoints import SUFFIX
from simulated_nvml import Gpu
from two_gpu_machine import A, B
from world import World, is_running, wait_until

ROUNDING = 1e-3  # of the weights' length; Adam divides small differences by small gradients

DIAGONAL = {
    ("accelerate in ranks", "SIGTERM then half the batch"),
    ("function", "SIGKILL of process 0"),
    ("function", "SIGTERM then a new job"),
    ("function", "SIGKILL of process 1"),
    ("function", "another user waits"),
    ("function", "full disk"),
    ("function", "unreadable folder"),
    ("lightning", "losses that are not finite"),
    ("lightning", "pruned"),
    ("ranks", "SIGTERM to all"),
    ("ranks", "out of memory"),
    ("script", "SIGKILL of process 2"),
    ("script", "SIGSTOP of process 2"),
    ("sweep", "requested checkpoint"),
    ("transformers", "requested half batch"),
    ("vision in shards", "SIGTERM then one rank"),
    ("vision", "SIGKILL to all"),
}
"""The cheapest cells that have every kind and every sort of event; a bug, a hang, unread output, a
second launcher and memory that runs out in a step have tests of their own in the default suite."""


def leaves_nothing(day):
    """No process, lock or reservation is left."""
    for pid in day.pids:
        wait_until(lambda pid=pid: not is_running(pid), f"process {pid} ends")
    wait_until(lambda: not list(processes_of(day)), "all that it started ends")

    def reserved():
        queue = warm.robust_train("queue", "--json", environ=day.world.environ)
        return "GPU-" in queue.stdout

    # a process that is seen to have ended may have threads that still hold its files
    wait_until(lambda: not reserved(), "no GPU is reserved")


def processes_of(day):
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # an environment cannot be read off a fork of a warm interpreter
            is_here = process.cwd() == str(day.world.folder)
            if is_here or process.environ().get("READY_FILE") == str(day.ready_file):
                yield process


def is_completed_by_the_same_command(day):
    """From its newest whole checkpoint, unless it is complete."""
    file = day.run_dir / "summary.json"
    summary = json.loads(file.read_text()) if file.exists() else {"status": "killed"}
    if summary["status"] == "completed":
        return
    newest = day.newest()
    assert newest is not None
    day.completes()
    last = day.journal("attempt_started")[-1]
    # a later one may have been whole before it was reported
    assert last["resume_checkpoint"] >= str(newest).removesuffix(SUFFIX)
    if summary["status"] == "interrupted" and day.kind.splits:
        began, done = day.journal("training_started")[-1], summary["attempts"][-1]["end_step"]
        assert began["step"] == done, "no step is repeated, none is lost"


def knows_the_commands_that_it_proposed(day):
    """Each that the screen has named still finds the job once it is complete."""
    for command in day.proposed:
        verb, which = command.split()
        shown = warm.robust_train(verb, which, environ=day.world.environ, cwd=day.world.folder)
        over = {
            "resume": ("has completed: nothing is left to do",),
            "stop": ("is not alive", "this sweep has ended"),
        }
        assert any(words in shown.stderr for words in over.get(verb, ("",))), shown
        assert "no run of yours" not in shown.stderr, shown


def has_one_story(day):
    """In the journal: attempts follow each other, from what was saved, to one completed end."""
    started, has_saved, job = 0, False, ""
    for event in day.events():
        if event["event"] == "job_started":
            has_saved &= event["job"] == job  # nothing is saved of a new one
            job = event["job"]
        elif event["event"] == "attempt_started":
            started += 1
            assert event["attempt"] == started
            assert event["resume_checkpoint"] is not None or not has_saved
        elif event["event"] == "attempt_ended":
            assert event["attempt"] == started
        has_saved |= event["event"] == "checkpoint"
    assert event["event"] == "job_ended"
    assert event["status"] == "completed"


def has_the_weights(day, expected, *, is_exact):
    """Those of a job that nothing happened to; other sizes and ranks differ by rounding."""
    weights = json.loads(day.weights_file.read_text())
    summary = json.loads((day.run_dir / "summary.json").read_text())
    if summary["attempts"][-1].get("skips_to"):
        assert all(map(math.isfinite, weights)), "it has passed over data"
        return
    if is_exact and not day.kind.like:
        assert weights == expected
        return
    distance = sum((a - b) ** 2 for a, b in zip(weights, expected, strict=True)) ** 0.5
    assert distance <= ROUNDING * sum(b**2 for b in expected) ** 0.5


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The weights of a job of each kind that nothing happened to, on one rank without a GPU."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers: each kind runs once

    def weights(kind):
        name = kind.like or kind.name
        path = folder / f"undisturbed {name}"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                (alone,) = (other for other in KINDS if other.name == name)
                day = Day(World(tmp_path_factory.mktemp("undisturbed")), alone)
                inline = ("isolation=none",) if alone.splits else ()
                day.world.run(*day.words, *inline, code=0)
                day.weights_file.rename(path)
        return json.loads(path.read_text())

    return weights


def test_the_legend_explains_every_word():
    for name in {kind.name for kind in KINDS} | EVENTS.keys():
        word = re.sub(r"\d+$", "N", re.sub(r".+ in (ranks|shards)$", r"… in \1", name))
        assert re.search(rf"(?m)(^    |, ){re.escape(word)}[:,]", __doc__), word


@pytest.mark.proves(
    "built-in trainer", ("one GPU", "several GPUs", "FSDP2"), ("in the step", "new attempt")
)
@pytest.mark.proves(
    ("functions (`run.backward`)", "accelerate", "Lightning", "transformers"),
    ("one GPU", "several GPUs"),
    ("in the step", "new attempt"),
)
@pytest.mark.proves("scripts", "one GPU", "new attempt")
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        pytest.param(
            kind,
            name,
            id=f"{kind.name}-{name}",
            marks=[] if (kind.name, name) in DIAGONAL else [pytest.mark.slow],
        )
        for kind in KINDS
        for name, event in EVENTS.items()
        if event.to(kind)
    ],
)
def test_the_same_command_completes_a_troubled_job(
    world, kind, event, cuda_machine_with, undisturbed
):
    """The job ends or resumes as the table says, and leaves nothing behind."""
    if kind.needs:
        pytest.importorskip(kind.needs, reason=f"the extra [{kind.needs}] is not installed")
    gpus = [Gpu(uuid=uuid, total_mib=24000, free_mib=20000) for uuid in (A, B)]
    what = EVENTS[event]
    machine = cuda_machine_with(*gpus) if kind.on_gpus else None
    day = Day(world, kind, *what.words, machine=machine)
    with what.disk(day):
        if what.is_held:
            day.start()
        what.happens(day)
        leaves_nothing(day)
        is_completed_by_the_same_command(day)
        knows_the_commands_that_it_proposed(day)
        day.a_day_passes()
        knows_the_commands_that_it_proposed(day)
        has_one_story(day)
        has_the_weights(day, undisturbed(kind), is_exact=what.is_exact)


RESUMED_BY_DEFAULT = ("function", "script", "sweep")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, id=kind.name, marks=[] if kind.name in RESUMED_BY_DEFAULT else [pytest.mark.slow]
        )
        for kind in KINDS
    ],
)
def test_a_pasted_resume_completes_an_old_job(world, kind, cuda_machine_with):
    """The screen has proposed it a day before; its user gives another value with it."""
    if kind.needs:
        pytest.importorskip(kind.needs, reason=f"the extra [{kind.needs}] is not installed")
    gpus = [Gpu(uuid=uuid, total_mib=24000, free_mib=20000) for uuid in (A, B)]
    day = Day(world, kind, machine=cuda_machine_with(*gpus) if kind.on_gpus else None)
    day.start(alone=True)
    EVENTS["SIGTERM"].happens(day)
    (resume,) = {command for command in day.proposed if command.startswith("resume ")}
    day.a_day_passes()
    for verb in ("status", "logs"):
        shown = warm.robust_train(verb, resume.split()[1], environ=day.world.environ)
        assert shown.returncode == 0 or kind.is_sweep, shown
    words = ["-m", "robust_train.cli.main", *resume.split(), "max_retries=7"]
    ended = day.ended(warm.start(words, day.world.folder, day.world.environ), 0)
    assert "max_retries=7" in ended.stdout.splitlines()[0]
    assert ended.summary["status"] == "completed"
    assert day.journal("attempt_started")[-1]["resume_checkpoint"] is not None
    day.a_day_passes()
    knows_the_commands_that_it_proposed(day)
