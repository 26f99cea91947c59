"""Plans of jobs, and run folders without a job."""

from dataclasses import replace
from pathlib import Path

from robust_train.config.composition import complete
from robust_train.launcher.plan import Surroundings, plan_job
from robust_train.launcher.run_folder import RunFolder


def plan_in(run_dir, name="a job", sweep=None, **keys):
    """The plan of a job with these keys, whose trainer is not called."""
    plan = plan_job(len, complete(keys), run_dir, remedies={})
    surroundings = Surroundings(None if sweep is None else Path(sweep))
    return replace(plan, name=name, surroundings=surroundings)


def folder_in(run_dir, signals, name="a job", sweep=None):
    """The run folder of such a job; nobody is given its events."""
    plan = plan_in(run_dir, name, sweep)
    return RunFolder(plan, signals, lambda event, attempt: None)
