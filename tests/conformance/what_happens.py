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
from jobs_of_each_kind import BOUND_SECONDS, Day, Kind

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
    ended = day.end(143)
    assert ended.summary["status"] == "interrupted"
    if day.kind.splits:
        saved = day.journal("checkpoint")[-1]["step"]
        assert saved == ended.attempts[-1]["end_step"]


def sigterm_then_half_the_batch(day):
    """Stopped; the next launch has half the micro-batch and twice the accumulation."""
    sigterm(day)
    half = day.kind.batch_size // 2
    ended = day.completes(f"training.batch_size={half}", "training.gradient_accumulation_steps=2")
    assert ended.attempts[-1]["resumed_from"] is not None


def sigterm_then_one_rank(day):
    """Stopped; the next launch has one GPU for all that several have done."""
    sigterm(day)
    ended = day.completes("num_gpus=1", f"training.batch_size={day.kind.batch_size * 2}")
    assert ended.attempts[-1]["ranks"] == 1
    assert ended.attempts[-1]["resumed_from"] is not None


def sigterm_then_a_new_job(day):
    """Stopped; the user wants no more of it."""
    sigterm(day)
    day.completes("resume=false")
    assert day.journal("attempt_started")[-1]["resume_checkpoint"] is None


def sigterm_to_all(day):
    """As a logout, ``pkill -f`` or a batch system sends it."""
    for pid in reversed(day.pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    day.end(143)


def sigkill_to_all(day):
    for pid in day.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    day.end()


def sigkill(depth):
    def event(day):
        os.kill(day.chain[depth], signal.SIGKILL)
        ended = day.end(0 if depth == 0 else None)
        if depth == 0:
            outcomes = [attempt["outcome"] for attempt in ended.attempts]
            assert outcomes == ["interrupted", "completed"]
            assert "SIGKILL" in ended.attempts[0]["message"]

    return Event(event, ends_alone if depth == 0 else launches_through(depth))


def sigstop(depth):
    def event(day):
        process = psutil.Process(day.chain[depth])
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
        time.sleep(STOPPED_SECONDS)
        process.resume()
        day.end(0)

    return Event(event, launches_through(depth))


def troubled(trouble, words, to=lambda kind: True, **options):
    """The run folder's disk takes nothing until someone is notified of it, in these words."""

    def event(day):
        told = day.world.folder / "told"
        with trouble(day):
            day.hold.unlink()
            wait_until(told.exists, "someone is notified")
        day.end(0)
        assert words in told.read_text()

    def is_notified(kind):
        """A sweep notifies of its end alone."""
        return is_one_job(kind) and to(kind)

    telling = ("notify.command=[sh,-c,'cat > told']", "notify.on=[disk]")
    return Event(event, is_notified, words=telling, **options)


def filled(fills):
    @contextlib.contextmanager
    def trouble(day):
        filler = fills(day.run_dir)
        yield
        shutil.rmtree(filler) if filler.is_dir() else filler.unlink()

    return trouble


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
    ended = day.end(143)
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
    day.ended(again, 0)


def blocked_stdout(day):
    """No one reads what it prints, which is more than a pipe holds."""
    day.hold.unlink()
    assert day.process.wait(BOUND_SECONDS) == 0
    day.end()


def second_launcher(day):
    """It is refused."""
    second = day.world.start(*day.words)
    day.ended(second, 2)
    day.end(0)


def requested_checkpoint(day):
    answer = day.requests("checkpoint")
    day.end(0)
    assert any(Path(saved["path"]).name in answer for saved in day.journal("checkpoint")), answer


def requested_half_batch(day):
    splits = day.kind.splits
    answer = day.requests("halve-batch", is_refused=not splits)
    assert splits or "does not use run.backward" in answer
    ended = day.end(0)
    assert len(ended.attempts) == 1
    changed = [change["after"] for change in day.journal("micro_batch_changed")]
    assert (day.kind.batch_size // 2 in changed) == splits


def neighbour(day):
    """Another user waits for every lock he can, and plants files; stopped, the job continues."""
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
        assert ended.attempts[-1]["resumed_from"] is not None
        assert ended.attempts[-1]["gpu_uuid"] is not None, "it has its GPU again"


def state_of(day):
    return json.loads((day.run_dir / "state.json").read_text())["state"]


def pruned(day):
    """By a sweep, as it trains; alone, the same command continues with it."""
    request_pruning(day.run_dir, "worse than the median")
    wait_until(lambda: state_of(day) == "stopping", "the request is read")
    ended = day.end(0)
    summary = ended.summary
    assert (summary["status"], summary["reason"]) == ("pruned", "worse than the median")
    saved = day.journal("checkpoint")[-1]["step"]
    assert saved == ended.attempts[-1]["end_step"] or not day.kind.splits


def another_user_waits(day):
    """Who holds no GPU and needs two; the job saves, leaves its own, and continues after them."""
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
    (before,) = (job for job in registry.jobs() if job.id != probe.job.id)

    def polls_under_its_ticket():
        (now,) = (job for job in registry.jobs() if job.id != probe.job.id)
        assert now.id == before.id
        return now.polled_at > before.polled_at

    wait_until(polls_under_its_ticket, "no time-out costs it its queue position")
    probe.release()
    registry.close()
    ended = day.end(0)
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("interrupted", "queue_again")
    assert second["resumed_from"] is not None
    assert second["outcome"] == "completed"


def out_of_memory_in_a_step(day):
    """The step is repeated in parts, by all ranks; no other step and no attempt is lost."""
    ended = day.meets("out of memory in a step")
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
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("host_oom", "halve_batch")
    assert second["batch_size"] == first["batch_size"] // 2 == day.kind.batch_size // 2
    assert second["effective_batch_size"] == first["effective_batch_size"]
    assert second["ranks"] == first["ranks"]
    assert first["ranks"] == 1 or "(rank 1)" in first["reason"]


def losses_that_are_not_finite(day):
    """In all steps after the first checkpoint: back to it, past the data in between if it can."""
    ended = day.meets("losses that are not finite")
    first, second = ended.attempts
    assert (first["outcome"], first["action"]) == ("diverged", "before_it_diverged")
    # another rank may not have seen the newest, which rank 0 was writing
    previous = Path(second["resumed_from"]).name if first["ranks"] == 1 else ""
    assert f"the checkpoint before it is {previous}" in first["reason"]
    assert second["start_step"] <= first["failure"]["evidence"]["good_step"]


def hang(day):
    """The last rank hangs: the attempt is ended, and the job tries again."""
    ended = day.meets("a hang")
    assert [attempt["outcome"] for attempt in ended.attempts] == ["comm", "completed"]
    assert "stalled: no progress for " in ended.attempts[0]["reason"]
    (stalled,) = day.journal("stalled")
    assert "conformance_trainers.py" in stalled["stacks"]


def bug(day):
    """The last rank has a bug: the job ends at once, with the trainer's traceback."""
    ended = day.meets("a bug", 1)
    assert [attempt["outcome"] for attempt in ended.attempts] == ["bug"]
    assert "a bug of mine" in ended.attempts[0]["message"]


@dataclass(frozen=True)
class Event:
    """What happens to a job."""

    happens: Callable[[Day], None]
    # whether it can happen to a kind of job, and is not proved by another kind
    to: Callable[[Kind], bool] = lambda kind: True
    is_exact: bool = True  # the job ends with the same weights to the bit
    is_held: bool = True  # the job is started, and held once it has saved
    words: tuple[str, ...] = ()  # more arguments of the command
    disk: Callable = contextlib.nullcontext  # what the run folder is on


def is_launched_alone(kind):
    """Whether what concerns the launcher alone has to happen to it as well."""
    return not (kind.needs or kind.is_like_in_ranks)


def ends_alone(kind):
    """Whether how its processes end is not proved by other jobs in ranks."""
    return not kind.is_like_in_ranks


def launches_through(depth):
    return lambda kind: is_launched_alone(kind) and depth < kind.processes


def splits(kind):
    return kind.splits


def is_one_job(kind):
    """A changed override makes another job of a sweep's."""
    return not kind.is_sweep


def reserves_a_gpu(kind):
    return kind.on_gpus and not kind.is_sweep


EVENTS = {
    "SIGTERM": Event(sigterm),
    "SIGTERM then half the batch": Event(sigterm_then_half_the_batch, is_one_job, is_exact=False),
    "SIGTERM then one rank": Event(
        sigterm_then_one_rank, lambda kind: "num_gpus=2" in kind.arguments, is_exact=False
    ),
    "SIGTERM then a new job": Event(sigterm_then_a_new_job, is_launched_alone),
    "SIGTERM to all": Event(sigterm_to_all, ends_alone),
    "SIGKILL to all": Event(sigkill_to_all, ends_alone),
    **{f"SIGKILL of process {depth}": sigkill(depth) for depth in (0, 1, 2)},
    **{f"SIGSTOP of process {depth}": sigstop(depth) for depth in (0, 1, 2)},
    "full disk": troubled(filled(fill), "No space left", disk=lambda day: small_disk(day.run_dir)),
    "no inodes": troubled(
        filled(use_up_inodes),
        "No space left",
        to=is_launched_alone,
        disk=lambda day: small_disk(day.run_dir, "nr_inodes=200"),
    ),
    "read-only disk": troubled(
        lambda day: read_only(day.run_dir), "Read-only file system", to=is_launched_alone
    ),
    "failing disk": troubled(
        failing, "Input/output error", to=is_launched_alone, disk=on_a_bad_disk
    ),
    "slow disk": Event(slow_disk, is_launched_alone, disk=on_a_bad_disk),
    "unreadable folder": Event(unreadable_folder, is_launched_alone),
    "blocked stdout": Event(blocked_stdout, is_launched_alone),
    "second launcher": Event(second_launcher, is_launched_alone),
    "neighbour": Event(neighbour, reserves_a_gpu),
    "pruned": Event(pruned, is_one_job),
    "another user waits": Event(
        another_user_waits,
        reserves_a_gpu,
        words=("gpu_slice_minutes=0", "gpu_wait_timeout_minutes=0.01"),
    ),
    "requested checkpoint": Event(requested_checkpoint, splits),
    "requested half batch": Event(requested_half_batch, is_exact=False),
    "out of memory in a step": Event(
        out_of_memory_in_a_step, splits, is_exact=False, is_held=False
    ),
    "out of memory": Event(out_of_memory, is_exact=False, is_held=False),
    "hang": Event(
        hang,
        lambda kind: kind.splits and ends_alone(kind),
        is_held=False,
        words=("stall_timeout_minutes=0.05",),
    ),
    "losses that are not finite": Event(
        losses_that_are_not_finite,
        splits,
        is_exact=False,
        is_held=False,
        words=("training.log_every_steps=1",),
    ),
    "bug": Event(bug, ends_alone, is_held=False),
}
"""Process 0 is the innermost: the script, else the trainer's own process."""
