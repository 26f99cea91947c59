"""In the launcher, sets the variables with which trackers continue the job's run."""

from __future__ import annotations

import os
from dataclasses import replace

from robust_train.config.attempt import AttemptRequest
from robust_train.folder.trackers import tracker_environment
from robust_train.launcher.hooks import InLauncher
from robust_train.model.attempt import Attempt


class Trackers(InLauncher):
    """Passes the ids of the tracker runs to each attempt."""

    def request(self, request: AttemptRequest, attempt: Attempt) -> AttemptRequest:
        """Add the trackers' variables to the request. Only rank 0 gets them."""
        plan = self.job.plan
        variables = tracker_environment(
            os.environ,
            plan.run_dir,
            self.job.beginning.job,
            shares_packages=plan.config.traits.shares_packages,
        )
        return replace(
            request,
            environ={**request.environ, **variables},
            of_first_rank=request.of_first_rank + tuple(variables),
        )
