"""What happens to a job, each as a function of it."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from jobs_of_each_kind import BOUND_SECONDS, Day

import warm
from another_user import ANOTHER_USER, as_another_user
from disks import fill, read_only, small_disk, troubled_disk, use_up_inodes
from robust_train.folder.checkpoints import SUFFIX
from robust_train.folder.requests import request_pruning
from robust_train.queue.queue_dir import boot_name
from robust_train.queue.registry import QueuedJob, Registry
from two_gpu_machine import A, B
from world import wait_until

STOPPED_SECONDS = 1.0
GRACE_SECONDS = 25.0
TROUBLE = "trouble"


def sigterm(day):
    """To the command, as a scheduler sends it: the last step is saved."""
    day.process.terminate()
    ended = day.end()
    assert ended.returncode == 143, ended.output
    assert ended.summary["status"] == "interrupted"
    if day.kind.splits:
        saved = day.journal("checkpoint")[-1]["step"]
        assert saved == ended.attempts[-1]["end_step"]


def sigterm_then_half_the_batch(day):
    """Stopped; the next launch has half the micro-batch and twice the accumulation."""
    sigterm(day)
    half = day.kind.batch_size // 2
    ended = day.completes(f"training.batch_size={half}", "training.gradient_accumulation_steps=2")
    assert ended.returncode == 0, ended.output
    assert ended.attempts[-1]["resumed_from"] is not None


def sigterm_then_one_rank(day):
    """Stopped; the next launch has one GPU for all that several have done."""
    sigterm(day)
    ended = day.completes("num_gpus=1", f"training.batch_size={day.kind.batch_size * 2}")
    assert ended.returncode == 0, ended.output
    assert ended.attempts[-1]["ranks"] == 1
    assert ended.attempts[-1]["resumed_from"] is not None


def sigterm_then_a_new_job(day):
    """Stopped; the user wants no more of it."""
    sigterm(day)
    ended = day.completes("resume=false")
    assert ended.returncode == 0, ended.output
    assert day.journal("attempt_started")[-1]["resume_checkpoint"] is None


def sigterm_to_all(day):
    """As a logout, ``pkill -f`` or a batch system sends it."""
    for pid in reversed(day.pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert day.end().returncode == 143


def sigkill_to_all(day):
    for pid in day.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    day.end()


def sigkill(depth):
    def event(day):
        if depth >= len(day.chain):
            pytest.skip("this kind of job has fewer processes")
        os.kill(day.chain[depth], signal.SIGKILL)
        ended = day.end()
        if depth == 0:
            assert ended.returncode == 0, ended.output
            assert [one["outcome"] for one in ended.attempts] == ["interrupted", "completed"]
            assert "SIGKILL" in ended.attempts[0]["message"]

    return event


def sigstop(depth):
    def event(day):
        if depth >= len(day.chain):
            pytest.skip("this kind of job has fewer processes")
        process = psutil.Process(day.chain[depth])
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
        time.sleep(STOPPED_SECONDS)
        process.resume()
        ended = day.end()
        assert ended.returncode == 0, ended.output

    return event


def troubled(trouble, words):
    """The run folder's disk takes nothing until someone is notified of it, in these words."""

    def event(day):
        told = day.world.folder / "told"
        with trouble(day):
            day.hold.unlink()
            wait_until(told.exists, "someone is notified")
        ended = day.end()
        assert ended.returncode == 0, ended.output
        assert words in told.read_text()

    return event


@contextlib.contextmanager
def full(day):
    filler = fill(day.run_dir)
    yield
    filler.unlink()


@contextlib.contextmanager
def out_of_inodes(day):
    filler = use_up_inodes(day.run_dir)
    yield
    shutil.rmtree(filler)


@contextlib.contextmanager
def failing(day):
    (day.world.folder / TROUBLE).write_text("eio")
    yield
    (day.world.folder / TROUBLE).unlink()


@contextlib.contextmanager
def on_a_bad_disk(day):
    """Its programs are those that users start: a fork of another would not see the trouble."""
    day.world.alone = True
    day.world.with_environ(troubled_disk(day.run_dir, day.world.folder / TROUBLE))
    yield


def slow_disk(day):
    """To synchronise takes a second: stopped, the job has its summary within the grace."""
    (day.world.folder / TROUBLE).write_text("slow")
    day.process.terminate()
    day.hold.unlink()
    summary = day.run_dir / "summary.json"
    wait_until(summary.exists, "the summary is there", timeout_seconds=GRACE_SECONDS)
    (day.world.folder / TROUBLE).unlink()
    ended = day.end()
    assert ended.returncode == 143, ended.output
    assert ended.summary["status"] == "interrupted"


def unreadable_folder(day):
    """Killed; then what its checkpoints are cannot be read for a while."""
    sigkill_to_all(day)
    manifests = sorted((day.run_dir / "checkpoints").glob(f"*{SUFFIX}"))
    away = [path.rename(path.with_name(f"{path.name}.away")) for path in manifests]
    for path in manifests:
        path.mkdir()
    again = day.world.start(*day.words)
    log = day.run_dir / "train_robust.log"
    wait_until(lambda: "trying again" in log.read_text(), "the launcher waits for them")
    for path, aside in zip(manifests, away, strict=True):
        path.rmdir()
        aside.rename(path)
    stdout, stderr = again.communicate(timeout=BOUND_SECONDS)
    assert again.returncode == 0, stdout + stderr


def blocked_stdout(day):
    """No one reads what it prints, which is more than a pipe holds."""
    day.hold.unlink()
    assert day.process.wait(BOUND_SECONDS) == 0
    day.end()


def second_launcher(day):
    """It is refused; that of a sweep joins, and ends with it."""
    second = day.world.start(*day.words)
    joins = day.kind.name == "sweep"
    if joins:
        assert "joining the sweep" in second.stdout.readline()
    else:
        refused = day.world.end(second)
        assert refused.returncode == 2, refused.output
    ended = day.end()
    assert ended.returncode == 0, ended.output
    if joins:
        joined = day.world.end(second)
        assert joined.returncode == 0, joined.output


def requested_checkpoint(day):
    answer = day.requests("checkpoint")
    ended = day.end()
    assert ended.returncode == 0, ended.output
    assert any(Path(one["path"]).name in answer for one in day.journal("checkpoint")), answer


def requested_half_batch(day):
    splits = day.kind.splits
    answer = day.requests("halve-batch", is_refused=not splits)
    assert splits or "does not use run.backward" in answer
    ended = day.end()
    assert ended.returncode == 0, ended.output
    assert len(ended.attempts) == 1
    changed = [one["after"] for one in day.journal("micro_batch_changed")]
    assert (day.kind.batch_size // 2 in changed) == splits


def neighbour(day):
    """Another user waits for every lock he can, and plants files; stopped, the job goes on."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    base = Path(day.world.environ["ROBUST_TRAIN_QUEUE_DIR"])
    queue, run = (os.open(path, os.O_PATH) for path in (base / boot_name(), day.run_dir))
    (record,) = (base / boot_name()).glob("record.*")
    job = json.loads((day.run_dir / "state.json").read_text())["id"]

    def meddle():
        with pytest.raises(PermissionError):
            os.open("lock", os.O_RDONLY, dir_fd=run)
        fd = os.open(record.name, os.O_RDONLY, dir_fd=queue)
        threading.Thread(target=fcntl.flock, args=(fd, fcntl.LOCK_EX), daemon=True).start()
        request = struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        wait = (fd, fcntl.F_OFD_SETLKW, request)
        threading.Thread(target=fcntl.fcntl, args=wait, daemon=True).start()
        for number in range(2, 22):
            name = f"record.{number:010}.{job.rpartition('-')[2]}"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o666, dir_fd=queue))

    with as_another_user(meddle):
        sigterm(day)
        queued = warm.robust_train("queue", environ=day.world.environ)
        assert "no job holds or waits" in queued.stdout, queued.stdout
        waited = warm.robust_train("wait", str(day.run_dir), environ=day.world.environ)
        assert waited.returncode == 143, waited.stderr
        ended = day.completes()
        assert ended.returncode == 0, ended.output
        assert ended.attempts[-1]["resumed_from"] is not None
        assert ended.attempts[-1]["gpu_uuid"] is not None, "it has its GPU again"


def state_of(day):
    return json.loads((day.run_dir / "state.json").read_text())["state"]


def pruned(day):
    """By a sweep, as it trains; alone, the same command goes on with it."""
    request_pruning(day.run_dir, "worse than the median")
    wait_until(lambda: state_of(day) == "stopping", "the request is read")
    ended = day.end()
    assert ended.returncode == 0, ended.output
    summary = ended.summary
    assert (summary["status"], summary["reason"]) == ("pruned", "worse than the median")
    saved = day.journal("checkpoint")[-1]["step"]
    assert saved == ended.attempts[-1]["end_step"] or not day.kind.splits


def another_user_waits(day):
    """Who holds no GPU and needs two; the job saves, leaves its own, and goes on after them."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    registry = Registry(Path(day.world.environ["ROBUST_TRAIN_QUEUE_DIR"]))
    probe = registry.enter(QueuedJob(reserved_bytes=1 << 30, count=2, only=(A, B)))
    probe.update(replace(probe.job, polled_at=time.monotonic() + 1e6))
    os.fchown(probe.fd, ANOTHER_USER, -1)

    wait_until(lambda: state_of(day) == "stopping", "its time slice is over")
    day.hold.unlink()
    wait_until(lambda: state_of(day) == "waiting", "it queues again")
    assert not [job for job in registry.jobs() if job.gpus]
    probe.release()
    registry.close()
    ended = day.end()
    assert ended.returncode == 0, ended.output
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("interrupted", "queue_again")
    assert second["resumed_from"] is not None
    assert second["outcome"] == "completed"


def out_of_memory_in_a_step(day):
    """The step is repeated in parts, by all ranks; no other step and no attempt is lost."""
    ended = day.meets("out of memory in a step")
    assert ended.returncode == 0, ended.output
    (attempt,) = ended.attempts
    assert attempt["outcome"] == "completed"
    first = day.journal("micro_batch_changed")[0]
    assert (first["before"], first["after"]) == (day.kind.batch_size, day.kind.batch_size // 2)
    assert "allocate memory" in first["reason"]
    assert first["rank"] in (None, attempt["ranks"] - 1)
    assert not day.journal("memory_held")


def out_of_memory(day):
    """Between two steps of the last rank: the next attempt of all has half the batch."""
    ended = day.meets("out of memory")
    assert ended.returncode == 0, ended.output
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("host_oom", "halve_batch")
    assert second["batch_size"] == first["batch_size"] // 2 == day.kind.batch_size // 2
    assert second["effective_batch_size"] == first["effective_batch_size"]
    assert second["ranks"] == first["ranks"]
    assert first["ranks"] == 1 or "(rank 1)" in first["reason"]


def losses_that_are_not_finite(day):
    """In all steps after the first checkpoint: back to it, past the data in between if it can."""
    ended = day.meets("losses that are not finite")
    assert ended.returncode == 0, ended.output
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("diverged", "before_it_diverged")
    # another rank may not have seen the newest, which rank 0 was writing
    found = Path(second["resumed_from"]).name if first["ranks"] == 1 else ""
    assert f"the checkpoint before it is {found}" in first["reason"]
    assert second["start_step"] <= first["failure"]["evidence"]["good_step"]


def hang(day):
    """Of the last rank: ended without progress, and tried again."""
    ended = day.meets("a hang")
    assert ended.returncode == 0, ended.output
    assert [one["outcome"] for one in ended.attempts] == ["comm", "completed"]
    assert "stalled: no progress for " in ended.attempts[0]["reason"]
    (stalled,) = day.journal("stalled")
    assert "conformance_trainers.py" in stalled["stacks"]


def bug(day):
    """Of the last rank: the job ends at once, with the trainer's own traceback."""
    ended = day.meets("a bug")
    assert ended.returncode == 1, ended.output
    assert [one["outcome"] for one in ended.attempts] == ["bug"]
    assert "a bug of mine" in ended.attempts[0]["message"]


TELLS = (
    "notify.command=[sh,-c,'cat > told']",
    "notify.on=[disk]",
    "notify.sweep_jobs=true",
)


@dataclass(frozen=True)
class Event:
    """What happens to a job.

    Attributes:
        is_of_launcher: it concerns what is the same for all frameworks.
        is_of_processes: it concerns how the processes of a job end, alone.
        needs_splitting: it happens to trainers that :attr:`Kind.splits`.
        needs_ranks: it happens to jobs of two ranks.
        needs_a_queue: it happens to single jobs that have reserved a GPU.
        is_exact: the job ends with the same weights to the bit.
        needs_one_job: it changes an override, which makes another job of a sweep's.
        is_held: the job is started, and held once it has saved.
        words: more arguments of the command.
        disk: what the run folder is on.
    """

    happens: Callable[[Day], None]
    is_of_launcher: bool = False
    is_of_processes: bool = False
    needs_splitting: bool = False
    needs_ranks: bool = False
    needs_one_job: bool = False
    needs_a_queue: bool = False
    is_exact: bool = True
    is_held: bool = True
    words: tuple[str, ...] = ()
    disk: Callable[[Day], contextlib.AbstractContextManager[None]] = lambda day: (
        contextlib.nullcontext()
    )

    def can_happen_to(self, kind):
        if self.is_of_launcher and kind.is_launched_like_others:
            return False
        if self.is_of_processes and kind.ends_like_others:
            return False
        if self.needs_ranks and "num_gpus=2" not in kind.arguments:
            return False
        if self.needs_one_job and kind.is_sweep:
            return False
        if self.needs_a_queue and (kind.is_sweep or not kind.on_gpus):
            return False
        return kind.splits or not self.needs_splitting


EVENTS = {
    "SIGTERM": Event(sigterm),
    "SIGTERM then half the batch": Event(
        sigterm_then_half_the_batch, needs_one_job=True, is_exact=False
    ),
    "SIGTERM then one rank": Event(sigterm_then_one_rank, needs_ranks=True, is_exact=False),
    "SIGTERM then a new job": Event(sigterm_then_a_new_job, is_of_launcher=True),
    "SIGTERM to all": Event(sigterm_to_all, is_of_processes=True),
    "SIGKILL to all": Event(sigkill_to_all, is_of_processes=True),
    "SIGKILL of process 0": Event(sigkill(0), is_of_processes=True),
    **{
        f"SIGKILL of process {depth}": Event(sigkill(depth), is_of_launcher=True)
        for depth in (1, 2, 3)
    },
    **{
        f"SIGSTOP of process {depth}": Event(sigstop(depth), is_of_launcher=True)
        for depth in (0, 1, 2, 3)
    },
    "full disk": Event(
        troubled(full, "No space left"),
        words=TELLS,
        disk=lambda day: small_disk(day.run_dir),
    ),
    "no inodes": Event(
        troubled(out_of_inodes, "No space left"),
        is_of_launcher=True,
        words=TELLS,
        disk=lambda day: small_disk(day.run_dir, "nr_inodes=200"),
    ),
    "read-only disk": Event(
        troubled(lambda day: read_only(day.run_dir), "Read-only file system"),
        is_of_launcher=True,
        words=TELLS,
    ),
    "failing disk": Event(
        troubled(failing, "Input/output error"),
        is_of_launcher=True,
        words=TELLS,
        disk=on_a_bad_disk,
    ),
    "slow disk": Event(slow_disk, is_of_launcher=True, disk=on_a_bad_disk),
    "unreadable folder": Event(unreadable_folder, is_of_launcher=True),
    "blocked stdout": Event(blocked_stdout, is_of_launcher=True),
    "second launcher": Event(second_launcher, is_of_launcher=True),
    "neighbour": Event(neighbour, needs_a_queue=True),
    "pruned": Event(pruned, needs_one_job=True),
    "another user waits": Event(
        another_user_waits, needs_a_queue=True, words=("gpu_slice_minutes=0",)
    ),
    "requested checkpoint": Event(requested_checkpoint, needs_splitting=True),
    "requested half batch": Event(requested_half_batch, is_exact=False),
    "out of memory in a step": Event(
        out_of_memory_in_a_step, needs_splitting=True, is_exact=False, is_held=False
    ),
    "out of memory": Event(out_of_memory, is_exact=False, is_held=False),
    "hang": Event(
        hang,
        is_of_processes=True,
        needs_splitting=True,
        is_held=False,
        words=("stall_timeout_minutes=0.05",),
    ),
    "losses that are not finite": Event(
        losses_that_are_not_finite,
        needs_splitting=True,
        is_exact=False,
        is_held=False,
        words=("training.log_every_steps=1",),
    ),
    "bug": Event(bug, is_of_processes=True, is_held=False),
}
"""Process 0 is the innermost: the script, else the trainer's own process."""
