"""Attempts in processes of their own, run by the executor itself: no command, no launcher."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from robust_train.config.schema import complete
from robust_train.events import Event
from robust_train.execution import at_hand, fork_server
from robust_train.execution.library_imports import libraries_of
from robust_train.execution.process import ProcessExecutor
from robust_train.execution.request import AttemptRequest
from robust_train.execution.signals import SignalWatch
from robust_train.execution.trainer_ref import TrainerRef
from robust_train.values import Outcome

# where they differ, libraries would have to be imported anew
_OF_ONE_TEST = ("PYTEST_CURRENT_TEST", "XDG_CACHE_HOME")


class Attempts:
    """Runs one attempt after the other.

    Attributes:
        events: what the last one reported.
    """

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.events: list[Event] = []

    def run(
        self,
        path: str,
        /,
        *,
        stop_grace_seconds: float = 20.0,
        on_event: Callable[[Event], None] = lambda event: None,
        **keys: Any,
    ) -> Outcome:
        """Run the trainer at ``path`` once, with these keys of the config."""

        def take(event: Event) -> None:
            self.events.append(event)
            on_event(event)

        given = {"device": "cpu", "training": {"batch_size": 8}, "trainer": {}, **keys}
        cfg = complete(given)
        ref = TrainerRef(path)
        self.events = []
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        for name in _OF_ONE_TEST:
            environ.pop(name, None)
        request = AttemptRequest(
            trainer=ref,
            cfg=cfg,
            hydra_cfg=None,
            attempt=1,
            run_dir=self.run_dir,
            resume_checkpoint=None,
            environ=environ,
            cwd=str(self.run_dir.parent),
            stop_grace_seconds=stop_grace_seconds,
        )
        with pytest.MonkeyPatch.context() as patch:
            for name in _OF_ONE_TEST:
                patch.delenv(name, raising=False)
            executor = ProcessExecutor(ref, libraries_of(ref), cfg, self.run_dir, SignalWatch())
            try:
                return executor.run(request, take)
            finally:
                executor.close(keep_server=True)


@pytest.fixture(scope="module")
def _warm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in _OF_ONE_TEST:
            patch.delenv(name, raising=False)
        with pytest.MonkeyPatch.context() as real:  # a script's server has no torch
            real.setattr(fork_server, "subprocess", subprocess)
            at_hand.warm_up(())
    yield
    at_hand.discard()


@pytest.fixture
def attempts(tmp_path: Path, _warm: None) -> Attempts:
    """A run folder whose attempts are forks of one server for all tests of a file."""
    return Attempts(tmp_path)
