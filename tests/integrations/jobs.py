"""The examples as jobs: run to the end, under a limit of memory, and stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

import integration_trainers
from robust_train.attempt.run import MicroBatchPlan, Run
from robust_train.config.checks import unchecked
from world import Ended, World

# What half a batch needs is well below the limit, and what comes and goes by itself (8 MiB for
# the stack of a new thread) well below the other half.
WIDE = "model.width=128"

Weights = Callable[[list[dict[str, Any]]], dict[str, Any]]

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

    def run_here(self, monkeypatch: Any, *more: str) -> list[dict[str, Any]]:
        """Run it from start to end in this process; its events."""
        monkeypatch.setenv("EXAMPLE", self.target)
        events: list[dict[str, Any]] = []
        run = Run(run_dir=self.folder / "here", report=lambda event: events.append(event.as_json()))
        with initialize_config_module("robust_train.configs", version_base="1.3"):
            cfg = compose("config", overrides=["device=cpu", *self.arguments, *more])
        run.micro_batch_plan = MicroBatchPlan.of(unchecked(cfg))
        integration_trainers.example(cfg, run)
        return events

    def run(self, how: str, name: str, *more: str, stop_step: int = 0) -> Ended:
        """Run it by the real command; ``how`` is one of ``integration_trainers``.

        Its launcher gets SIGTERM after ``stop_step`` of the first attempt, unless that is 0.
        """
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        launcher_file = folder / "launcher.pid"
        world = World(folder).with_environ(
            {
                **NO_HOARDING,
                "HOW": how,
                "EXAMPLE": self.target,
                "AT_STEP": str(self.at_step),
                "STOP_STEP": str(stop_step),
                "GROWTH_FILE": str(folder / "growth"),
                "LAUNCHER_FILE": str(launcher_file),
            }
        )
        target = "trainer._target_=integration_trainers.as_told"
        if not stop_step:
            return world.run(target, *self.arguments, *more)
        process = world.start(target, *self.arguments, *more)
        launcher_file.write_text(str(process.pid))
        return world.end(process)


def stopped_and_resumed(example: Example, name: str, how: str, stop_step: int, *more: str) -> Ended:
    """Stop it with SIGTERM, and let the same command end it; what that has left.

    ``name`` is a folder's, which no other run of the example has.
    """
    periodic = "training.checkpoint_every_steps=null"
    ended = example.run(how, name, periodic, *more, stop_step=stop_step)
    assert ended.returncode == 143, ended.output
    stopped_after = events(ended.journal, "checkpoint")[-1]["step"]
    assert stopped_after >= stop_step

    before = len(ended.journal)
    ended = example.run(how, name, periodic, *more, stop_step=stop_step)
    assert ended.returncode == 0, ended.output
    again = ended.journal[before:]
    assert events(again, "training_started")[0]["step"] == stopped_after
    assert stopped_after < events(again, "checkpoint")[-1]["step"]
    return ended


def went_on(ended: Ended) -> None:
    """Assert that the job halved its micro-batch at least once, and lost only a few steps."""
    assert ended.returncode == 0, ended.output
    attempts = [a for a in ended.attempts if a["outcome"] != "interrupted"]
    assert len(attempts) > 1
    assert [a["action"] for a in attempts[:-1]] == ["halve_batch"] * (len(attempts) - 1)
    assert {a["effective_batch_size"] for a in attempts} == {attempts[0]["effective_batch_size"]}
    assert attempts[-1]["batch_size"] < attempts[0]["batch_size"]
    assert all("allocate memory" in a["message"] for a in attempts[:-1])
    started = events(ended.journal, "training_started")
    assert started[0]["step"] == 0
    assert all(event["step"] > 0 for event in started[1:])
    assert not events(ended.journal, "memory_held")
    assert "out of memory" in {e["milestone"] for e in events(ended.journal, "memory")}


def repeated_the_step(ended: Ended) -> None:
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


def two_ranks_repeat_the_step(example: Example, weights: Weights, *more: str) -> None:
    """Assert that a job of two ranks is stopped at a step of both and resumed, and repeats a step
    where memory runs out on the second, to the weights of one with enough."""
    ranks = (*TWO_RANKS, *more)
    ended = stopped_and_resumed(example, "stopped-ranks", "limited", 4, *ranks)
    repeated_the_step(ended)
    assert {a["ranks"] for a in ended.attempts} == {2}
    assert {e["rank"] for e in events(ended.journal, "micro_batch_changed")} == {1}
    # of two ranks as well: an epoch's last step may have more samples than that of one
    whole = example.run("example", "whole-ranks", *ranks)
    differ_by_rounding_alone(weights(ended.journal), weights(whole.journal))


def both_ranks_go_on_with_half(example: Example, *more: str) -> None:
    """Assert that memory that runs out between two steps of a rank ends the attempt of both."""
    ended = example.run("out_of_memory_between_steps", "ranks", *TWO_RANKS, *more)
    went_on(ended)
    assert {a["ranks"] for a in ended.attempts} == {2}
    assert "(rank 1)" in ended.attempts[0]["reason"]


def differ_by_rounding_alone(found: Any, expected: dict[str, Any], within: float = 1e-4) -> None:
    """Assert that weights are the same but for rounding, of which Adam makes much in some."""
    for name, weight in expected.items():
        assert (found[name] - weight).norm() <= within * weight.norm(), name


def events(journal: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in journal if event["event"] == name]


def recorded(journal: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The fields of the trainer's own events called ``name``."""
    return [e["fields"] for e in events(journal, "user") if e["event_name"] == name]
