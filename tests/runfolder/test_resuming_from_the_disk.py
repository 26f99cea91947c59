"""What a job resumes from, whatever happened to its processes. All start the real command."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

from robust_train.folder.checkpoints import SUFFIX
from world import Ended, World, is_running, wait_until

TRAINER = "trainer._target_=saving_trainers.counts"


def steps_on_disk(folder: Path) -> list[int]:
    """The steps of the checkpoints that were reported and lie there."""
    reported = [path.with_name(path.name.removesuffix(SUFFIX)) for path in folder.glob("*.json")]
    return sorted(int(path.stem.partition("-")[2]) for path in reported if path.exists())


class Counting:
    """A job that counts for a long time, until something happens to it."""

    def __init__(self, world: World, *arguments: str) -> None:
        self.world = world
        world.environ["STEPS"] = "1000000"
        self.folder = world.run_dir / "checkpoints"
        (world.run_dir / "pid").unlink(missing_ok=True)
        self.launcher = world.start(TRAINER, *arguments)
        self.wait_for_more()
        self.attempt = int(wait_until((world.run_dir / "pid").read_text, "its pid is written"))

    def wait_for_more(self, steps: int = 3) -> None:
        """Wait for so many more checkpoints."""
        wait_until(lambda: (self.world.run_dir / "pid").exists(), "the first checkpoint")
        before = max(steps_on_disk(self.folder), default=0)
        wait_until(
            lambda: max(steps_on_disk(self.folder), default=0) >= before + steps, "more checkpoints"
        )

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def ended(self) -> int:
        """Wait until nothing of it is left; the step that it got to."""
        self.launcher.communicate(timeout=60)
        wait_until(lambda: not is_running(self.attempt), "the attempt has ended")
        return max(steps_on_disk(self.folder))

    def to_the_end(self, *arguments: str) -> Ended:
        """The same command again, with few steps left."""
        self.world.environ["STEPS"] = str(max(steps_on_disk(self.folder), default=0) + 2)
        ended = self.world.run(TRAINER, *arguments)
        assert ended.returncode == 0, ended.output
        return ended


def test_a_checkpoint_that_an_orphan_saved_is_resumed_from(world: World):
    job = Counting(world)
    job.kill(job.launcher.pid)
    got_to = job.ended()
    assert steps_on_disk(job.folder) == [got_to], "all that the journal names are gone"
    assert job.to_the_end().summary["result"] == {"first": got_to, "attempt": 2}


def test_what_was_saved_while_the_launcher_stood_still_is_resumed_from(world: World):
    job = Counting(world)
    os.kill(job.launcher.pid, signal.SIGSTOP)
    named = (world.run_dir / "journal.jsonl").read_bytes()
    job.wait_for_more(10)
    job.kill(job.attempt)
    job.kill(job.launcher.pid)
    got_to = job.ended()
    assert (world.run_dir / "journal.jsonl").read_bytes() == named
    assert job.to_the_end().summary["result"]["first"] == got_to


def test_an_older_jobs_later_checkpoints_are_set_aside(world: World):
    world.environ["STEPS"] = "3"
    assert world.run(TRAINER).returncode == 0
    folder = world.run_dir / "checkpoints"
    (folder / "step-99999999.txt").write_text("99999999")
    job = Counting(world)
    assert (folder / "earlier-1" / "step-00000003.txt").exists()
    assert (folder / "earlier-1" / "step-99999999.txt").exists()
    job.kill(job.launcher.pid)
    got_to = job.ended()
    ended = job.to_the_end()
    assert ended.summary["result"]["first"] == got_to
    assert "earlier-2" not in [path.name for path in folder.iterdir()]


def test_a_manifest_that_cannot_be_read_now_is_waited_for(world: World):
    job = Counting(world)
    job.launcher.send_signal(signal.SIGTERM)
    got_to = job.ended()
    (manifest,) = job.folder.glob("*.manifest.json")
    away = manifest.rename(world.folder / "away")
    manifest.mkdir()
    world.environ["STEPS"] = str(got_to + 2)
    again = world.start(TRAINER)
    assert again.stdout is not None
    shown = ""
    while "trying again" not in shown:
        line = again.stdout.readline()
        assert line, shown
        shown += line
    assert f"{manifest}: cannot be read now (Is a directory)" in shown
    manifest.rmdir()
    away.rename(manifest)
    ended = world.end(again)
    assert ended.returncode == 0, ended.output
    assert ended.summary["result"]["first"] == got_to


def test_a_moved_run_folder_resumes_and_a_new_job_on_request_sets_all_aside(world: World):
    job = Counting(world)
    job.launcher.send_signal(signal.SIGTERM)
    got_to = job.ended()
    world.run_dir = Path(shutil.move(world.run_dir, world.folder / "moved"))
    job.folder = world.run_dir / "checkpoints"
    assert job.to_the_end().summary["result"]["first"] == got_to
    world.environ["STEPS"] = "2"
    ended = world.run(TRAINER, "resume=false")
    assert ended.summary["result"]["first"] == 0
    assert "earlier-1 holds what an earlier job of this run folder has left" in ended.output
    assert steps_on_disk(job.folder / "earlier-1") == [got_to + 2]


def test_a_function_saves_when_it_is_due(world: World):
    ended = world.run(
        "trainer._target_=saving_trainers.saves_when_due", "training.checkpoint_every_steps=10"
    )
    assert ended.summary["result"] == [10, 20, 30]
