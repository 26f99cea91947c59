"""What a job resumes from, whatever happened to its processes. All start the real command."""

from __future__ import annotations

import contextlib
import os
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


def test_a_function_saves_when_it_is_due(world: World):
    ended = world.run(
        "trainer._target_=saving_trainers.saves_when_due", "training.checkpoint_every_steps=10"
    )
    assert ended.summary["result"] == [10, 20, 30]
