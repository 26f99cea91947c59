"""Experiment trackers go on in one run through all attempts and launches of a job.

wandb takes an id of ours. MLflow makes its ids itself: the run folder keeps that of the run which
an attempt has begun, for those after it.
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
WANDB_ID, WANDB_RESUME, MLFLOW_ID = (
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "MLFLOW_RUN_ID",
)
VARIABLES = (WANDB_ID, WANDB_RESUME, MLFLOW_ID)
_WANDB_ITSELF = (WANDB_ID, WANDB_RESUME, "WANDB_SWEEP_ID")
_MLFLOW_SERVER = "MLFLOW_TRACKING_URI"


def tracker_environment(
    environ: Mapping[str, str],
    run_dir: Path,
    job: str,
    *,
    is_script: bool,
) -> dict[str, str]:
    """Return what an attempt is to have in its environment, none of which the user has set.

    A function imports what is installed here; what a script can import is not known.
    """
    found: dict[str, str] = {}
    has_wandb = is_script or importlib.util.find_spec("wandb") is not None
    if has_wandb and not any(name in environ for name in _WANDB_ITSELF):
        found |= {WANDB_ID: job, WANDB_RESUME: "allow"}
    note = read_object(run_dir / FILE)
    if note.get("job") == job and note.get("server") == environ.get(
        _MLFLOW_SERVER
    ):
        run = note.get("mlflow_run_id")
        if isinstance(run, str) and MLFLOW_ID not in environ:
            found[MLFLOW_ID] = run
    return found


class TrackerNote:
    """Keeps in the run folder which run of MLflow this process logs to; ``job`` is empty where no
    launcher would read it."""

    def __init__(
        self,
        run_dir: Path,
        job: str | None,
    ) -> None:
        self._run_dir, self._job = run_dir, job
        self._noted = ""
        # as the launcher sees it: set_tracking_uri() changes the variable in this process
        self._server = os.environ.get(_MLFLOW_SERVER)

    def poll(self) -> None:
        """Record the run that is active now, if MLflow is used and it is another one."""
        active = getattr(sys.modules.get("mlflow"), "active_run", None)
        if active is None or not self._job:
            return
        with contextlib.suppress(Exception):  # curves are never worth a job
            run = active()
            # a run within another ends with it
            found = run and run.data.tags.get(
                "mlflow.parentRunId", run.info.run_id
            )
            if not found or found == self._noted:
                return
            self._noted = found
            note = {
                "job": self._job,
                "mlflow_run_id": found,
                "server": self._server,
            }
            write_json(self._run_dir / FILE, note)
