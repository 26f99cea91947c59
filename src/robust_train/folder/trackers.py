"""Experiment trackers continue one run through all attempts and launches of a job.

wandb takes our id. MLflow and trackio choose the ids and names of their runs, so the run folder
records those of an attempt's run for the attempts after it. The launcher reads that note in
`tracker_environment`, and the process that trains writes it by `TrackerNote`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from robust_train.files import read_object, write_json

FILE = "trackers.json"
WANDB_ID = "WANDB_RUN_ID"
WANDB_RESUME = "WANDB_RESUME"
MLFLOW_ID = "MLFLOW_RUN_ID"
TRACKIO_NAME = "TRACKIO_RUN_NAME"
VARIABLES = (WANDB_ID, WANDB_RESUME, MLFLOW_ID, TRACKIO_NAME)
_WANDB_ITSELF = (WANDB_ID, WANDB_RESUME, "WANDB_SWEEP_ID")
_MLFLOW_SERVER = "MLFLOW_TRACKING_URI"
_NOTED = {MLFLOW_ID: "mlflow_run_id", TRACKIO_NAME: "trackio_run_name"}
"""The note's key for the value of each variable."""


def tracker_environment(
    environ: Mapping[str, str], run_dir: Path, job: str, *, shares_packages: bool
) -> dict[str, str]:
    """Return the variables to add to an attempt's environment. Those that the user set stay.

    A trainer that does not share the packages of this process may have wandb all the same.
    """
    variables: dict[str, str] = {}
    has_wandb = not shares_packages or importlib.util.find_spec("wandb") is not None
    if has_wandb and not any(name in environ for name in _WANDB_ITSELF):
        variables |= {WANDB_ID: job, WANDB_RESUME: "allow"}
    noted = _read_note(run_dir, job, environ.get(_MLFLOW_SERVER))
    return variables | {name: run for name, run in noted.items() if name not in environ}


def _read_note(run_dir: Path, job: str, server: str | None) -> dict[str, str]:
    """Return the runs that attempts of this job have noted, by the variables that name them."""
    note = read_object(run_dir / FILE)
    if note.get("job") != job:
        return {}
    runs = {name: note.get(key) for name, key in _NOTED.items()}
    if note.get("server") != server:
        del runs[MLFLOW_ID]  # this server does not know the run
    return {name: run for name, run in runs.items() if isinstance(run, str)}


class TrackerNote:
    """Records in the run folder the runs of MLflow and trackio that this process logs to. ``job``
    is empty if no launcher would read it."""

    def __init__(self, run_dir: Path, job: str | None) -> None:
        self._run_dir = run_dir
        self._job = job
        self._noted: dict[str, str] = {}
        # This is the launcher's value: set_tracking_uri() changes the variable in this process.
        self._server = os.environ.get(_MLFLOW_SERVER)

    def poll(self) -> None:
        """Record the active runs, if they changed."""
        if not self._job:
            return
        with contextlib.suppress(Exception):  # a tracker must not end a job
            active = _active_mlflow_run() | _active_trackio_run()
            if active.items() <= self._noted.items():
                return
            self._noted |= active
            # an earlier attempt may have noted the run of a tracker that has not begun yet
            earlier = _read_note(self._run_dir, self._job, self._server)
            runs = earlier | self._noted
            note = {
                "job": self._job,
                "server": self._server,
                **{_NOTED[name]: run for name, run in runs.items()},
            }
            write_json(self._run_dir / FILE, note)


def _active_mlflow_run() -> dict[str, str]:
    """Return the id of MLflow's active run, empty if MLflow is not used."""
    active = getattr(sys.modules.get("mlflow"), "active_run", None)
    run = active() if active is not None else None
    if run is None:
        return {}
    # a nested run ends with its parent
    return {MLFLOW_ID: run.data.tags.get("mlflow.parentRunId", run.info.run_id)}


def _active_trackio_run() -> dict[str, str]:
    """Return the name of trackio's active run, empty if trackio is not used."""
    variables = sys.modules.get("trackio.context_vars")
    current = getattr(variables, "current_run", None)
    run = current.get() if current is not None else None
    return {TRACKIO_NAME: run.name} if run is not None else {}
