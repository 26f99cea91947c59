"""Attempts in processes of their own, run by the executor itself: no command, no launcher."""

import os
from dataclasses import replace

import pytest

from attempts import attempt_request
from robust_train.host.signals import SignalWatch
from robust_train.launcher.ending import add_ending
from robust_train.launcher.process import ProcessExecutor
from robust_train.model.attempt import Attempt
from robust_train.model.errors import ConfigError
from robust_train.model.events import Failed, Finished


class Attempts:
    """Runs one attempt after the other.

    Attributes:
        events: what the last one reported.
    """

    def __init__(self, folder):
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.events = []

    def run(self, path, /, *, on_event=lambda event: None, more=None, **keys):
        """Run the trainer at ``path`` once, with these keys of the config and ``more`` of what an
        attempt is given."""

        given = {"device": "cpu", "training": {"batch_size": 8}, "trainer": {}, **keys}
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        fields = {"environ": environ, "cwd": str(self.run_dir.parent), **(more or {})}
        request = attempt_request(self.run_dir, path, given, **fields)
        attempt = Attempt(1, request.spec)
        self.events = []

        def take(event):
            nonlocal attempt
            attempt = attempt.after(event)
            if not isinstance(event, (Finished, Failed)):
                self.events.append(event)
                on_event(event)

        executor = ProcessExecutor(request.trainer, request.cfg, has_standby=False, job="0-abcdef")
        try:
            process_exit = executor.run(request, take, SignalWatch())
            if isinstance(attempt.ending, Failed) and attempt.ending.config_error:
                raise ConfigError(attempt.ending.config_error)
            return add_ending(replace(attempt, exit=process_exit), request, 1.0)
        finally:
            executor.close()


@pytest.fixture
def attempts(tmp_path):
    """A run folder to run attempts in."""
    return Attempts(tmp_path)
