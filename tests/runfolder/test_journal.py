"""The journal on disks that fill, and over weeks."""

import itertools
import os
import resource
import signal
from types import SimpleNamespace

import pytest

from forked_ranks import of_forks
from robust_train import files
from robust_train.folder import journal
from robust_train.folder.journal import Journal, attempts_in
from robust_train.folder.state import Summary, read_summary
from robust_train.model.events import (
    AttemptStarted,
    BatchSizeFound,
    CheckpointSaved,
    JobEnded,
    Progress,
    UserEvent,
)
from robust_train.model.spec import AttemptSpec


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def events(path):
    """All events that are whole."""
    return [event for event in files.json_lines(path) if event is not None]


@pytest.mark.parametrize("number", [9 * 10**18, 10**19])
def test_a_number_is_read_whatever_its_sign(path, number):
    path.write_text(f'{{"a": {number}, "b": {-number}}}\n')
    (event,) = events(path)
    assert event == ({"a": number, "b": -number} if number < 2**63 else {"a": None, "b": None})


@pytest.mark.parametrize("missing", [1, 20, 200])
def test_a_short_write_loses_only_progress(path, missing):
    """A file-size limit makes write(2) write a part, as a full disk does."""

    def fill_the_disk(_):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal = Journal(path)
        journal.write(Progress(1), 1)
        size = path.stat().st_size
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (3 * size - missing % size, resource.RLIM_INFINITY)
        )
        for step in (2, 3, 4):
            journal.write(Progress(step), 1)
        journal.write(JobEnded("failed", "x" * 300))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        journal.write(Progress(5), 1)
        journal.write(Progress(6), 1)

    of_forks(1, fill_the_disk)
    names = [(event["event"], event.get("step")) for event in events(path)]
    assert names[0] == ("progress", 1)
    assert names[-3:] == [("job_ended", None), ("progress", 5), ("progress", 6)]


def test_an_unreadable_journal_is_not_an_empty_one(path):
    """It cannot be read for the moment."""
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        attempts_in(path)


@pytest.fixture
def weeks(monkeypatch):
    """The writer's clocks: one event a tenth of a second, and after the first minutes the date is
    set, as on a machine that starts without one."""
    dates = itertools.chain(range(2000), itertools.repeat(1.7e9))
    monkeypatch.setattr(journal, "time", SimpleNamespace(time=dates.__next__))
    seconds = itertools.count(0.0, 0.1)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=seconds.__next__))


@pytest.mark.usefixtures("weeks")
def test_a_journal_stays_small_and_keeps_what_matters(path):
    journal = Journal(path)
    journal.write(AttemptStarted(AttemptSpec((), 64, 1)), 1)
    journal.write(BatchSizeFound(32, 2, 64), 1)
    for step in range(30_000):
        journal.write(Progress(step, metrics={"loss": 1 / (step + 1)}), 1)
        if step % 10 == 0:
            journal.write(CheckpointSaved(f"step-{step}", step), 1)
        if step % 100 == 0:
            journal.write(UserEvent(f"name-{step % 300}", {"step": step, "rank": "mine"}), 1)
    journal.write(JobEnded("failed"))
    assert path.stat().st_size < 1.25 * 1024**2
    kept = events(path)
    kinds = {event["event"] for event in kept}
    assert kinds >= {"attempt_started", "batch_size_found", "job_ended"}
    steps = [event["step"] for event in kept if event["event"] == "progress"]
    assert (steps[0], steps[-1]) == (0, 29_999)
    assert steps == sorted(steps)
    assert all(after - before < 2 + 0.01 * before for before, after in itertools.pairwise(steps))
    assert [e["step"] for e in kept if e["event"] == "checkpoint"][-1] == 29_990
    assert attempts_in(path) == 1


@pytest.mark.parametrize(
    ("name", "length", "events_of_it", "at_most"),
    [("step {}", 1, 10_000, 0.75), ("histogram", 100_000, 300, 4)],
)
@pytest.mark.usefixtures("weeks")
def test_a_trainers_own_events_cannot_fill_disks(path, name, length, events_of_it, at_most):
    """Neither those with a name for each step nor large ones."""
    journal = Journal(path)
    for step in range(events_of_it):
        journal.write(UserEvent(name.format(step), {"step": step, "values": "x" * length}), 1)
    journal.write(JobEnded("completed"))
    assert path.stat().st_size < at_most * 1024**2
    steps = [event["fields"]["step"] for event in events(path)[:-1]]
    assert (steps[0], steps[-1]) == (0, events_of_it - 1)


def test_a_slow_disk_delays_neither_lines_nor_summary(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(os, "fsync", lambda fd: waits.append(read_summary(tmp_path)))
    Journal(tmp_path / "journal.jsonl").write(JobEnded("failed", "a reason"))
    assert not waits
    Summary("failed", tmp_path, "a reason").write()
    assert waits
    assert None not in waits, "it is written before the disk is waited for"
