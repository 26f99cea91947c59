"""What a job finds after a power cut, at every moment of its work.

Only what was synchronised survives: a file's content by fsync of the file, its name by fsync of
its directory. Before and after each fsync and each change of a name two disks are made: one that
has kept nothing else, and one that has kept all names, but no content that was not synchronised.
"""

import os
import shutil
from pathlib import Path

import torch

from robust_train.attempt.run import Run, live_of
from robust_train.folder.identity import begin_job
from robust_train.folder.journal import Journal
from robust_train.folder.state import Summary, read_summary
from robust_train.model.events import AttemptStarted, JobEnded, Progress
from robust_train.model.spec import AttemptSpec

STEPS = 4


def names_in(folder):
    return {item.name: item.stat().st_ino for item in folder.iterdir()}


class Disk:
    """A directory whose synchronised content is known.

    Attributes:
        cuts: what power cuts would have left so far, each with what was promised by then.
    """

    def __init__(self, root, copies, monkeypatch):
        self.root, self.promised = root, (0, False)
        self.cuts = []
        self._copies = copies
        self._content = {}
        self._names = {root.stat().st_ino: {}}
        self._open = []  # so that no number of a file is used again
        for name in ("replace", "rename", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._cutting(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._cutting(os.fsync, self._sync))

    def _cutting(self, call, work=lambda *_: None):
        def watched(*arguments, **options):
            self.cut()
            result = call(*arguments, **options)
            work(*arguments)
            self.cut()
            return result

        return watched

    def _sync(self, fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        number = os.fstat(fd).st_ino
        self._open.append(os.dup(fd))
        if path.is_dir():
            self._names[number] = names_in(path)
        else:
            self._content[number] = path.read_bytes()

    def cut(self):
        folders = [self.root, *(item for item in self.root.rglob("*") if item.is_dir())]
        now = {folder.stat().st_ino: names_in(folder) for folder in folders}
        for names in (self._names, now):
            copy = self._copies / str(len(self.cuts))
            self._copy(self.root.stat().st_ino, copy, names, now)
            self.cuts.append((copy, self.promised))

    def _copy(self, number, to, names, now):
        if number not in names and number not in now:
            to.write_bytes(self._content.get(number, b""))
            return
        real_mkdir(to)
        for name, inner in names.get(number, {}).items():
            self._copy(inner, to / name, names, now)

    def close(self):
        for fd in self._open:
            os.close(fd)


real_mkdir = os.mkdir


def work(disk):
    """A short job: what a launcher and its attempt write, in this process."""
    run_dir = disk.root / "outputs" / "run"
    run_dir.mkdir(parents=True)
    begun = begin_job(run_dir, resume=True)
    journal = Journal(run_dir / "journal.jsonl")
    journal.write(AttemptStarted(AttemptSpec((), 8, 1)), 1)
    run = Run(run_dir=run_dir, report=lambda event: journal.write(event, 1))
    assert live_of(run).saving.job == begun.job
    folder = live_of(run).saves.folder(1)
    for step in range(1, STEPS + 1):
        journal.write(Progress(step), 1)
        folder.save({"step": step, "weights": torch.full((100,), float(step))}, step)
        disk.promised = (step, False)
    journal.write(JobEnded("failed", "for a test"))
    Summary("failed", run_dir, "for a test").write()
    disk.promised = (STEPS, True)


def test_power_cuts_spare_the_last_reported_checkpoint(tmp_path, monkeypatch):
    root, copies = tmp_path / "disk", tmp_path / "cuts"
    root.mkdir()
    copies.mkdir()
    with monkeypatch.context() as patched:
        disk = Disk(root, copies, patched)
        work(disk)
        disk.cut()
    disk.close()
    assert len(disk.cuts) > 100
    seen = set()
    for copy, (step, has_summary) in disk.cuts:
        run_dir = copy / "outputs" / "run"
        assert not has_summary or read_summary(run_dir) is not None, copy
        run_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = begin_job(run_dir, resume=True).checkpoint
        reached = 0 if checkpoint is None else torch.load(checkpoint, weights_only=True)["step"]
        assert step <= reached <= step + 1, copy
        assert checkpoint is None or checkpoint.name == f"step-{reached:08d}.pt"
        seen.add(reached)
    assert seen == set(range(STEPS + 1))
    shutil.rmtree(copies)
