"""Attempts in processes of their own, run by the executor itself: no command, no launcher."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from robust_train.config.attempt import AttemptRequest
from robust_train.config.checks import checked
from robust_train.config.composition import complete
from robust_train.config.trainers import TrainerRef
from robust_train.host.signals import SignalWatch
from robust_train.launcher.ending import ended
from robust_train.launcher.process import ProcessExecutor
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError
from robust_train.model.events import Event, Failed, Finished
from robust_train.model.spec import AttemptSpec


class Attempts:
    """Runs one attempt after the other.

    Attributes:
        events: what the last one reported.
    """

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.events: list[Event] = []

    def run(self, path, /, *, on_event=lambda event: None, **keys):
        """Run the trainer at ``path`` once, with these keys of the config."""

        attempt = Attempt(1, AttemptSpec((), 8, 1))

        def take(event: Event) -> None:
            nonlocal attempt
            attempt = attempt.after(event)
            if not isinstance(event, (Finished, Failed)):
                self.events.append(event)
                on_event(event)

        given = {"device": "cpu", "training": {"batch_size": 8}, "trainer": {}, **keys}
        cfg = complete(given)
        ref = TrainerRef(path)
        self.events = []
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        request = AttemptRequest(
            trainer=ref,
            cfg=cfg,
            hydra_cfg=None,
            config=checked(cfg),
            spec=attempt.spec,
            attempt=1,
            run_dir=self.run_dir,
            resume_checkpoint=None,
            environ=environ,
            cwd=str(self.run_dir.parent),
        )
        executor = ProcessExecutor(ref, cfg, has_standby=False, job="0-abcdef")
        try:
            process_exit = executor.run(request, take, SignalWatch())
            if isinstance(attempt.ending, Failed) and attempt.ending.config_error:
                raise ConfigError(attempt.ending.config_error)
            whole = replace(attempt, exit=process_exit)
            return ended(whole, request, 1.0)
        finally:
            executor.close()


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    """A run folder to run attempts in."""
    return Attempts(tmp_path)
