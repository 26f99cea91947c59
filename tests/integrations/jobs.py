"""The examples as jobs: run to the end, under a limit of memory, and stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from world import Ended, World

# tensors come and go with the limit of memory in the open, not kept by malloc for later
NO_HOARDING = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass
class Example:
    """One example and how the tests run it.

    Attributes:
        target: dotted path of its trainer.
        arguments: overrides for every run.
        at_step: the step after which something happens, in the second epoch.
    """

    target: str
    arguments: tuple[str, ...]
    at_step: int
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def world(self, name: str) -> World:
        """A folder of its own for one job."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return World(folder).with_environ(
            {
                **NO_HOARDING,
                "EXAMPLE": self.target,
                "AT_STEP": str(self.at_step),
                "GROWTH_FILE": str(self.growth_file),
                "LAUNCHER_FILE": str(folder / "launcher.pid"),
                **self.environ,
            }
        )

    @property
    def growth_file(self) -> Path:
        return self.folder / "growth"

    def run(self, how: str, name: str, *more: str) -> Ended:
        """Run it to the job's end; ``how`` is one of ``integration_trainers``."""
        world = self.world(name).with_environ({"HOW": how})
        return world.run("trainer._target_=integration_trainers.as_told", *self.arguments, *more)

    def run_limited(self, name: str, *more: str) -> Ended:
        """With seven tenths of the memory that a step was seen to need."""
        self.environ["LIMIT_BYTES"] = str(int(self.growth_file.read_text()) * 7 // 10)
        return self.run("limited", name, *more)

    def run_stopped(self, name: str, *more: str) -> Ended:
        """Its launcher gets SIGTERM."""
        world = self.world(name).with_environ({"HOW": "stopped"})
        process = world.start(
            "trainer._target_=integration_trainers.as_told", *self.arguments, *more
        )
        Path(world.environ["LAUNCHER_FILE"]).write_text(str(process.pid))
        return world.end(process)


def stopped_and_resumed(example: Example, *more: str) -> tuple[int, Ended]:
    """Stop it with SIGTERM in the midst of an epoch, and let the same command end it.

    Returns:
        The step at which it was stopped, and the job that went on from there.
    """
    periodic = "training.checkpoint_every_steps=null"
    ended = example.run_stopped("stopped", periodic, *more)
    assert ended.returncode == 143, ended.output
    stopped_after = events(ended, "checkpoint")[-1]["step"]
    assert stopped_after >= example.at_step

    ended = example.run_stopped("stopped", periodic, *more)
    assert ended.returncode == 0, ended.output
    assert events(ended, "training_started")[-1]["step"] == stopped_after
    assert stopped_after < events(ended, "checkpoint")[-1]["step"]
    return stopped_after, ended


def went_on(ended: Ended) -> None:
    """Assert that the job halved its micro-batch at least once, and lost only a few steps."""
    assert ended.returncode == 0, ended.output
    attempts = ended.attempts
    assert len(attempts) > 1
    assert [a["action"] for a in attempts[:-1]] == ["halve_batch"] * (len(attempts) - 1)
    assert {a["effective_batch_size"] for a in attempts} == {attempts[0]["effective_batch_size"]}
    assert attempts[-1]["batch_size"] < attempts[0]["batch_size"]
    assert all("allocate memory" in a["message"] for a in attempts[:-1])
    started = [e for e in ended.journal if e["event"] == "training_started"]
    assert started[0]["step"] == 0
    assert all(event["step"] > 0 for event in started[1:])


def events(ended: Ended, name: str) -> list[dict]:
    return [event for event in ended.journal if event["event"] == name]


def recorded(journal: list[dict], name: str) -> list[dict]:
    """The fields of the trainer's own events called ``name``."""
    return [e["fields"] for e in journal if e["event"] == "user" and e["event_name"] == name]
