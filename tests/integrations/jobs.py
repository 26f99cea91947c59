"""The examples as jobs: run to the end, and under a limit of memory."""

from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_module

import integration_trainers
from robust_train.attempt.run import MicroBatchPlan
from robust_train.config.checks import unchecked
from watched_run import WatchedRun
from world import World

TWO_RANKS = ("num_gpus=2", "auto_device=false", "device=cpu")

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

    def run_here(self, monkeypatch, *more):
        """Run it from start to end in this process; its events."""
        monkeypatch.setenv("EXAMPLE", self.target)
        run = WatchedRun(self.folder / "here")
        with initialize_config_module("robust_train.configs", version_base="1.3"):
            cfg = compose("config", overrides=["device=cpu", *self.arguments, *more])
        run.micro_batch_plan = MicroBatchPlan.of(unchecked(cfg))
        integration_trainers.example(cfg, run)
        run.finish_saving()  # as an attempt does
        return run.events

    def run(self, how, name, *more):
        """Run it by the real command; ``how`` is one of ``integration_trainers``."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        world = World(folder).with_environ(
            {
                **NO_HOARDING,
                "EXAMPLE": self.target,
                "AT_STEP": str(self.at_step),
                "GROWTH_FILE": str(folder / "growth"),
            }
        )
        return world.run(f"trainer._target_=integration_trainers.{how}", *self.arguments, *more)


def repeated_the_step(ended):
    """Assert that the job was one attempt, in which steps were split and none was lost."""
    assert ended.returncode == 0, ended.output
    (attempt,) = [a for a in ended.attempts if a["outcome"] != "interrupted"]
    assert attempt["outcome"] == "completed"
    changed = [e for e in events(ended.journal, "micro_batch_changed") if e["training"]]
    # less where the first to run out is an epoch's last step, which may be shorter
    assert changed[0]["before"] <= attempt["batch_size"]
    assert [e["before"] for e in changed[1:]] == [e["after"] for e in changed[:-1]]
    assert all(e["after"] < e["before"] for e in changed)
    assert "allocate memory" in changed[0]["reason"]
    assert not events(ended.journal, "memory_held")


def differ_by_rounding_alone(found, expected, within=1e-4):
    """Assert that weights are the same but for rounding, of which Adam makes much in some."""
    for name, weight in expected.items():
        assert (found[name] - weight).norm() <= within * weight.norm(), name


def events(journal, name):
    return [event for event in journal if event["event"] == name]


def recorded(journal, name):
    """The fields of the trainer's own events called ``name``."""
    return [e["fields"] for e in events(journal, "user") if e["event_name"] == name]
