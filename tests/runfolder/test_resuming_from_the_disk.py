"""What a job resumes from that was killed while its launcher stood still: the real command."""

import os
import signal

from robust_train.folder.checkpoints import SUFFIX
from world import is_running, wait_until

TRAINER = "trainer._target_=steered_trainers.counts"


def test_what_was_saved_while_the_launcher_stood_still_is_resumed_from(world):
    def saved():
        """The last step of which a checkpoint was reported and lies there."""
        manifests = (world.run_dir / "checkpoints").glob(f"*{SUFFIX}")
        paths = [path.with_name(path.name.removesuffix(SUFFIX)) for path in manifests]
        return max((int(path.stem.partition("-")[2]) for path in paths if path.exists()), default=0)

    world.environ["STEPS"] = "1000000"
    launcher = world.start(TRAINER)
    wait_until(lambda: saved() >= 3, "the first checkpoints")
    attempt = int((world.run_dir / "pid").read_text())
    os.kill(launcher.pid, signal.SIGSTOP)
    named, before = (world.run_dir / "journal.jsonl").read_bytes(), saved()
    wait_until(lambda: saved() >= before + 10, "more checkpoints")
    for pid in (attempt, launcher.pid):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate(timeout=60)
    wait_until(lambda: not is_running(attempt), "the attempt has ended")
    got_to = saved()
    assert (world.run_dir / "journal.jsonl").read_bytes() == named
    world.environ["STEPS"] = str(got_to + 2)
    assert world.run(TRAINER, code=0).summary["result"] == {"first": got_to, "attempt": 2}
