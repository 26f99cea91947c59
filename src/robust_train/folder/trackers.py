"""Lets experiment trackers continue the same run in all attempts and launches of a job.

wandb accepts the job's id as its run id. MLflow and trackio choose the ids and names of their runs
themselves, so the attempt's process records them in the run folder (:class:`TrackerNote`). Before
the next attempt, the launcher reads them and sets them as environment variables
(:func:`tracker_environment`).
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
# The key of each variable in the file.
_NOTED = {MLFLOW_ID: "mlflow_run_id", TRACKIO_NAME: "trackio_run_name"}


def tracker_environment(
    environ: Mapping[str, str], run_dir: Path, job: str, *, shares_packages: bool
) -> dict[str, str]:
    """Return the variables to add to an attempt's environment. A variable of the user stays as set.

    Args:
        environ: the launcher's environment.
        run_dir: the run folder.
        job: the job's identity.
        shares_packages: whether the trainer uses the packages of this process. Otherwise it may use
            wandb even if this process has no wandb.
    """
    variables: dict[str, str] = {}
    has_wandb = not shares_packages or importlib.util.find_spec("wandb") is not None
    if has_wandb and not any(name in environ for name in _WANDB_ITSELF):
        variables |= {WANDB_ID: job, WANDB_RESUME: "allow"}
    noted = _read_note(run_dir, job, environ.get(_MLFLOW_SERVER))
    return variables | {name: run for name, run in noted.items() if name not in environ}


def _read_note(run_dir: Path, job: str, server: str | None) -> dict[str, str]:
    """Return the runs that attempts of this job have recorded, by the variables that name them."""
    note = read_object(run_dir / FILE)
    if note.get("job") != job:
        return {}
    runs = {name: note.get(key) for name, key in _NOTED.items()}
    if note.get("server") != server:
        del runs[MLFLOW_ID]  # this server does not know the run
    return {name: run for name, run in runs.items() if isinstance(run, str)}


class TrackerNote:
    """Records the runs of MLflow and trackio to which this process logs, in the run folder.

    Args:
        run_dir: the run folder.
        job: the job's identity. Empty if no launcher would read the file, so none is written.
    """

    def __init__(self, run_dir: Path, job: str | None) -> None:
        self._run_dir = run_dir
        self._job = job
        self._noted: dict[str, str] = {}
        # Read at once, since `set_tracking_uri` changes the variable in this process later.
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
            # An earlier attempt may have recorded the run of a tracker that this attempt has not
            # started yet.
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
    # A nested run ends with its parent run, so the parent run continues.
    return {MLFLOW_ID: run.data.tags.get("mlflow.parentRunId", run.info.run_id)}


def _active_trackio_run() -> dict[str, str]:
    """Return the name of trackio's active run, empty if trackio is not used."""
    variables = sys.modules.get("trackio.context_vars")
    current = getattr(variables, "current_run", None)
    run = current.get() if current is not None else None
    return {TRACKIO_NAME: run.name} if run is not None else {}
